"""Re-exports tool_use/tools.py, for scripts that import this path."""

from tinker_cookbook.tool_use.tools import Tool, ToolInput, ToolResult

__all__ = ["Tool", "ToolInput", "ToolResult"]
