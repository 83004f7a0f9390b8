"""The Mistral instruct formats with a Tekken tokenizer: [INST] turns, tools in control tokens, ended by </s>.

    <s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]What is 1+1?[/INST]2</s>

MistralRenderer writes version 7: Mistral Small 3 (24B-Instruct-2501) and Small 3.1 (2503). MistralV3Renderer writes
version 3: Mistral Nemo Instruct 2407 and Ministral 8B Instruct 2410, whose system prompt goes into the last question.
The source of both is the reference tokenizer, mistral-common. Not supported: models with a SentencePiece tokenizer
(7B-v0.3, Large 2411: spaces differ) and those of versions 11 and 13 (Small 3.2, Devstral, Magistral: tool calls differ).
The default system prompts in some published chat templates, which name today's date, are omitted.

Tools are declared by a message of the role `tool_declare`, which create_conversation_prefix_with_tools makes. Wherever
it is, it is rendered just before the last user message, as in training: with tools, or a version 3 system prompt, a prompt
does not extend the one before the last question.
"""

import json
import re
from collections.abc import Sequence

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.content import assistant_message, check_call, check_encodable, ensure_text, load_json
from tinker_cookbook.renderers.decoding import decode_tokens
from tinker_cookbook.renderers.formats import EndTokenRenderer, Row, Token
from tinker_cookbook.renderers.renderer import RenderContext
from tinker_cookbook.renderers.types import Message, ToolCall, ToolSpec, UnparsedToolCall
from tinker_cookbook.utils.narrowing import is_list

_TOOL_CALLS = "[TOOL_CALLS]"
_SYSTEM, _SYSTEM_END = Token("[SYSTEM_PROMPT]"), Token("[/SYSTEM_PROMPT]")
_INST, _INST_END = Token("[INST]"), Token("[/INST]")
_TOOLS, _TOOLS_END = Token("[AVAILABLE_TOOLS]"), Token("[/AVAILABLE_TOOLS]")
_RESULT, _CONTENT, _RESULT_END = Token("[TOOL_RESULTS]"), Token("[TOOL_CONTENT]"), Token("[/TOOL_RESULTS]")
_ID = re.compile(r"[A-Za-z0-9]{9}")
_CALL_START = re.compile(r'\{"name": ("(?:[^"\\]|\\.)*"), "arguments": ')
_CALL_END = re.compile(r', "id": "[A-Za-z0-9]{9}"\}(, |\]\Z)')


class MistralRenderer(EndTokenRenderer):
    """Version 7. Calls and results have an id of nine letters and digits, which the model generates for its call."""

    format_name, roles, calls_tools = "Mistral", ("system", "user", "assistant", "tool", "tool_declare"), True
    bos, end, tags = Token("<s>"), Token("</s>"), (_TOOL_CALLS,)
    control_tokens = (
        *(end, _SYSTEM, _SYSTEM_END, _INST, _INST_END),
        *(_TOOLS, _TOOLS_END, _RESULT, _CONTENT, _RESULT_END),
    )

    # Writing --------------------------------------------------------------------------------------------------------

    def _declare_tools(self, tools: list[ToolSpec], system_prompt: str) -> list[Message]:
        declared = json.dumps([{"type": "function", "function": tool} for tool in tools], ensure_ascii=False)
        system = [Message(role="system", content=system_prompt)] if system_prompt else []
        return [*system, Message(role="tool_declare", content=declared)]

    def _arranged(self, messages: list[Message]) -> list[Message]:
        """The messages in the order in which they are rendered."""
        messages = super()._arranged(messages)
        declarations = [message for message in messages if message["role"] == "tool_declare"]
        if not declarations:
            return messages
        if len(declarations) > 1:
            raise RendererError(f"{len(declarations)} messages have role 'tool_declare'; declare all tools in one")
        rest = [message for message in messages if message["role"] != "tool_declare"]
        at = self._last_user(rest, "tools are declared just before the last user message")
        return [*rest[:at], *declarations, *rest[at:]]

    def _last_user(self, messages: list[Message], why: str) -> int:
        if (at := self._last_user_index(messages)) < 0:
            raise RendererError(f"the conversation has no user message, and {why}; add one")
        return at

    def _write(self, message: Message, ctx: RenderContext) -> tuple[Row, Row]:
        if message["role"] == "assistant":
            return [], [self._assistant_body(message, ctx), self.end]
        text = ensure_text(message["content"])
        match message["role"]:
            case "system":
                return self._system(text, ctx)
            case "user":
                return [_INST], [text, _INST_END]
            case "tool_declare":
                return [_TOOLS], [text, _TOOLS_END]
            case _:
                call_id = _checked_id(message.get("tool_call_id"), f"message {ctx.idx} (tool): tool_call_id")
                return [_RESULT], [*self._tool_result(text, call_id), _RESULT_END]

    def _system(self, text: str, ctx: RenderContext) -> tuple[Row, Row]:
        return [_SYSTEM], [text, _SYSTEM_END]

    def _tool_result(self, text: str, call_id: str) -> Row:
        return [call_id, _CONTENT, text]

    def _assistant_body(self, message: Message, ctx: RenderContext) -> str:
        written = ensure_text(message["content"])
        if calls := message.get("tool_calls"):
            place = f"message {ctx.idx} (assistant): the id of a tool call"
            written += f"{_TOOL_CALLS}[{', '.join(_call_text(call, place) for call in calls)}]"
        return written + "".join(call.raw_text for call in message.get("unparsed_tool_calls", []))

    # Reading --------------------------------------------------------------------------------------------------------

    def _read_message(self, tokens: list[int]) -> Message:
        """Text, then calls. One invalid call leaves the whole block unparsed."""
        at = tokens.index(self.ids[_TOOL_CALLS]) if self.ids[_TOOL_CALLS] in tokens else len(tokens)
        calls: Sequence[ToolCall | UnparsedToolCall] = (
            parse_tool_calls(decode_tokens(self.tokenizer, tokens[at + 1 :])) if at < len(tokens) else []
        )
        return assistant_message(decode_tokens(self.tokenizer, tokens[:at]), calls)

    def _ends_text(self, token: int) -> bool:
        return token == self.ids[_TOOL_CALLS] or super()._ends_text(token)


class MistralV3Renderer(MistralRenderer):
    """Version 3: the system prompt opens the last user message, and a tool result is a JSON object."""

    control_tokens = (MistralRenderer.end, _INST, _INST_END, _TOOLS, _TOOLS_END, _RESULT, _RESULT_END)

    def _arranged(self, messages: list[Message]) -> list[Message]:
        messages = super()._arranged(messages)
        if not messages or messages[0]["role"] != "system":
            return messages
        system, rest = messages[0], messages[1:]
        at = self._last_user(rest, "the system prompt opens the last user message")
        user = rest[at]
        if system.get("trainable") != user.get("trainable"):
            raise RendererError(
                "the system message and the last user message are one in this format, "
                "but their key 'trainable' differs; give both the same"
            )
        merged = user.copy()
        merged["content"] = f"{ensure_text(system['content'])}\n\n{ensure_text(user['content'])}"
        return [*rest[:at], merged, *rest[at + 1 :]]

    def _system(self, text: str, ctx: RenderContext) -> tuple[Row, Row]:
        raise RendererError(f"message {ctx.idx}: in this format only the first message can have role 'system'")

    def _tool_result(self, text: str, call_id: str) -> Row:
        try:
            content = load_json(text)
        except ValueError:
            content = text
        return [json.dumps({"content": content, "call_id": call_id}, ensure_ascii=False)]


def parse_tool_calls(block: str) -> Sequence[ToolCall | UnparsedToolCall]:
    """Parse the text after [TOOL_CALLS]: a JSON array of objects with `name`, `arguments` (object) and `id`.

    Returns all calls, or one UnparsedToolCall for the block.
    """
    try:
        return _read_calls(block)
    except ValueError as error:
        return [UnparsedToolCall(raw_text=_TOOL_CALLS + block, error=str(error))]


def _read_calls(block: str) -> list[ToolCall]:
    items = load_json(block)
    if not is_list(items) or not items:
        raise ValueError("expected a JSON array of calls")
    calls = [check_call(item, "id") for item in items]
    for call in calls:
        if not isinstance(call.get("id"), str) or not _ID.fullmatch(call["id"]):
            raise ValueError('expected the key "id" to be nine letters and digits')
    spelled = _arguments_as_written(block) or [json.dumps(call["arguments"], ensure_ascii=False) for call in calls]
    check_encodable("".join([*spelled, *(call["name"] for call in calls)]))
    return [
        ToolCall(id=call["id"], function=ToolCall.FunctionBody(name=call["name"], arguments=arguments))
        for call, arguments in zip(calls, spelled, strict=True)
    ]


def _arguments_as_written(block: str) -> list[str] | None:
    """The model's spelling (spaces, escapes) of the arguments in a valid block of the canonical form, else None."""
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
