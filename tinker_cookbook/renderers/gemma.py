r"""The Gemma 2 and Gemma 3 families, text only: turns of `user` and `model`, which alternate.

    <bos><start_of_turn>user\nBe brief.\n\nWhat is 1+1?<end_of_turn>\n
    <start_of_turn>model\n2<end_of_turn>

There is no system role: a system message opens the first user turn, a blank line before the question (Gemma 3's rule;
Gemma 2's template refuses a system message). There are no tools.

As in the template, white space around user text is taken off. A model's message is kept as it was written, where the
template would take it off too: so prompts extend each other.
"""

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.base import RenderContext, RenderedMessage
from tinker_cookbook.renderers.decoding import encode_text, special_token_id
from tinker_cookbook.renderers.end_token import EndTokenRenderer, text_only
from tinker_cookbook.renderers.types import Message, Role
from tinker_cookbook.tokenizer_utils import Tokenizer

_BOS, _START, _END = "<bos>", "<start_of_turn>", "<end_of_turn>"
_SPEAKERS = {"system": "user", "user": "user", "assistant": "model"}
_MAY_FOLLOW = {"system": (None,), "user": (None, "system", "assistant"), "assistant": ("user",)}


class GemmaRenderer(EndTokenRenderer):
    """Gemma 2 and 3: turns of `user` and `model`, text only."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer, _END)
        self._bos_id = special_token_id(tokenizer, _BOS)
        special_token_id(tokenizer, _START)

    @property
    def has_extension_property(self) -> bool:
        return True

    @property
    def _bos_tokens(self) -> list[int]:
        return [self._bos_id]

    def render_message(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        role, previous = message["role"], _role_before(ctx)
        if role not in _SPEAKERS:
            raise RendererError(f"message {ctx.idx}: the Gemma format has no role {role!r}; it has user and assistant")
        if previous not in _MAY_FOLLOW[role]:
            raise RendererError(
                f"message {ctx.idx}: role {role!r} cannot follow {previous or 'nothing'!r} in the Gemma format, where "
                "user and assistant alternate, the user first, after at most one system message; merge or add messages"
            )
        text = text_only(message, ctx, "Gemma")
        if role == "system":
            # The line break goes with the text: a tokenizer joins it with line breaks that the text begins with.
            return self._rendered(self._header(role, ctx).removesuffix("\n"), f"\n{text}\n\n")
        if role == "user":
            text = text.strip()
        return self._rendered(self._header(role, ctx), text + _END)

    def _header(self, role: Role, ctx: RenderContext) -> str:
        previous = _role_before(ctx)
        if previous == "system":
            # The system message has opened the turn.
            return ""
        # The line break after <end_of_turn> belongs to the next header: the model stops at <end_of_turn>.
        return ("\n" if previous else "") + f"{_START}{_SPEAKERS[role]}\n"

    def _get_generation_suffix(self, role: Role, ctx: RenderContext) -> list[int]:
        if role not in _SPEAKERS or role == "system":
            raise RendererError(f"role={role!r} cannot be asked to speak in the Gemma format; ask user or assistant")
        if role == "assistant" and _role_before(ctx) == "system":
            raise RendererError(
                "the prompt ends with the system message, which the Gemma format writes into the first user turn: "
                "add a user message"
            )
        return encode_text(self.tokenizer, self._header(role, ctx))


def _role_before(ctx: RenderContext) -> Role | None:
    return ctx.prev_message["role"] if ctx.prev_message is not None else None
