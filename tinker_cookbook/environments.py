"""Re-exports env.py, for scripts that import this path."""

from tinker_cookbook.env import (
    DatasetSettings,
    Environment,
    Rubric,
    TurnResult,
    get_env,
    known_envs,
    load,
    multi_turn_env,
    register_env,
    single_turn_env,
    tool_env,
    unregister_env,
)

__all__ = [
    "DatasetSettings",
    "Environment",
    "Rubric",
    "TurnResult",
    "get_env",
    "known_envs",
    "load",
    "multi_turn_env",
    "register_env",
    "single_turn_env",
    "tool_env",
    "unregister_env",
]
