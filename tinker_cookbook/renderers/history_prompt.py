"""For formats that write the last message of a conversation in another way than earlier ones.

A message is the last one only where nothing follows it. In a prompt the message that is asked for follows, so there
every message that is present is history, as in the chat templates of these formats.
"""

from __future__ import annotations

from tinker_cookbook.renderers.base import Renderer, merge_text_chunks, text_chunk
from tinker_cookbook.renderers.decoding import encode_text
from tinker_cookbook.renderers.types import Message, Role
from tinker_cookbook.utils.lazy import tinker


class HistoryPromptRenderer(Renderer):
    """A renderer whose prompts hold no last message. A mixin: put it before the other bases."""

    def build_generation_prompt(
        self, messages: list[Message], role: Role = "assistant", prefill: str | None = None
    ) -> tinker.ModelInput:
        """The prompt that asks `role` for the next message, which begins with the text `prefill` if given.

        Special tokens that `prefill` spells are special tokens in the prompt.
        """
        contexts = self._contexts([*messages, Message(role=role, content="")])
        chunks: list[tinker.ModelInputChunk | None] = [text_chunk(self._bos_tokens)]
        for message, ctx in zip(messages, contexts[:-1], strict=True):
            rendered = self.render_message(message, ctx)
            chunks += [rendered.header, *rendered.output]
        chunks.append(text_chunk(self._get_generation_suffix(role, contexts[-1])))
        chunks.append(text_chunk(encode_text(self.tokenizer, prefill or "")))
        return tinker.ModelInput(chunks=merge_text_chunks([chunk for chunk in chunks if chunk is not None]))
