"""Qwen3.8, text only: the format of Qwen3.5, which keeps the reasoning of earlier answers and asks for the effort of its
reasoning at the beginning of the system message."""

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.content import ensure_text
from tinker_cookbook.renderers.formats import Row
from tinker_cookbook.renderers.qwen3_5 import Qwen3_5Renderer
from tinker_cookbook.renderers.renderer import RenderContext
from tinker_cookbook.renderers.types import Content, Message, Role
from tinker_cookbook.tokenizer_utils import Tokenizer

REASONING_EFFORT_INSTRUCTIONS = {
    "xhigh": (
        "Reasoning effort is set to xhigh. Please think carefully through the task, validate key assumptions, consider "
        "plausible alternatives, and prioritize correctness, consistency, and clarity in the final answer."
    ),
    "medium": "",
    "low": (
        "Reasoning effort is set to low. Keep your thinking brief and focused, moving directly to the conclusion without "
        "unnecessary elaboration."
    ),
}
"""Reasoning effort -> how Qwen3.8 is asked for it."""


class Qwen3_8Renderer(Qwen3_5Renderer):
    """Qwen3.8. A string is text throughout, also a think block in it; an empty system message is left out."""

    json_scalars = True

    def __init__(self, tokenizer: Tokenizer, reasoning_effort: str = "xhigh") -> None:
        super().__init__(tokenizer, strip_thinking_from_history=False)
        if reasoning_effort not in REASONING_EFFORT_INSTRUCTIONS:
            raise RendererError(
                f"reasoning_effort={reasoning_effort!r} is unknown; choose one of {', '.join(REASONING_EFFORT_INSTRUCTIONS)}"
            )
        self.reasoning_effort = reasoning_effort

    @property
    def _instruction(self) -> str:
        return "" if self.disables_thinking else REASONING_EFFORT_INSTRUCTIONS[self.reasoning_effort]

    def _arranged(self, messages: list[Message]) -> list[Message]:
        opening = messages[:1]
        says_nothing = opening and opening[0]["role"] == "system" and not ensure_text(opening[0]["content"]).strip()
        return messages[1:] if says_nothing and not self._instruction else messages

    def _write(self, message: Message, ctx: RenderContext) -> tuple[Row, Row]:
        if message["role"] == "system" and ctx.idx == 0:
            text = f"{self._instruction}\n\n{ensure_text(message['content']).strip()}"
            message = {**message, "content": text}
        return super()._write(message, ctx)

    def _header(self, role: Role, ctx: RenderContext) -> Row:
        header = super()._header(role, ctx)
        if ctx.idx == 0 and role != "system" and self._instruction:
            return [*super()._header("system", ctx), f"\n{self._instruction}", self.end, "\n", *header]
        return header

    def _reasoning_and_text(self, content: Content) -> tuple[str, str]:
        return ("", content.strip()) if isinstance(content, str) else super()._reasoning_and_text(content)


class Qwen3_8DisableThinkingRenderer(Qwen3_8Renderer):
    """Qwen3.8 told not to think."""

    disables_thinking = True
    prompt_block = "<think>\n\n</think>\n\n"
