"""Tools for policies: declare them, run the calls of a reply, and an environment that does both."""

from tinker_cookbook.renderers import ToolSpec
from tinker_cookbook.tool_use.agent_tool_message_env import AgentToolMessageEnv, RewardFn, build_agent_tool_env
from tinker_cookbook.tool_use.ready_made import ArticleSearch, calculate
from tinker_cookbook.tool_use.tools import (
    FunctionTool,
    ToolRegistry,
    error_tool_result,
    handle_tool_call,
    simple_tool_result,
    tool,
)
from tinker_cookbook.tool_use.types import Tool, ToolError, ToolInput, ToolResult

__all__ = [
    "AgentToolMessageEnv",
    "ArticleSearch",
    "FunctionTool",
    "RewardFn",
    "Tool",
    "ToolError",
    "ToolInput",
    "ToolRegistry",
    "ToolResult",
    "ToolSpec",
    "build_agent_tool_env",
    "calculate",
    "error_tool_result",
    "handle_tool_call",
    "simple_tool_result",
    "tool",
]
