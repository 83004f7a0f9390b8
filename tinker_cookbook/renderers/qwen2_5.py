"""The Qwen2.5 family (Qwen2.5 Instruct, Qwen2.5-Coder Instruct): ChatML that never goes without a system prompt.

A conversation that does not begin with a system message gets the one of the chat template, and so does a declaration
of tools without a system prompt of its own. The long-context (1M), Math and base models have another default, and so
need another renderer.
"""

from tinker_cookbook.renderers.base import RenderContext
from tinker_cookbook.renderers.chatml import END, START, ChatMLRenderer
from tinker_cookbook.renderers.types import Message, Role, ToolSpec

DEFAULT_SYSTEM_PROMPT = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."


class Qwen25Renderer(ChatMLRenderer):
    """Models that never think. A think block that is there all the same passes through as written."""

    def _header(self, role: Role, ctx: RenderContext) -> str:
        header = super()._header(role, ctx)
        if ctx.idx == 0 and role != "system":
            return f"{START}system\n{DEFAULT_SYSTEM_PROMPT}{END}\n{header}"
        return header

    def create_conversation_prefix_with_tools(self, tools: list[ToolSpec], system_prompt: str = "") -> list[Message]:
        return super().create_conversation_prefix_with_tools(tools, system_prompt or DEFAULT_SYSTEM_PROMPT)
