"""Tools for policies: declare them, run the calls that a reply holds, and an environment that does both."""

from tinker_cookbook.tool_use.env import RewardFn, ToolUseEnv, build_agent_tool_env
from tinker_cookbook.tool_use.ready_made import ArticleSearch, calculate
from tinker_cookbook.tool_use.tools import (
    FunctionTool,
    Tool,
    ToolError,
    ToolInput,
    ToolRegistry,
    ToolResult,
    error_tool_result,
    simple_tool_result,
    tool,
)

__all__ = [
    "ArticleSearch",
    "FunctionTool",
    "RewardFn",
    "Tool",
    "ToolError",
    "ToolInput",
    "ToolRegistry",
    "ToolResult",
    "ToolUseEnv",
    "build_agent_tool_env",
    "calculate",
    "error_tool_result",
    "simple_tool_result",
    "tool",
]
