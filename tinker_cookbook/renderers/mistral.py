"""The Mistral instruct formats with a Tekken tokenizer: [INST] turns, tools in control tokens, ended by </s>.

    <s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]What is 1+1?[/INST]2</s>

MistralRenderer writes version 7: Mistral Small 3 (24B-Instruct-2501) and Small 3.1 (2503). MistralV3Renderer writes
version 3: Mistral Nemo Instruct 2407 and Ministral 8B Instruct 2410, whose system prompt goes into the last question.
The source of both is the reference tokenizer, mistral-common. Not meant: models with a SentencePiece tokenizer
(7B-v0.3, Large 2411: spaces differ) and those of versions 11 and 13 (Small 3.2, Devstral, Magistral: tool calls differ).
The default system prompts in some published chat templates, which name today's date, are left out.

Tools are declared by a message of the role `tool_declare`, which create_conversation_prefix_with_tools makes. Wherever
it stands, it is written just before the last user message, as the models were trained: with tools, or a version 3
system prompt, a prompt does not extend the one before the last question.
"""

from __future__ import annotations

import json
import re

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.base import RenderContext, RenderedMessage
from tinker_cookbook.renderers.content import ensure_text
from tinker_cookbook.renderers.decoding import decode_tokens, is_encodable, special_token_id
from tinker_cookbook.renderers.end_token import EndTokenRenderer
from tinker_cookbook.renderers.types import Message, Role, ToolCall, ToolSpec, TrainOnWhat, UnparsedToolCall
from tinker_cookbook.tokenizer_utils import Tokenizer
from tinker_cookbook.utils.lazy import tinker, torch

_BOS, _END = "<s>", "</s>"
_TOOL_CALLS = "[TOOL_CALLS]"
_ID = re.compile(r"[A-Za-z0-9]{9}")
_CALL_START = re.compile(r'\{"name": ("(?:[^"\\]|\\.)*"), "arguments": ')
_CALL_END = re.compile(r', "id": "[A-Za-z0-9]{9}"\}(, |\]\Z)')


class MistralRenderer(EndTokenRenderer):
    """Version 7. Calls and results carry an id of nine letters and digits, which the model makes up for its call."""

    _control_tokens = (
        *("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
        *("[TOOL_RESULTS]", "[TOOL_CONTENT]", "[/TOOL_RESULTS]"),
    )

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer, _END)
        self._bos_id = special_token_id(tokenizer, _BOS)
        self._calls_id = special_token_id(tokenizer, _TOOL_CALLS)
        for token in self._control_tokens:
            special_token_id(tokenizer, token)

    @property
    def _bos_tokens(self) -> list[int]:
        return [self._bos_id]

    # Writing --------------------------------------------------------------------------------------------------------

    def build_generation_prompt(
        self, messages: list[Message], role: Role = "assistant", prefill: str | None = None
    ) -> tinker.ModelInput:
        """As in Renderer, with the tool declaration before the last user message."""
        return super().build_generation_prompt(self._arranged(messages), role, prefill)

    def build_supervised_example(
        self, messages: list[Message], train_on_what: TrainOnWhat = TrainOnWhat.LAST_ASSISTANT_MESSAGE
    ) -> tuple[tinker.ModelInput, torch.Tensor]:
        """As in Renderer, with the tool declaration before the last user message."""
        return super().build_supervised_example(self._arranged(messages), train_on_what)

    def create_conversation_prefix_with_tools(self, tools: list[ToolSpec], system_prompt: str = "") -> list[Message]:
        if not tools:
            raise RendererError("tools is empty; declare at least one, or start with a plain system message")
        declared = json.dumps([{"type": "function", "function": tool} for tool in tools], ensure_ascii=False)
        system = [Message(role="system", content=system_prompt)] if system_prompt else []
        return [*system, Message(role="tool_declare", content=declared)]

    def _arranged(self, messages: list[Message]) -> list[Message]:
        """The messages in the order in which they are written."""
        declarations = [message for message in messages if message["role"] == "tool_declare"]
        if not declarations:
            return messages
        if len(declarations) > 1:
            raise RendererError(f"{len(declarations)} messages have role 'tool_declare'; declare all tools in one")
        rest = [message for message in messages if message["role"] != "tool_declare"]
        at = _last_user(rest, "tools are declared just before the last user message")
        return [*rest[:at], *declarations, *rest[at:]]

    def render_message(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        role = message["role"]
        if role == "assistant":
            return self._rendered("", self._assistant_body(message, ctx) + _END)
        if message.get("tool_calls") or message.get("unparsed_tool_calls"):
            raise RendererError(f"message {ctx.idx}: only an assistant message can call tools, not role {role!r}")
        text = ensure_text(message["content"])
        match role:
            case "system":
                return self._system(text, ctx)
            case "user":
                return self._rendered("[INST]", f"{text}[/INST]")
            case "tool_declare":
                return self._rendered("[AVAILABLE_TOOLS]", f"{text}[/AVAILABLE_TOOLS]")
            case "tool":
                call_id = _checked_id(message.get("tool_call_id"), f"message {ctx.idx} (tool): tool_call_id")
                return self._rendered("[TOOL_RESULTS]", f"{self._tool_result(text, call_id)}[/TOOL_RESULTS]")
        raise RendererError(
            f"message {ctx.idx}: the Mistral format has no role {role!r}; "
            "it has system, user, assistant, tool and tool_declare"
        )

    def _system(self, text: str, ctx: RenderContext) -> RenderedMessage:
        return self._rendered("[SYSTEM_PROMPT]", f"{text}[/SYSTEM_PROMPT]")

    def _tool_result(self, text: str, call_id: str) -> str:
        return f"{call_id}[TOOL_CONTENT]{text}"

    def _assistant_body(self, message: Message, ctx: RenderContext) -> str:
        written = ensure_text(message["content"])
        if calls := message.get("tool_calls"):
            place = f"message {ctx.idx} (assistant): the id of a tool call"
            written += f"{_TOOL_CALLS}[{', '.join(_call_text(call, place) for call in calls)}]"
        return written + "".join(call.raw_text for call in message.get("unparsed_tool_calls", []))

    # Reading --------------------------------------------------------------------------------------------------------

    def _read_message(self, tokens: list[int]) -> Message:
        """Text, then calls. Calls are read all or none: one that is amiss leaves the whole block unparsed."""
        at = tokens.index(self._calls_id) if self._calls_id in tokens else len(tokens)
        message = Message(role="assistant", content=decode_tokens(self.tokenizer, tokens[:at]))
        if at < len(tokens):
            calls = parse_tool_calls(decode_tokens(self.tokenizer, tokens[at + 1 :]))
            if isinstance(calls, UnparsedToolCall):
                message["unparsed_tool_calls"] = [calls]
            else:
                message["tool_calls"] = calls
        return message

    def _ends_text(self, token: int) -> bool:
        return token == self._calls_id or super()._ends_text(token)


class MistralV3Renderer(MistralRenderer):
    """Version 3: the system prompt opens the last user message, and a tool result is a JSON object."""

    _control_tokens = (
        "[INST]",
        "[/INST]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
    )

    def _arranged(self, messages: list[Message]) -> list[Message]:
        messages = super()._arranged(messages)
        if not messages or messages[0]["role"] != "system":
            return messages
        system, rest = messages[0], messages[1:]
        at = _last_user(rest, "the system prompt opens the last user message")
        user = rest[at]
        if system.get("trainable") != user.get("trainable"):
            raise RendererError(
                "the system message and the last user message are one in this format, "
                "but their key 'trainable' differs; give both the same"
            )
        merged = user.copy()
        merged["content"] = f"{ensure_text(system['content'])}\n\n{ensure_text(user['content'])}"
        return [*rest[:at], merged, *rest[at + 1 :]]

    def _system(self, text: str, ctx: RenderContext) -> RenderedMessage:
        raise RendererError(f"message {ctx.idx}: in this format only the first message can have role 'system'")

    def _tool_result(self, text: str, call_id: str) -> str:
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            content = text
        return json.dumps({"content": content, "call_id": call_id}, ensure_ascii=False)


def parse_tool_calls(block: str) -> list[ToolCall] | UnparsedToolCall:
    """Read what follows [TOOL_CALLS]: a JSON array of objects with `name`, `arguments` (object) and `id`."""

    def unparsed(error: str) -> UnparsedToolCall:
        return UnparsedToolCall(raw_text=_TOOL_CALLS + block, error=error)

    try:
        items = json.loads(block)
    except (ValueError, RecursionError) as error:
        return unparsed(f"not valid JSON: {error}")
    if not isinstance(items, list) or not items:
        return unparsed("expected a JSON array of calls")
    for item in items:
        if not isinstance(item, dict) or not isinstance(item.get("name"), str):
            return unparsed('expected each call to be a JSON object with the string key "name"')
        if not isinstance(item.get("arguments"), dict):
            return unparsed('expected the key "arguments" to be a JSON object')
        if not isinstance(item.get("id"), str) or not _ID.fullmatch(item["id"]):
            return unparsed('expected the key "id" to be nine letters and digits')
        if extra := sorted(set(item) - {"name", "arguments", "id"}):
            return unparsed(f"unexpected keys {extra}; a call has name, arguments and id only")
    spelled = _arguments_as_written(block) or [json.dumps(item["arguments"], ensure_ascii=False) for item in items]
    if not is_encodable("".join([*spelled, *(item["name"] for item in items)])):
        return unparsed("an escape in it stands for half a character, which is no valid text")
    return [
        ToolCall(id=item["id"], function=ToolCall.FunctionBody(name=item["name"], arguments=arguments))
        for item, arguments in zip(items, spelled, strict=True)
    ]


def _arguments_as_written(block: str) -> list[str] | None:
    """The model's own spelling (spaces, escapes) of the arguments in a valid block of the canonical shape, else None."""
    spelled: list[str] = []
    at = 1
    while start := _CALL_START.match(block, at):
        try:
            _, end = json.JSONDecoder().raw_decode(block, start.end())
        except ValueError:
            return None
        closing = _CALL_END.match(block, end)
        if closing is None:
            return None
        spelled.append(block[start.end() : end])
        if closing.group(1) == "]":
            return spelled
        at = closing.end()
    return None


def _call_text(call: ToolCall, place: str) -> str:
    name = json.dumps(call.function.name, ensure_ascii=False)
    return f'{{"name": {name}, "arguments": {call.function.arguments}, "id": "{_checked_id(call.id, place)}"}}'


def _checked_id(call_id: str | None, place: str) -> str:
    if call_id is None or not _ID.fullmatch(call_id):
        raise RendererError(f"{place} is {call_id!r}; the Mistral format needs nine letters and digits")
    return call_id


def _last_user(messages: list[Message], why: str) -> int:
    at = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
    if at < 0:
        raise RendererError(f"the conversation has no user message, and {why}; add one")
    return at
