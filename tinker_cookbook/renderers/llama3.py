r"""The Llama 3 family: every message under a header of its role, ended by <|eot_id|>.

    <|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nWhat is 1+1?<|eot_id|>
    <|start_header_id|>assistant<|end_header_id|>\n\n2<|eot_id|>

This is the plain form of Llama 3.0, which the 3.1, 3.2 and 3.3 Instruct models read too. Their own chat templates also
open every conversation with a system message that names a knowledge cutoff and today's date; it is left out here, so
that a run does not depend on the day. Tools are left out on purpose: the family has no one format for them.

As in the template, white space around system and user text is taken off. An assistant message is kept as the model
wrote it, where the template would take it off too: so prompts extend each other.
"""

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.base import RenderContext, RenderedMessage
from tinker_cookbook.renderers.decoding import special_token_id
from tinker_cookbook.renderers.end_token import EndTokenRenderer, text_only
from tinker_cookbook.renderers.types import Message
from tinker_cookbook.tokenizer_utils import Tokenizer

_BOS, _END = "<|begin_of_text|>", "<|eot_id|>"
_HEADER_START, _HEADER_END = "<|start_header_id|>", "<|end_header_id|>"
_ROLES = ("system", "user", "assistant")


class Llama3Renderer(EndTokenRenderer):
    """Llama 3 Instruct: a header per role, text only."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer, _END)
        self._bos_id = special_token_id(tokenizer, _BOS)
        for token in (_HEADER_START, _HEADER_END):
            special_token_id(tokenizer, token)

    @property
    def has_extension_property(self) -> bool:
        return True

    @property
    def _bos_tokens(self) -> list[int]:
        return [self._bos_id]

    def render_message(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        role = message["role"]
        if role not in _ROLES:
            raise RendererError(
                f"message {ctx.idx}: the Llama 3 format has no role {role!r}; it has {', '.join(_ROLES)} "
                "(tool results need a model and renderer that have tools, such as qwen3)"
            )
        text = text_only(message, ctx, "Llama 3")
        if role != "assistant":
            text = text.strip()
        return self._rendered(f"{_HEADER_START}{role}{_HEADER_END}\n\n", text + _END)
