"""The plain format for base models: `User: ...`, `Assistant: ...`, a blank line between.

    User: What is 1+1?

    Assistant: 2

    User:

A response ends where the model begins the next user message. There are no special tokens, tools or thinking.
"""

from dataclasses import replace

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.content import ensure_text
from tinker_cookbook.renderers.decoding import decode_tokens
from tinker_cookbook.renderers.formats import FormatRenderer, Row
from tinker_cookbook.renderers.renderer import RenderContext, RenderedMessage, text_chunk
from tinker_cookbook.renderers.types import Message, ParseTermination

_STOP = "\n\nUser:"


class RoleColonRenderer(FormatRenderer):
    """Base models: no special tokens except BOS; a turn ends where the next user turn begins."""

    format_name, roles, names_speakers = "role_colon", ("system", "user", "assistant"), True
    has_extension_property = True

    @property
    def _bos_tokens(self) -> list[int]:
        bos = self.tokenizer.bos_token_id
        return [bos] if isinstance(bos, int) else []

    def get_stop_sequences(self) -> list[str]:
        return [_STOP]

    def _write(self, message: Message, ctx: RenderContext) -> tuple[Row, Row]:
        text = ensure_text(message["content"])
        if message["role"] == "assistant" and _STOP in text:
            raise RendererError(f"an assistant message holds role_colon's stop sequence {_STOP!r}; remove it there")
        return [f"{message['role'].capitalize()}:"], [f" {text}\n\n"]

    def render_message(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        rendered = super().render_message(message, ctx)
        overlap = text_chunk(self.encode_text("User:")) if message["role"] == "assistant" else None
        return replace(rendered, stop_overlap=overlap)

    def parse_response(self, response: list[int]) -> tuple[Message, ParseTermination]:
        """STOP_SEQUENCE when the last token completes the stop, EOS after the end-of-text token, else MALFORMED.

        The text keeps its white space, except for the one space that follows `Assistant:`.
        """
        tokens = self._normalize_response_tokens(response)
        eos = self.tokenizer.eos_token_id
        ended = bool(tokens) and tokens[-1] == eos
        text, stop, _ = decode_tokens(self.tokenizer, tokens[:-1] if ended else tokens).partition(_STOP)
        if not stop:
            termination = ParseTermination.EOS if ended else ParseTermination.MALFORMED
        elif _STOP in decode_tokens(self.tokenizer, tokens[:-1]):
            # Sampling did not stop at the stop sequence: this is not a response to one of our prompts.
            termination = ParseTermination.MALFORMED
        else:
            termination = ParseTermination.STOP_SEQUENCE
        return Message(role="assistant", content=text.removeprefix(" ")), termination
