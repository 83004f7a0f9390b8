"""What the server wants of a chat format: messages to tokens, tokens to a message. Whoever starts the server hands formats in
(`ChatFormats`); without them, or where they know none for a model, it is the chat template of the model's tokenizer.

Messages, tools and replies have OpenAI's form. Content of messages is text here, or parts where there are pictures, and null
nowhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

import tinker
from transformers import PreTrainedTokenizerBase

from tinker_local_backend.errors import RequestError
from tinker_local_backend.server.chat_text import ChatText
from tinker_local_backend.server.openai_schemas import ChatBody, Message, TextPart, text_of
from tinker_local_backend.server.template_format import TemplateFormat

PICTURE = -1
"""Stands for a position of a picture among token ids."""

CallPiece = str | int | re.Pattern[str] | None
"""A text, the id of a token, a pattern; None: the JSON of a call's arguments."""


class ReplyStream(Protocol):
    """A reply while its tokens arrive."""

    def feed(self, tokens: Sequence[int]) -> tuple[str, str]:
        """(content, reasoning) that became certain. All that was given out begins the content and the reasoning of the whole
        reply. The exception is a reply whose prompt opened its reasoning and that never closes it: what was given out as
        reasoning is content in the end, if the model ended its turn."""
        ...


class ChatFormat(Protocol):
    """The format of a model's chats, or of one request. Methods raise ValueError, naming the field, for what cannot be done."""

    @property
    def name(self) -> str: ...

    @property
    def stops(self) -> Sequence[int | str]:
        """What ends a reply besides the model's end-of-sequence tokens."""
        ...

    def for_request(
        self,
        tools: Sequence[Mapping[str, Any]] | None,
        reasoning_effort: str | None,
        options: Mapping[str, bool | str],
    ) -> ChatFormat:
        """The format of one request. `tools`: None or empty for a request without; `options`: its chat_template_kwargs."""
        ...

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int] | tinker.ModelInput:
        """Tokens up to where the assistant's reply begins; chunks where there are pictures. Without `add_generation_prompt`: up
        to the end of the last message, or, with `continue_final_message`, of its text, with which the reply goes on."""
        ...

    def read(self, tokens: Sequence[int], ended: bool = False) -> dict[str, Any]:
        """A reply as a message: `content`, and where present `reasoning_content`, `tool_calls` (with an id if the model wrote
        one), `unparsed_tool_calls` and other keys. Never raises, whatever the model wrote.

        Args:
            tokens: with the one of `stops` that ended it.
            ended: whether another of the model's end-of-sequence tokens, which is not among `tokens`, ended it.
        """
        ...

    def stream(self) -> ReplyStream: ...

    def forced_call(self, name: str) -> Sequence[CallPiece]:
        """All of a reply that calls the tool `name` and does nothing else, without its stop."""
        ...


class ChatFormats(Protocol):
    """The formats of the models that a server has. Methods raise ValueError for one that cannot be had."""

    def name_of(self, model: str, user_metadata: Mapping[str, str]) -> str | None:
        """Of a base model, or of a checkpoint with this metadata. None: the template."""
        ...

    def make(
        self, model: str, tokenizer: PreTrainedTokenizerBase, user_metadata: Mapping[str, str]
    ) -> ChatFormat | None: ...


def format_name(formats: ChatFormats | None, model: str, user_metadata: Mapping[str, str]) -> str:
    """The format's name, for people."""
    try:
        return (formats.name_of(model, user_metadata) if formats is not None else None) or TemplateFormat.name
    except ValueError as error:
        return f"none: {error}"


def format_of(
    formats: ChatFormats | None, model: str, text: ChatText, user_metadata: Mapping[str, str], body: ChatBody
) -> ChatFormat:
    """The format of one request. Raises RequestError for what it asks for and the model's format does not have."""
    tools = (
        None if body.tool_choice == "none" else [{"type": "function", "function": t.function} for t in body.tools or ()]
    )
    try:
        made = formats.make(model, text.tokenizer, user_metadata) if formats is not None else None
        chat_format: ChatFormat = TemplateFormat(text) if made is None else made
        return chat_format.for_request(tools, body.reasoning_effort, body.chat_template_kwargs or {})
    except ValueError as error:
        raise RequestError(str(error)) from None


class PicturePrompt(list[int]):
    """A prompt with pictures: its tokens, with PICTURE at the positions of pictures."""

    def __init__(self, chunks: Sequence[tinker.ModelInputChunk]):
        tokens = (
            chunk.tokens if isinstance(chunk, tinker.EncodedTextChunk) else [PICTURE] * chunk.length for chunk in chunks
        )
        super().__init__(chain.from_iterable(tokens))
        self.chunks = chunks


def rendered(
    chat_format: ChatFormat,
    messages: Sequence[Message],
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> list[int]:
    """The prompt. Raises RequestError, naming the message, for what the format does not write."""
    try:
        plain = [_plain(message, i) for i, message in enumerate(messages)]
        prompt = chat_format.prompt(plain, add_generation_prompt, continue_final_message)
        return PicturePrompt(prompt.chunks) if isinstance(prompt, tinker.ModelInput) else prompt
    except (TypeError, ValueError) as error:
        raise RequestError(str(error)) from None


def _plain(message: Message, at: int) -> dict[str, Any]:
    """The message with its content as one text and its reasoning under one name."""
    fields = message.model_dump(exclude_none=True)
    reasoning = {fields.pop(name) for name in ("reasoning", "reasoning_content") if fields.get(name)}
    if len(reasoning) > 1:
        raise ValueError(f"messages[{at}]: reasoning and reasoning_content differ; leave out one")
    if reasoning and message.role != "assistant":
        raise ValueError(f"messages[{at}]: only an assistant reasons; leave out reasoning_content")
    content = message.content or ""
    if isinstance(content, str) or all(isinstance(part, TextPart) for part in content):
        fields["content"] = text_of(content)
    return {**fields, "reasoning_content": reasoning.pop()} if reasoning else fields
