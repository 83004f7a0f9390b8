r"""The Llama 3 family: every message under a header of its role, ended by <|eot_id|>.

    <|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nWhat is 1+1?<|eot_id|>
    <|start_header_id|>assistant<|end_header_id|>\n\n2<|eot_id|>

This is the plain form of Llama 3.0, which the 3.1, 3.2 and 3.3 Instruct models understand too. Their chat templates also
open every conversation with a system message that names a knowledge cutoff and today's date; it is omitted here, so that
a run does not depend on the date. Llama3Renderer has no tools, because the family has no single format for them; a JSON
reply is an ordinary answer.

Llama3ToolsRenderer adds the JSON form of the chat templates of 3.1, 3.2 and 3.3. Tools are declared in the first user message,
and a call is a whole message, one at a time:

    <|start_header_id|>assistant<|end_header_id|>\n\n{"name": "add", "parameters": {"a": 1}}<|eot_id|>
    <|start_header_id|>ipython<|end_header_id|>\n\n"2"<|eot_id|>

The templates' built-in tools (`<|python_tag|>`, code) are not supported. Without tools, both renderers give the same tokens.

As in the template, system and user text is stripped. Assistant messages are kept verbatim, although the template strips
them too, so that prompts extend each other.
"""

import json
import re

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.blocks import BlockKind, BlockScanner, Piece
from tinker_cookbook.renderers.content import assistant_message, check_encodable, ensure_text, load_json
from tinker_cookbook.renderers.decoding import decode_tokens
from tinker_cookbook.renderers.formats import EndTokenRenderer, Row, Token
from tinker_cookbook.renderers.renderer import RenderContext
from tinker_cookbook.renderers.types import Message, ToolCall, ToolSpec, UnparsedToolCall

_HEADER_START, _HEADER_END = Token("<|start_header_id|>"), Token("<|end_header_id|>")
_CALL_BEGIN = ("{", '"name"', ":")
"""Start of a call; white space may separate the parts."""
_CANONICAL_CALL = re.compile(r'\{"name": "([^"\\]+)", "parameters": (.*)\}', re.DOTALL)
# The wording that the models were trained with.
_ENVIRONMENT = "Environment: ipython"
_TOOLS_PROMPT = (
    "Given the following functions, please respond with a JSON for a function call with its proper arguments that best answers "
    'the given prompt.\n\nRespond in the format {"name": function name, "parameters": dictionary of argument name and its '
    "value}.Do not use variables.\n\n"
)


class Llama3Renderer(EndTokenRenderer):
    """Llama 3 Instruct: a header per role, text only."""

    format_name, roles = "Llama 3", ("system", "user", "assistant")
    names_speakers = True
    bos, end = Token("<|begin_of_text|>"), Token("<|eot_id|>")
    control_tokens = (_HEADER_START, _HEADER_END, end)
    reserved_tokens = ("<|end_of_text|>", "<|eom_id|>")
    has_extension_property = True

    def _write(self, message: Message, ctx: RenderContext) -> tuple[Row, Row]:
        role, text = message["role"], ensure_text(message["content"])
        return (_HEADER_START, role, _HEADER_END, "\n\n"), (text if role == "assistant" else text.strip(), self.end)


class Llama3ToolsRenderer(Llama3Renderer):
    """Llama 3.1, 3.2 and 3.3 Instruct with tools in JSON."""

    roles, calls_tools = ("system", "user", "assistant", "tool", "tool_declare"), True

    # Writing --------------------------------------------------------------------------------------------------------

    def _declare_tools(self, tools: list[ToolSpec], system_prompt: str) -> list[Message]:
        functions = [{"type": "function", "function": tool} for tool in tools]
        declared = "".join(json.dumps(function, ensure_ascii=False, indent=4) + "\n\n" for function in functions)
        system = f"{_ENVIRONMENT}\n\n{system_prompt}" if system_prompt else _ENVIRONMENT
        return [Message(role="system", content=system), Message(role="tool_declare", content=_TOOLS_PROMPT + declared)]

    def _arranged(self, messages: list[Message]) -> list[Message]:
        """The messages, with the declaration of tools at the beginning of the first user message."""
        messages = super()._arranged(messages)
        declarations = [ensure_text(message["content"]) for message in messages if message["role"] == "tool_declare"]
        if not declarations:
            return messages
        rest = [message for message in messages if message["role"] != "tool_declare"]
        at = next((i for i, message in enumerate(rest) if message["role"] == "user"), None)
        if at is None:
            raise RendererError("tools are declared in the first user message, and the conversation has none; add one")
        text = "".join(declarations) + ensure_text(rest[at]["content"]).strip()
        return [*rest[:at], {**rest[at], "content": text}, *rest[at + 1 :]]

    def _write(self, message: Message, ctx: RenderContext) -> tuple[Row, Row]:
        if message["role"] == "tool":
            result = json.dumps(ensure_text(message["content"]), ensure_ascii=False)
            return (_HEADER_START, "ipython", _HEADER_END, "\n\n"), (result, self.end)
        if message["role"] == "user" and (text := ensure_text(message["content"])).startswith(_TOOLS_PROMPT):
            # The text is already stripped; the declaration ends in line breaks.
            return (_HEADER_START, "user", _HEADER_END, "\n\n"), (text, self.end)
        calls = [_call_text(call) for call in message.get("tool_calls", [])]
        raw = "".join(call.raw_text for call in message.get("unparsed_tool_calls", []))
        if calls and (len(calls) > 1 or raw or ensure_text(message["content"]).strip()):
            raise RendererError(
                f"message {ctx.idx}: in the Llama 3 format a call is a separate message, without text and other calls; "
                "give each a message"
            )
        if message["role"] != "assistant":
            return super()._write(message, ctx)
        return super()._write({**message, "content": "".join(calls) or ensure_text(message["content"]) + raw}, ctx)

    # Reading --------------------------------------------------------------------------------------------------------

    def _read_message(self, tokens: list[int]) -> Message:
        """A call if the reply begins like one, else text."""
        text = decode_tokens(self.tokenizer, tokens)
        return (
            assistant_message("", [_read_call(text)]) if _may_be_call(text, whole=True) else assistant_message(text, [])
        )

    def _new_scanner(self) -> BlockScanner:
        return _CallScanner()


class _CallScanner(BlockScanner):
    """Buffers the reply while it may be a call."""

    def __init__(self) -> None:
        super().__init__(tool_tags=None, thinks=False, line_breaks=None)
        self._buffered = ""
        self._is_text = False

    def feed(self, text: str) -> list[Piece]:
        if self._is_text:
            return super().feed(text)
        self._buffered += text
        if _may_be_call(self._buffered):
            return []
        self._is_text = True
        return super().feed(self._buffered)

    def finish(self, text: str = "") -> list[Piece]:
        pieces = self.feed(text)
        if not self._is_text and self._buffered and not _may_be_call(self._buffered, whole=True):
            pieces.append(Piece(BlockKind.TEXT, self._buffered))
        return [*pieces, *super().finish()]


def _may_be_call(text: str, whole: bool = False) -> bool:
    """Whether `text` begins like a call, or may still do so if it is not `whole`."""
    for piece in _CALL_BEGIN:
        text = text.lstrip()
        if not text.startswith(piece):
            return not whole and piece.startswith(text)
        text = text[len(piece) :]
    return True


def _call_text(call: ToolCall) -> str:
    name = json.dumps(call.function.name, ensure_ascii=False)
    return f'{{"name": {name}, "parameters": {call.function.arguments}}}'


def _read_call(text: str) -> ToolCall | UnparsedToolCall:
    try:
        call = load_json(text)
        if not isinstance(call, dict) or call.keys() != {"name", "parameters"}:
            raise ValueError('expected a JSON object with the keys "name" and "parameters"')
        if not isinstance(call["name"], str) or not isinstance(call["parameters"], dict):
            raise ValueError('expected "name" to be a string and "parameters" to be an object')
        canonical = _CANONICAL_CALL.fullmatch(text)
        # The arguments keep the model's spelling (spaces, escapes) if the call has the canonical form.
        arguments = canonical[2] if canonical else json.dumps(call["parameters"], ensure_ascii=False)
        check_encodable(call["name"] + arguments)
    except (ValueError, RecursionError) as error:
        return UnparsedToolCall(raw_text=text, error=str(error))
    return ToolCall(function=ToolCall.FunctionBody(name=call["name"], arguments=arguments))
