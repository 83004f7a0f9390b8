r"""The Gemma 2 and Gemma 3 families, text only: turns of `user` and `model`, which alternate.

    <bos><start_of_turn>user\nBe brief.\n\nWhat is 1+1?<end_of_turn>\n
    <start_of_turn>model\n2<end_of_turn>

There is no system role: a system message opens the first user turn, a blank line before the question (Gemma 3's rule;
Gemma 2's template refuses a system message). There are no tools.

As in the template, white space around user text is taken off. A model's message is kept as it was written, where the
template would take it off too: so prompts extend each other.
"""

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.content import ensure_text
from tinker_cookbook.renderers.formats import EndTokenRenderer, Row, Token
from tinker_cookbook.renderers.renderer import RenderContext
from tinker_cookbook.renderers.types import Message, Role

_START, _END = Token("<start_of_turn>"), Token("<end_of_turn>")
_SPEAKERS = {"system": "user", "user": "user", "assistant": "model"}
_MAY_FOLLOW = {"system": (None,), "user": (None, "system", "assistant"), "assistant": ("user",)}


class GemmaRenderer(EndTokenRenderer):
    """Gemma 2 and 3: turns of `user` and `model`, text only."""

    format_name, roles = "Gemma", tuple(_SPEAKERS)
    bos, end, control_tokens = Token("<bos>"), _END, (_START, _END)
    reserved_tokens = ("<eos>", "<pad>")
    has_extension_property = True

    def _write(self, message: Message, ctx: RenderContext) -> tuple[Row, Row]:
        role, previous = message["role"], _role_before(ctx)
        if previous not in _MAY_FOLLOW[role]:
            raise RendererError(
                f"message {ctx.idx}: role {role!r} cannot follow {previous or 'nothing'!r} in the Gemma format, where "
                "user and assistant alternate, the user first, after at most one system message; merge or add messages"
            )
        text = ensure_text(message["content"])
        if role == "system":
            # The line break goes with the text: a tokenizer joins it with line breaks that the text begins with.
            return [_START, _SPEAKERS[role]], [f"\n{text}\n\n"]
        return self._header(role, ctx), [text.strip() if role == "user" else text, _END]

    def _header(self, role: Role, ctx: RenderContext) -> Row:
        previous = _role_before(ctx)
        if previous == "system":
            # The system message has opened the turn.
            return []
        # The line break after <end_of_turn> belongs to the next header: the model stops at <end_of_turn>.
        return ["\n" if previous else "", _START, f"{_SPEAKERS[role]}\n"]

    def _get_generation_suffix(self, role: Role, ctx: RenderContext) -> list[int]:
        if role not in _SPEAKERS or role == "system":
            raise RendererError(f"role={role!r} cannot be asked to speak in the Gemma format; ask user or assistant")
        if role == "assistant" and _role_before(ctx) == "system":
            raise RendererError(
                "the prompt ends with the system message, which the Gemma format writes into the first user turn: "
                "add a user message"
            )
        return self._encode(self._header(role, ctx))


def _role_before(ctx: RenderContext) -> Role | None:
    return ctx.prev_message["role"] if ctx.prev_message is not None else None
