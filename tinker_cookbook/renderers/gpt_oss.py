"""gpt-oss: the Harmony format, in which one chat message may be several Harmony messages on different channels.

    <|start|>user<|message|>1+1?<|end|><|start|>assistant<|channel|>analysis<|message|>Easy.<|end|>
    <|start|>assistant<|channel|>final<|message|>2<|return|>

(one line; there are no line breaks between messages). A thinking part is an `analysis` message. The last text part of
an answer is its `final` message, and a text part before it, or before a tool call, is a `commentary` message. A tool
call is a `commentary` message to functions.<name>; the model stops there, so an assistant message has one at most.

A system message of ours becomes Harmony's developer message (`# Instructions`). Harmony's own system message, with
reasoning effort and date, comes first in every prompt, except with `reasoning_effort=None`. The date is a constant: a
run that goes on tomorrow sees the prompts of today. Reasoning is forgotten once a final answer follows it, and kept
within a row of tool calls that is still going on.

Tokens equal those of OpenAI's harmony library. The chat templates on the hub differ from it in small ways: they write
`json` without <|constrain|>, quote tool results as JSON strings, and put text before a tool call on the analysis channel.
"""

import json
from dataclasses import dataclass
from datetime import date

from tinker_cookbook.exceptions import ConfigurationError, RendererError
from tinker_cookbook.renderers.base import RenderContext, RenderedMessage, text_chunk
from tinker_cookbook.renderers.content import ensure_list, ensure_text, text_of
from tinker_cookbook.renderers.decoding import encode_text
from tinker_cookbook.renderers.harmony import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    MESSAGE,
    RETURN,
    START,
    STOPS,
    Frame,
    HarmonyFraming,
)
from tinker_cookbook.renderers.history_prompt import HistoryPromptRenderer
from tinker_cookbook.renderers.types import (
    ContentPart,
    Message,
    ParseTermination,
    TextPart,
    ThinkingPart,
    ToolCall,
    ToolSpec,
    UnparsedToolCall,
)
from tinker_cookbook.renderers.typescript import declare_namespace
from tinker_cookbook.tokenizer_utils import Tokenizer

REASONING_EFFORTS = ("low", "medium", "high")
CONVERSATION_DATE = "2025-08-05"
"""`Current date` in the system message, unless the constructor is given another: the day the models were released."""

_NAMESPACE = "functions"
_TOOLS_HEADING = f"# Tools\n\n## {_NAMESPACE}\n\nnamespace {_NAMESPACE} {{"
# The wording that the models were trained with.
_SYSTEM_TEXT = """You are ChatGPT, a large language model trained by OpenAI.
Knowledge cutoff: 2024-06
Current date: {date}

Reasoning: {effort}

# Valid channels: analysis, commentary, final. Channel must be included for every message."""
_CALLS_NOTE = f"\nCalls to these tools must go to the commentary channel: '{_NAMESPACE}'."


@dataclass(frozen=True)
class _HarmonyContext(RenderContext):
    """`last_answer_index`: the last final answer before the last message; the reasoning up to there is forgotten."""

    last_answer_index: int = -1


class GptOssRenderer(HistoryPromptRenderer):
    """reasoning_effort: "low", "medium", "high", or None for no system message. current_date: YYYY-MM-DD.

    Raises ConfigurationError for another value of either.
    """

    def __init__(
        self, tokenizer: Tokenizer, reasoning_effort: str | None = "medium", current_date: str = CONVERSATION_DATE
    ) -> None:
        super().__init__(tokenizer)
        if reasoning_effort is not None and reasoning_effort not in REASONING_EFFORTS:
            raise ConfigurationError(
                f"reasoning_effort={reasoning_effort!r} is unknown; choose one of {', '.join(REASONING_EFFORTS)}, or None"
            )
        try:
            canonical = date.fromisoformat(current_date).isoformat() == current_date
        except ValueError:
            canonical = False
        if not canonical:
            raise ConfigurationError(f"current_date={current_date!r} is no date; write it as YYYY-MM-DD")
        self.reasoning_effort = reasoning_effort
        self.current_date = current_date
        self._framing = HarmonyFraming(tokenizer)

    def get_stop_sequences(self) -> list[int]:
        return [self._framing.ids[token] for token in STOPS]

    # Writing --------------------------------------------------------------------------------------------------------

    def render_message(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        role, ids = message["role"], self._framing.ids
        if role != "assistant" and (message.get("tool_calls") or message.get("unparsed_tool_calls")):
            raise RendererError(f"message {ctx.idx}: only an assistant message can call tools, not role {role!r}")
        header = self._system_tokens(message) if ctx.idx == 0 else []
        if role == "assistant":
            header += [ids[START], *self._plain("assistant")]
            return _rendered(header, self._assistant_tokens(message, ctx))
        text = ensure_text(message["content"])
        if role in ("system", "developer"):
            if ctx.idx and _TOOLS_HEADING in text:
                raise RendererError(
                    f"message {ctx.idx} declares tools, but the system message, which comes first, has to speak of "
                    "them: put what create_conversation_prefix_with_tools returns at the beginning"
                )
            if not text:
                return _rendered(header, [])
            name, text = "developer", text if text.startswith(_TOOLS_HEADING) else f"# Instructions\n\n{text}"
        elif role == "tool":
            name = f"{_NAMESPACE}.{_called_function(message, ctx)} to=assistant"
        elif role == "user":
            name = role
        else:
            raise RendererError(
                f"message {ctx.idx}: the Harmony format has no role {role!r}; "
                "it has system, developer, user, assistant and tool"
            )
        header += [ids[START], *self._plain(name)]
        if role == "tool":
            header += [ids[CHANNEL], *self._plain("commentary")]
        return _rendered([*header, ids[MESSAGE]], [*self._plain(text), ids[END]])

    def _plain(self, text: str) -> list[int]:
        return self._framing.encode_body(text)

    def _system_tokens(self, first: Message) -> list[int]:
        if self.reasoning_effort is None:
            return []
        text = _SYSTEM_TEXT.format(date=self.current_date, effort=self.reasoning_effort)
        if first["role"] in ("system", "developer") and _TOOLS_HEADING in text_of(first["content"]):
            text += _CALLS_NOTE
        ids = self._framing.ids
        return [ids[START], *self._plain("system"), ids[MESSAGE], *self._plain(text), ids[END]]

    def _assistant_tokens(self, message: Message, ctx: RenderContext) -> list[int]:
        """All that follows the first `<|start|>assistant`."""
        ids, calls = self._framing.ids, message.get("tool_calls", [])
        if len(calls) > 1:
            raise RendererError(
                f"message {ctx.idx} has {len(calls)} tool calls, but a gpt-oss model stops after each: "
                "give every call an assistant message of its own, with its result after it"
            )
        unparsed = message.get("unparsed_tool_calls", [])
        rows = self._part_rows(message, ctx, answers=not calls and not unparsed)
        for call in calls:
            recipient = self._plain(f" to={_NAMESPACE}.{call.function.name}")
            kind = [*self._plain("commentary "), ids[CONSTRAIN], *self._plain("json"), ids[MESSAGE]]
            rows.append([*recipient, ids[CHANNEL], *kind, *self._plain(call.function.arguments), ids[CALL]])
        for call in unparsed:
            row = encode_text(self.tokenizer, call.raw_text)
            ended = bool(row) and row[-1] in (ids[END], ids[RETURN], ids[CALL])
            rows.append(row if ended else [*row, ids[END]])
        start = [ids[START], *self._plain("assistant")]
        return rows[0] + [token for row in rows[1:] for token in (*start, *row)]

    def _part_rows(self, message: Message, ctx: RenderContext, answers: bool) -> list[list[int]]:
        """The parts as Harmony messages; one that answers ends in a final one, empty if need be."""
        ids = self._framing.ids
        parts = ensure_list(message["content"])
        media = {part["type"] for part in parts} - {"text", "thinking"}
        if media:
            raise RendererError(f"message {ctx.idx}: the Harmony text format cannot hold {', '.join(sorted(media))}")
        parts = [part for part in parts if text_of([part]) or (part["type"] == "thinking" and part["thinking"])]
        if answers and (not parts or parts[-1]["type"] != "text"):
            parts = [*parts, TextPart(type="text", text="")]
        if _forgets_reasoning(ctx):
            parts = [part for part in parts if part["type"] != "thinking"]
        rows: list[list[int]] = []
        for i, part in enumerate(parts):
            final = answers and i == len(parts) - 1
            ending = ids[RETURN if final and ctx.is_last else END]
            if part["type"] == "thinking":
                channel, text = "analysis", part["thinking"]
            else:
                channel, text = "final" if final else "commentary", text_of([part])
            rows.append([ids[CHANNEL], *self._plain(channel), ids[MESSAGE], *self._plain(text), ending])
        return rows

    def _contexts(self, messages: list[Message]) -> list[RenderContext]:
        answers = [
            i
            for i, message in enumerate(messages[:-1])
            if message["role"] == "assistant"
            and not message.get("tool_calls")
            and not message.get("unparsed_tool_calls")
        ]
        last_answer_index = answers[-1] if answers else -1
        return [
            _HarmonyContext(**vars(ctx), last_answer_index=last_answer_index) for ctx in super()._contexts(messages)
        ]

    def create_conversation_prefix_with_tools(self, tools: list[ToolSpec], system_prompt: str = "") -> list[Message]:
        """One system message, written as Harmony's developer message: instructions, then tools. Raises RendererError
        for no tools."""
        if not tools:
            raise RendererError("create_conversation_prefix_with_tools: tools=[] declares nothing; pass at least one")
        declared = f"# Tools\n\n{declare_namespace(_NAMESPACE, tools)}"
        return [Message(role="system", content=f"{system_prompt}\n\n{declared}" if system_prompt else declared)]

    # Reading --------------------------------------------------------------------------------------------------------

    def parse_response(self, response: list[int]) -> tuple[Message, ParseTermination]:
        """A response ends in <|return|> or <|call|> iff the model ended it; one with broken framing is MALFORMED."""
        frames, whole = self._framing.split(self._normalize_response_tokens(response))
        parts: list[ContentPart] = []
        good: list[ToolCall] = []
        bad: list[UnparsedToolCall] = []
        for frame in frames:
            if frame.recipient or frame.ending == CALL:
                call = _parse_call(frame)
                if isinstance(call, ToolCall):
                    good.append(call)
                else:
                    bad.append(call)
            elif frame.channel == "analysis" and frame.body:
                parts.append(ThinkingPart(type="thinking", thinking=frame.body))
            elif frame.body:
                parts.append(TextPart(type="text", text=frame.body))
        whole = whole and all(frame.channel in ("analysis", "commentary", "final") for frame in frames)
        is_text = len(parts) <= 1 and all(part["type"] == "text" for part in parts)
        message = Message(role="assistant", content=text_of(parts) if is_text else parts)
        if good:
            message["tool_calls"] = good
        if bad:
            message["unparsed_tool_calls"] = bad
        return message, ParseTermination.STOP_SEQUENCE if whole else ParseTermination.MALFORMED


def _rendered(header: list[int], output: list[int]) -> RenderedMessage:
    chunk = text_chunk(output)
    return RenderedMessage(header=text_chunk(header), output=[chunk] if chunk is not None else [])


def _forgets_reasoning(ctx: RenderContext) -> bool:
    if isinstance(ctx, _HarmonyContext):
        return not ctx.is_last and ctx.idx <= ctx.last_answer_index
    return not ctx.is_last and ctx.idx < ctx.last_user_index


def _called_function(message: Message, ctx: RenderContext) -> str:
    calls = (ctx.prev_message or {}).get("tool_calls") or []
    name = message.get("name") or (calls[0].function.name if calls else "")
    if not name:
        raise RendererError(
            f"message {ctx.idx}: a tool result must name its tool in the Harmony format: put it right after the "
            "assistant message with the call, or set its key 'name'"
        )
    return name


def _parse_call(frame: Frame) -> ToolCall | UnparsedToolCall:
    def unparsed(error: str) -> UnparsedToolCall:
        return UnparsedToolCall(raw_text=frame.text, error=error)

    namespace, _, name = frame.recipient.partition(".")
    if namespace != _NAMESPACE or not name:
        return unparsed(f"the recipient is {frame.recipient!r}; a call goes to {_NAMESPACE}.<name>")
    if frame.ending != CALL:
        return unparsed(f"{CALL} is missing at the end of the call")
    try:
        is_object = isinstance(json.loads(frame.body), dict)
    except (ValueError, RecursionError) as error:
        return unparsed(f"the arguments are not valid JSON: {error}")
    if not is_object:
        return unparsed("the arguments are no JSON object")
    return ToolCall(function=ToolCall.FunctionBody(name=name, arguments=frame.body))
