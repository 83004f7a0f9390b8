"""Between messages and tokens, by the chat template that comes with a base model's tokenizer.

Content cannot forge turns: where a message's text spells a control token of the tokenizer, the text's own pieces are encoded, and
no control token comes of it. Markers inside a turn (`<think>`, `<tool_call>`) stay what they are in what the assistant said, and
nowhere else.
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

TOOL_CALL_BEGIN = "<tool_call>"
_TOOL_CALL = re.compile(rf"{TOOL_CALL_BEGIN}\s*(\{{.*?\}})\s*</tool_call>", re.DOTALL)


class Texts:
    """Tokenizers of the base models, loaded when they are first needed, and the threads on which they work."""

    def __init__(self, config: ServerConfig):
        self.most = config.max_text_kib << 10
        """characters of a request, all prompts together"""
        self._loading: dict[str, asyncio.Task[ChatText]] = {}
        self.pool = Pool("tokenizing", threads=2, waiting=config.max_text_requests)

    async def of(self, base_model: str) -> ChatText:
        if base_model not in self._loading:
            self._loading[base_model] = asyncio.create_task(asyncio.to_thread(ChatText.of, base_model))
        return await asyncio.shield(self._loading[base_model])

    def check(self, text: ChatText, lengths: Sequence[int], context_length: int) -> None:
        """Before any of it is encoded: raise Refused for prompts of these lengths (in characters) that are too long."""
        fits = context_length * text.longest_token
        if max(lengths, default=0) > fits:
            raise Refused(
                400,
                f"the text has at least {max(lengths)} characters; {fits} fit into the context of {context_length} tokens",
            )
        if sum(lengths) > self.most:
            raise Refused(
                413, f"the text has at least {sum(lengths)} characters; at most {self.most} are taken (max_text_kib)"
            )


class ChatText:
    """Tokenizer and chat template of one base model. Thread-safe as far as the tokenizer is, which only reads."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self._control_ids = set(added)
        self._control = _any_of(token.content for token in added.values())
        self._delimiters = _any_of(token.content for token in added.values() if token.special)
        self.longest_token = max(map(len, tokenizer.get_vocab()), default=1)
        """characters of the longest token: fewer tokens than a text's length over this cannot spell it"""

    @classmethod
    def of(cls, model_name: str) -> ChatText:
        return cls(AutoTokenizer.from_pretrained(model_name))

    def encode(self, text: str) -> list[int]:
        """Tokens of a prompt that is plain text, with the special tokens that the tokenizer puts in front and that it spells."""
        return self.tokenizer.encode(text)

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, bool],
    ) -> list[int]:
        """Tokens up to where the assistant begins. Raises RequestError when the template does not take these messages."""
        if not self.tokenizer.chat_template:
            raise RequestError("this model's tokenizer has no chat template; use /v1/completions")
        for i, message in enumerate(messages):
            self._check_plain(message.get("tool_calls"), f"messages[{i}].tool_calls")
        self._check_plain(tools, "tools")
        # Whatever could be taken for a control token is put in after the template's own text has been encoded.
        kept: dict[str, str] = {}
        rendered = [{**message, "content": self._keep(message, kept)} for message in messages]
        arguments: dict[str, Any] = {**options, "tools": list(tools) if tools else None}
        if taken := options.keys() & inspect.signature(self.tokenizer.apply_chat_template).parameters.keys():
            raise RequestError(f"chat_template_kwargs may hold the template's own variables, not {sorted(taken)}")
        try:
            text = self.tokenizer.apply_chat_template(rendered, tokenize=False, add_generation_prompt=True, **arguments)
        except (TemplateError, TypeError, ValueError) as error:
            raise RequestError(f"the model's chat template does not take these messages: {error}") from None
        assert isinstance(text, str)
        if not kept:
            return self.tokenizer.encode(text, add_special_tokens=False)
        ids: list[int] = []
        for part in re.split(f"({'|'.join(kept)})", text):
            ids += (
                self._plain_ids(kept[part]) if part in kept else self.tokenizer.encode(part, add_special_tokens=False)
            )
        return ids

    def _check_plain(self, value: Any, where: str) -> None:
        if value and self._control.search(json.dumps(value, ensure_ascii=False)):
            raise RequestError(f"{where} spells a control token of this model; take it out")

    def _keep(self, message: Mapping[str, Any], kept: dict[str, str]) -> str | None:
        """The content, or a stand-in for it that nobody can guess."""
        content = message.get("content")
        forbidden = self._delimiters if message["role"] == "assistant" else self._control
        if not content or not forbidden.search(content):
            return content
        stand_in = f"CONTENT{secrets.token_hex(16)}"
        kept[stand_in] = content
        return stand_in

    def _plain_ids(self, text: str) -> list[int]:
        """Tokens of a text, none of them a control token: what spells one is encoded in two pieces."""
        ids: list[int] = []
        while text:
            found = self._control.search(text)
            cut = len(text) if found is None else found.start() + 1
            ids += self.tokenizer.encode(text[:cut], add_special_tokens=False)
            text = text[cut:]
        if self._control_ids.intersection(ids):
            raise RequestError(
                "a message spells a control token of this model that cannot be written in pieces; take it out"
            )
        return ids

    def text(self, tokens: Sequence[int], stops: Sequence[str] = ()) -> str:
        """What tokens say, without special tokens, up to where the first of the stop strings begins."""
        text = str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))
        return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]

    def piece(self, token: int) -> str:
        return str(self.tokenizer.decode([token]))

    def split_tool_calls(self, text: str) -> tuple[str, list[tuple[str, str]]]:
        """The text, and the calls of tools in it as (name, arguments in JSON), where a model writes them as
        `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
        calls = []
        for match in _TOOL_CALL.finditer(text):
            try:
                call = json.loads(match[1])
                calls.append((str(call["name"]), json.dumps(call["arguments"])))
            except (ValueError, KeyError, TypeError):
                return text, []  # not a call that anybody could carry out
        return _TOOL_CALL.sub("", text).strip() if calls else text, calls


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches any of these, the longest first; nothing if there are none."""
    ordered = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
