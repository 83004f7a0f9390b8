"""Messages to tokens and back, with the chat template of a base model's tokenizer.

Content cannot forge turns: if a message spells a control token, its text is encoded in pieces that give ordinary tokens. Markers
inside a turn (`<think>`, `<tool_call>`) are still encoded as control tokens in assistant messages, but in no others.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tinker_local_backend.errors import RequestError
from tinker_local_backend.server.config import ServerConfig
from tinker_local_backend.server.errors import Refused
from tinker_local_backend.server.pool import Pool

TOOL_CALL_BEGIN, TOOL_CALL_END = "<tool_call>", "</tool_call>"
_TOOL_CALL = re.compile(rf"{TOOL_CALL_BEGIN}\s*(\{{.*?\}})\s*{TOOL_CALL_END}", re.DOTALL)


class Texts:
    """Tokenizers of the base models, loaded on first use, and their threads."""

    def __init__(self, config: ServerConfig):
        self.max_characters = config.max_text_kib << 10
        """characters per request, all prompts together"""
        self._loading: dict[str, asyncio.Task[ChatText]] = {}
        self.pool = Pool("tokenizing", threads=2, waiting=config.max_text_requests)

    async def of(self, base_model: str) -> ChatText:
        if base_model not in self._loading:
            self._loading[base_model] = asyncio.create_task(asyncio.to_thread(ChatText.of, base_model))
        return await asyncio.shield(self._loading[base_model])

    def check(self, text: ChatText, lengths: Sequence[int], context_length: int) -> None:
        """Raise Refused, before encoding, if prompts of these lengths (in characters) are too long."""
        fits = context_length * text.longest_token
        if max(lengths, default=0) > fits:
            raise Refused(
                400,
                f"the text has at least {max(lengths)} characters; {fits} fit into the context of {context_length} tokens",
            )
        if sum(lengths) > self.max_characters:
            raise Refused(
                413,
                f"the text has at least {sum(lengths)} characters; at most {self.max_characters} are allowed (max_text_kib)",
            )


class ChatText:
    """Tokenizer and chat template of one base model. As thread-safe as the tokenizer, which is only read."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self._control_ids = set(added)
        self._control = _any_of(token.content for token in added.values())
        self._delimiters = _any_of(token.content for token in added.values() if token.special)
        self.longest_token = max(map(len, tokenizer.get_vocab()), default=1)
        """characters of the longest token; a text has at least length / longest_token tokens"""

    @classmethod
    def of(cls, model_name: str) -> ChatText:
        return cls(AutoTokenizer.from_pretrained(model_name))

    def encode(self, text: str) -> list[int]:
        """Tokens of a plain text prompt, with the special tokens that the tokenizer adds and that the text spells."""
        return self.tokenizer.encode(text)

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, bool | str],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Tokens up to the start of the assistant's turn, or to the end of the last message or its text.
        Raises RequestError if the template rejects the messages."""
        if not self.tokenizer.chat_template:
            raise RequestError("this model's tokenizer has no chat template; use /v1/completions")
        # Text that spells a control token is replaced by a placeholder, and encoded apart from the template's text.
        kept: dict[str, str] = {}
        rendered = [{**message, "content": self._keep(message, kept)} for message in messages]
        spelled: dict[str, str] = {}
        for i, message in enumerate(rendered):
            for key in message.keys() & {"tool_calls", "reasoning_content", "name", "tool_call_id"}:
                message[key] = self._keep_spelled(message[key], spelled, f"messages[{i}].{key}")
        declared = self._keep_spelled(list(tools), spelled, "tools") if tools else None
        kept |= {placeholder: token for token, placeholder in spelled.items()}
        arguments: dict[str, Any] = {**options, "tools": declared}
        ending = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        if taken := options.keys() & inspect.signature(self.tokenizer.apply_chat_template).parameters.keys():
            raise RequestError(f"chat_template_kwargs may hold the template's own variables, not {sorted(taken)}")
        try:
            text = self.tokenizer.apply_chat_template(rendered, tokenize=False, **ending, **arguments)
        except (TemplateError, TypeError, ValueError) as error:
            raise RequestError(f"the model's chat template rejects these messages: {error}") from None
        assert isinstance(text, str)
        if not kept:
            return self.tokenizer.encode(text, add_special_tokens=False)
        ids: list[int] = []
        for part in re.split(f"({'|'.join(kept)})", text):
            ids += (
                self._plain_ids(kept[part]) if part in kept else self.tokenizer.encode(part, add_special_tokens=False)
            )
        return ids

    def _keep_spelled(self, value: Any, spelled: dict[str, str], where: str) -> Any:
        """A copy of a JSON value in which unguessable placeholders replace all control tokens that its texts spell.

        The template may write the value as JSON. Raises RequestError for a token that JSON would escape.
        """
        if isinstance(value, Mapping):
            pairs = [(self._keep_spelled(key, spelled, where), one) for key, one in value.items()]
            return {key: self._keep_spelled(one, spelled, where) for key, one in pairs}
        if isinstance(value, list):
            return [self._keep_spelled(one, spelled, where) for one in value]
        if not isinstance(value, str):
            return value

        def placeholder(match: re.Match[str]) -> str:
            token = match.group()
            if json.dumps(token, ensure_ascii=False) != f'"{token}"':
                raise RequestError(f"{where} spells a control token of this model; take it out")
            return spelled.setdefault(token, f"CONTENT{secrets.token_hex(16)}")

        return self._control.sub(placeholder, value)

    def _keep(self, message: Mapping[str, Any], kept: dict[str, str]) -> str | None:
        """The content, or an unguessable placeholder if it spells a forbidden token."""
        content = message.get("content")
        forbidden = self._delimiters if message["role"] == "assistant" else self._control
        if not content or not forbidden.search(content):
            return content
        placeholder = f"CONTENT{secrets.token_hex(16)}"
        kept[placeholder] = content
        return placeholder

    def _plain_ids(self, text: str) -> list[int]:
        """Tokens of a text without control tokens: text that spells one is encoded in two pieces."""
        ids: list[int] = []
        while text:
            match = self._control.search(text)
            cut = len(text) if match is None else match.start() + 1
            ids += self.tokenizer.encode(text[:cut], add_special_tokens=False)
            text = text[cut:]
        if self._control_ids.intersection(ids):
            raise RequestError("a message spells a control token of this model that cannot be split; take it out")
        return ids

    def text(self, tokens: Sequence[int], stops: Sequence[str] = ()) -> str:
        """The text of tokens, without special tokens, up to the first stop string."""
        return self.cut(str(self.tokenizer.decode(list(tokens), skip_special_tokens=True)), stops)

    @staticmethod
    def cut(text: str, stops: Sequence[str]) -> str:
        """The text up to the first stop string."""
        return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]

    def piece(self, token: int) -> str:
        return str(self.tokenizer.decode([token]))

    def split_tool_calls(self, text: str) -> tuple[str, list[tuple[str, str]]]:
        """The rest of the text, and its tool calls as (name, JSON arguments), written as
        `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
        calls = []
        for match in _TOOL_CALL.finditer(text):
            try:
                call = json.loads(match[1])
                calls.append((str(call["name"]), json.dumps(call["arguments"])))
            except (ValueError, KeyError, TypeError):
                return text, []  # not a valid call
        return _TOOL_CALL.sub("", text).strip() if calls else text, calls


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches any of these texts, preferring the longest; matches nothing if there are none."""
    ordered = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
