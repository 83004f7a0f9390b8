"""Re-exports tool_use/env.py, for scripts that import this path."""

from tinker_cookbook.tool_use.env import RewardFn, build_agent_tool_env

__all__ = ["RewardFn", "build_agent_tool_env"]
