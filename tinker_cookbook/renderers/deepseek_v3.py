"""DeepSeek-V3.1: bare role tokens, reasoning before </think>, tool calls between special tokens.

    <｜begin▁of▁sentence｜>Be brief.<｜User｜>1+1?<｜Assistant｜><think>Easy.</think>2<｜end▁of▁sentence｜>

One hybrid model, two renderers: DeepSeekV3ThinkingRenderer opens a think block in the prompt, and
DeepSeekV3DisableThinkingRenderer closes it there (`<｜Assistant｜></think>`). Prompts equal the chat template, in
which three things are peculiar: the system text has no role token; a closed block stands before every earlier answer,
whose reasoning is forgotten; nothing at all stands between a tool result and the answer to it, so there the model
decides by itself whether to open a think block.

With `strip_thinking_from_history=False` reasoning is kept as written, for multi-turn RL, and prompts extend each other.
"""

import json

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.base import RenderContext, RenderedMessage
from tinker_cookbook.renderers.blocks import THINK_CLOSE, THINK_OPEN, BlockKind, Piece
from tinker_cookbook.renderers.content import ensure_list, ensure_text, text_of
from tinker_cookbook.renderers.decoding import decode_tokens, special_token_id
from tinker_cookbook.renderers.deepseek_blocks import (
    CALL_BEGIN,
    CALL_END,
    CALL_SEP,
    CALLS_BEGIN,
    CALLS_END,
    DeepSeekScanner,
    parse_calls,
)
from tinker_cookbook.renderers.end_token import EndTokenRenderer
from tinker_cookbook.renderers.history_prompt import HistoryPromptRenderer
from tinker_cookbook.renderers.types import (
    Content,
    ContentPart,
    Message,
    ParseTermination,
    TextPart,
    ThinkingPart,
    ToolCall,
    ToolSpec,
    UnparsedToolCall,
)
from tinker_cookbook.tokenizer_utils import Tokenizer

_BOS, _EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
_USER, _ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
_RESULT_BEGIN, _RESULT_END = "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"
_TOOL_TOKENS = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, CALL_SEP, _RESULT_BEGIN, _RESULT_END)
# The wording that the model was trained with.
_TOOLS_PROMPT = f"""## Tools
You have access to the following tools:

{{declarations}}

IMPORTANT: ALWAYS adhere to this exact format for tool use:
{CALLS_BEGIN}{CALL_BEGIN}tool_call_name{CALL_SEP}tool_call_arguments{CALL_END}{{{{additional_tool_calls}}}}{CALLS_END}

Where:
- `tool_call_name` must be an exact match to one of the available tools
- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema
- For multiple tool calls, chain them directly without separators or spaces"""


class DeepSeekV3DisableThinkingRenderer(HistoryPromptRenderer, EndTokenRenderer):
    """The hybrid model told not to think. Reasoning to write is an error; think tags that it writes are text."""

    disables_thinking = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer, _EOS)
        self._bos_id = special_token_id(tokenizer, _BOS)
        for token in (_USER, _ASSISTANT, THINK_OPEN, THINK_CLOSE, *_TOOL_TOKENS):
            special_token_id(tokenizer, token)

    @property
    def has_extension_property(self) -> bool:
        return True

    @property
    def _bos_tokens(self) -> list[int]:
        return [self._bos_id]

    # Writing --------------------------------------------------------------------------------------------------------

    def render_message(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        role = message["role"]
        if role != "assistant" and (message.get("tool_calls") or message.get("unparsed_tool_calls")):
            raise RendererError(f"message {ctx.idx}: only an assistant message can call tools, not role {role!r}")
        if role == "assistant":
            header, output = self._assistant(message, ctx)
        elif role == "user":
            header, output = _USER, ensure_text(message["content"])
        elif role == "tool":
            header, output = _RESULT_BEGIN, ensure_text(message["content"]) + _RESULT_END
        elif role == "system":
            if ctx.idx:
                raise RendererError(
                    f"message {ctx.idx} has role 'system', but the DeepSeek format has one system text, at the very "
                    "beginning: join it with the first message, or give it the role 'user'"
                )
            header, output = "", ensure_text(message["content"])
        else:
            raise RendererError(
                f"message {ctx.idx}: the DeepSeek format has no role {role!r}; it has system, user, assistant and tool"
            )
        return self._rendered(header, output)

    def _assistant(self, message: Message, ctx: RenderContext) -> tuple[str, str]:
        parts = _parts_of(message["content"], ctx)
        text = self._body(parts, ctx) + _calls_text(message)
        if _EOS in text:
            raise RendererError(
                f"message {ctx.idx}: an assistant message holds {_EOS!r}, which would end it; remove it"
            )
        return self._header(ctx), text + _EOS

    def _header(self, ctx: RenderContext) -> str:
        """What the prompt supplies: nothing after a tool result, else the role and the state of the think block."""
        if ctx.prev_message is not None and ctx.prev_message["role"] == "tool":
            return ""
        return _ASSISTANT + (THINK_OPEN if self._thinks_in(ctx) else THINK_CLOSE)

    def _thinks_in(self, ctx: RenderContext) -> bool:
        """Whether this message is written with its reasoning."""
        return False

    def _body(self, parts: list[ContentPart], ctx: RenderContext) -> str:
        if any(part["type"] == "thinking" for part in parts):
            raise RendererError(
                f"message {ctx.idx} holds reasoning, but this renderer disables thinking: "
                "remove its thinking part, or use the renderer deepseekv3_thinking"
            )
        return text_of(parts)

    def create_conversation_prefix_with_tools(self, tools: list[ToolSpec], system_prompt: str = "") -> list[Message]:
        """One system message: the prompt, then the tools. Raises RendererError for no tools."""
        if not tools:
            raise RendererError("create_conversation_prefix_with_tools: tools=[] declares nothing; pass at least one")
        declarations = "\n\n".join(
            f"### {tool['name']}\nDescription: {tool['description']}\n\n"
            f"Parameters: {json.dumps(tool['parameters'], ensure_ascii=False)}"
            for tool in tools
        )
        text = f"{system_prompt}\n\n{_TOOLS_PROMPT.format(declarations=declarations)}"
        return [Message(role="system", content=text)]

    # Reading --------------------------------------------------------------------------------------------------------

    def parse_response(self, response: list[int]) -> tuple[Message, ParseTermination]:
        """A response ends in <｜end▁of▁sentence｜> iff the model ended it; any other is MALFORMED.

        For a model that thinks, what comes before the first </think> is reasoning. A response without one is a plain
        answer if it ended or called a tool (after a tool result the prompt opens no think block), and reasoning if it
        was cut off, so that it never passes for an answer. A stream takes it for reasoning throughout.
        """
        return self._parse_response_for_streaming(response)

    def _parse_response_for_streaming(self, response: list[int]) -> tuple[Message, ParseTermination]:
        tokens, termination = self._split_ending(self._normalize_response_tokens(response))
        scanner = self._new_scanner()
        pieces = scanner.finish(decode_tokens(self.tokenizer, tokens))
        called = any(piece.kind in (BlockKind.TOOL_CALL, BlockKind.UNCLOSED_TOOL_CALL) for piece in pieces)
        if scanner.opening_unclosed and (termination.is_clean or called) and pieces[:1]:
            pieces[0] = pieces[0]._replace(kind=BlockKind.TEXT) if pieces[0].kind is BlockKind.THINKING else pieces[0]
        return _message(pieces), termination

    def _new_scanner(self) -> DeepSeekScanner:
        return DeepSeekScanner(thinks=not self.disables_thinking)


class DeepSeekV3ThinkingRenderer(DeepSeekV3DisableThinkingRenderer):
    """The hybrid model in thinking mode: the prompt opens a think block."""

    disables_thinking = False

    def __init__(self, tokenizer: Tokenizer, strip_thinking_from_history: bool = True) -> None:
        super().__init__(tokenizer)
        self.strip_thinking_from_history = strip_thinking_from_history

    @property
    def has_extension_property(self) -> bool:
        return not self.strip_thinking_from_history

    def _thinks_in(self, ctx: RenderContext) -> bool:
        return ctx.is_last or not self.strip_thinking_from_history

    def _body(self, parts: list[ContentPart], ctx: RenderContext) -> str:
        if not self._thinks_in(ctx):
            return text_of(parts)
        written = "".join(
            THINK_OPEN + part["thinking"] + THINK_CLOSE if part["type"] == "thinking" else text_of([part])
            for part in parts
        )
        if not self._header(ctx):
            return written
        # The prompt has opened the block: the message closes it, with reasoning or without.
        return written.removeprefix(THINK_OPEN) if written.startswith(THINK_OPEN) else THINK_CLOSE + written


def _parts_of(content: Content, ctx: RenderContext) -> list[ContentPart]:
    """Parts without empty reasoning. A string is split at its first </think>, as the chat template splits it; text
    parts are taken as they are."""
    if isinstance(content, str) and THINK_CLOSE in content:
        reasoning, _, text = content.partition(THINK_CLOSE)
        content = [
            ThinkingPart(type="thinking", thinking=reasoning.removeprefix(THINK_OPEN)),
            TextPart(type="text", text=text),
        ]
    parts = [part for part in ensure_list(content) if part["type"] != "thinking" or part["thinking"]]
    for part in parts:
        if part["type"] not in ("text", "thinking"):
            raise RendererError(f"message {ctx.idx}: the DeepSeek format cannot hold {part['type']}")
        if part["type"] == "thinking" and THINK_CLOSE in part["thinking"]:
            raise RendererError(
                f"message {ctx.idx}: its reasoning holds {THINK_CLOSE!r}, which would end it; remove it"
            )
    return parts


def _calls_text(message: Message) -> str:
    calls = [
        f"{CALL_BEGIN}{call.function.name}{CALL_SEP}{call.function.arguments}{CALL_END}"
        for call in message.get("tool_calls", [])
    ]
    unparsed = [call.raw_text for call in message.get("unparsed_tool_calls", [])]
    # What was read from inside a section goes back into one; a section that was never closed stands for itself.
    calls += [raw for raw in unparsed if not raw.startswith(CALLS_BEGIN)]
    section = CALLS_BEGIN + "".join(calls) + CALLS_END if calls else ""
    return section + "".join(raw for raw in unparsed if raw.startswith(CALLS_BEGIN))


def _message(pieces: list[Piece]) -> Message:
    parts: list[ContentPart] = []
    calls: list[ToolCall | UnparsedToolCall] = []
    for kind, text in pieces:
        last = parts[-1] if parts else None
        if kind is BlockKind.TOOL_CALL:
            calls += parse_calls(text)
        elif kind is BlockKind.UNCLOSED_TOOL_CALL:
            calls.append(UnparsedToolCall(raw_text=CALLS_BEGIN + text, error=f"{CALLS_END} is missing"))
        elif kind is BlockKind.THINKING:
            parts.append(ThinkingPart(type="thinking", thinking=text))
        elif last is not None and last["type"] == "text":
            last["text"] += text
        else:
            parts.append(TextPart(type="text", text=text))
    # A string with </think> in it would be read as reasoning when it is written again.
    plain = all(part["type"] == "text" and THINK_CLOSE not in part["text"] for part in parts)
    message = Message(role="assistant", content=text_of(parts) if plain else parts)
    if good := [call for call in calls if isinstance(call, ToolCall)]:
        message["tool_calls"] = good
    if bad := [call for call in calls if isinstance(call, UnparsedToolCall)]:
        message["unparsed_tool_calls"] = bad
    return message
