"""Tools for policies: declare them, run the calls that a reply holds, and an environment that does both."""

from tinker_cookbook.tool_use.env import ToolUseEnv
from tinker_cookbook.tool_use.ready_made import ArticleSearch, calculate
from tinker_cookbook.tool_use.tools import FunctionTool, Tool, ToolError, ToolRegistry, function_tool

__all__ = [
    "ArticleSearch",
    "FunctionTool",
    "Tool",
    "ToolError",
    "ToolRegistry",
    "ToolUseEnv",
    "calculate",
    "function_tool",
]
