"""The Qwen3 family: ChatML turns, reasoning in <think> blocks, tool calls as JSON in <tool_call> blocks.

    <|im_start|>user\nWhat is 1+1?<|im_end|>\n
    <|im_start|>assistant\n<think>\nEasy.\n</think>\n\n2<|im_end|>

Three renderers: Qwen3Renderer for the hybrid models in thinking mode, Qwen3DisableThinkingRenderer for the same
models told not to think (the prompt ends in an empty think block), Qwen3InstructRenderer for the models that never
think. Each equals the chat template of its models, which forgets the thinking of earlier turns; with
`strip_thinking_from_history=False` it is kept as written, for multi-turn RL, and prompts extend each other.
"""

import json
from collections.abc import Iterator

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.base import RenderContext, RenderedMessage, Renderer, text_chunk
from tinker_cookbook.renderers.blocks import BlockKind, BlockScanner, Piece
from tinker_cookbook.renderers.content import (
    ensure_list,
    ensure_text,
    parse_content_blocks,
    split_hf_reasoning,
    text_of,
    thinking_of,
)
from tinker_cookbook.renderers.decoding import Utf8TokenDecoder, decode_tokens, encode_text, special_token_id
from tinker_cookbook.renderers.types import (
    Content,
    Message,
    MessageDelta,
    ParseTermination,
    Role,
    StreamingMessageHeader,
    StreamingTextDelta,
    StreamingThinkingDelta,
    ToolCall,
    ToolSpec,
    UnparsedToolCall,
)
from tinker_cookbook.tokenizer_utils import Tokenizer

_START, _END = "<|im_start|>", "<|im_end|>"
_EMPTY_THINK_BLOCK = "<think>\n\n</think>\n\n"
_TOOLS_PROMPT = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{declarations}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


class Qwen3Renderer(Renderer):
    """Hybrid models in thinking mode."""

    supports_streaming = True

    def __init__(self, tokenizer: Tokenizer, strip_thinking_from_history: bool = True) -> None:
        super().__init__(tokenizer)
        self.strip_thinking_from_history = strip_thinking_from_history
        special_token_id(tokenizer, _START)
        self._end_id = special_token_id(tokenizer, _END)

    @property
    def has_extension_property(self) -> bool:
        return not self.strip_thinking_from_history

    @property
    def _end_message_token(self) -> int:
        return self._end_id

    def get_stop_sequences(self) -> list[int]:
        return [self._end_id]

    # Writing --------------------------------------------------------------------------------------------------------

    def render_message(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        role = message["role"]
        if role != "assistant" and (message.get("tool_calls") or message.get("unparsed_tool_calls")):
            raise RendererError(f"message {ctx.idx}: only an assistant message can call tools, not role {role!r}")
        if role == "assistant":
            header = self._header(role, ctx) + "\n" + self._prompt_think_block(ctx)
            output = self._assistant_body(message, ctx) + _END
        elif role == "tool":
            header, output = self._tool_result(message, ctx)
        elif role in ("system", "user"):
            # The line break goes with the text: a tokenizer joins it with line breaks that the text begins with.
            header, output = self._header(role, ctx), "\n" + ensure_text(message["content"]) + _END
        else:
            raise RendererError(
                f"message {ctx.idx}: the Qwen3 format has no role {role!r}; it has system, user, assistant and tool"
            )
        chunk = text_chunk(encode_text(self.tokenizer, output))
        return RenderedMessage(
            header=text_chunk(encode_text(self.tokenizer, header)), output=[chunk] if chunk is not None else []
        )

    def _get_generation_suffix(self, role: Role, ctx: RenderContext) -> list[int]:
        suffix = self._header(role, ctx) + "\n"
        if role == "assistant":
            suffix += self._prompt_think_block(ctx)
        return encode_text(self.tokenizer, suffix)

    def _header(self, role: Role, ctx: RenderContext) -> str:
        # The line break after <|im_end|> belongs to the next header: the model stops at <|im_end|>.
        return ("\n" if ctx.idx else "") + _START + role

    def _prompt_think_block(self, ctx: RenderContext) -> str:
        """The think block that the prompt supplies, so that it is never trained."""
        return ""

    def _tool_result(self, message: Message, ctx: RenderContext) -> tuple[str, str]:
        """Results in a row share one user turn."""
        after_result = ctx.prev_message is not None and ctx.prev_message["role"] == "tool"
        before_result = ctx.next_message is not None and ctx.next_message["role"] == "tool"
        header = "" if after_result else self._header("user", ctx)
        result = f"\n<tool_response>\n{ensure_text(message['content'])}\n</tool_response>"
        return header, result if before_result else result + _END

    def _assistant_body(self, message: Message, ctx: RenderContext) -> str:
        content = message["content"]
        media = {part["type"] for part in ensure_list(content)} - {"text", "thinking"}
        if media:
            raise RendererError(f"message {ctx.idx}: the Qwen3 text format cannot hold {', '.join(sorted(media))}")
        if self.strip_thinking_from_history:
            think_block, text = self._as_template_writes(content, ctx)
        else:
            think_block, text = self._as_model_wrote(content, ctx)
        calls = [_tool_call_text(call) for call in message.get("tool_calls", [])]
        calls += [call.raw_text for call in message.get("unparsed_tool_calls", [])]
        return think_block + "\n".join([text, *calls] if text else calls)

    def _as_template_writes(self, content: Content, ctx: RenderContext) -> tuple[str, str]:
        """(think block, text), by the rules of the chat template: reasoning only after the last user message, and an
        empty block before a last message without reasoning."""
        if isinstance(content, str):
            reasoning, text = split_hf_reasoning(content)
        else:
            reasoning, text = thinking_of(content).strip("\n"), text_of(content)
        if not (ctx.is_last or 0 <= ctx.last_user_index < ctx.idx):
            return "", text
        if not reasoning and not ctx.is_last:
            return "", text
        return self._think_block(reasoning, ctx), text.lstrip("\n")

    def _as_model_wrote(self, content: Content, ctx: RenderContext) -> tuple[str, str]:
        """Parts in their order, nothing added or taken away; a string is verbatim."""
        if isinstance(content, str):
            if self.disables_thinking:
                self._think_block(split_hf_reasoning(content)[0], ctx)
            return "", content
        written = ""
        for part in content:
            if part["type"] == "text":
                written += part["text"]
            elif part["type"] == "thinking":
                written += self._think_block(part["thinking"], ctx)
        return "", written

    def _think_block(self, reasoning: str, ctx: RenderContext) -> str:
        return f"<think>\n{reasoning}\n</think>\n\n"

    def _last_user_index(self, messages: list[Message]) -> int:
        """A user message that only wraps a tool result does not count, as in the chat template."""

        def is_query(message: Message) -> bool:
            text = text_of(message["content"])
            return not (text.startswith("<tool_response>") and text.endswith("</tool_response>"))

        queries = (i for i, message in enumerate(messages) if message["role"] == "user" and is_query(message))
        return max(queries, default=-1)

    def create_conversation_prefix_with_tools(self, tools: list[ToolSpec], system_prompt: str = "") -> list[Message]:
        if not tools:
            raise RendererError("tools is empty; declare at least one, or start with a plain system message")
        declarations = "\n".join(
            json.dumps({"type": "function", "function": tool}, ensure_ascii=False) for tool in tools
        )
        prompt = _TOOLS_PROMPT.format(declarations=declarations)
        return [Message(role="system", content=f"{system_prompt}\n\n{prompt}" if system_prompt else prompt)]

    # Reading --------------------------------------------------------------------------------------------------------

    def parse_response(self, response: list[int]) -> tuple[Message, ParseTermination]:
        """A response ends in <|im_end|> iff the model ended it; one without is MALFORMED (cut off)."""
        message, termination = self._parse_response_for_streaming(response)
        if self.strip_thinking_from_history:
            # The template adds empty think blocks of its own, so they carry nothing.
            message["content"] = _without_empty_thinking(message["content"])
        return message, termination

    def _parse_response_for_streaming(self, response: list[int]) -> tuple[Message, ParseTermination]:
        """The message with every block that was written, empty ones too."""
        tokens, termination = self._split_ending(self._normalize_response_tokens(response))
        parts, calls = parse_content_blocks(decode_tokens(self.tokenizer, tokens))
        has_thinking = any(part["type"] == "thinking" for part in parts)
        message = Message(role="assistant", content=parts if has_thinking else text_of(parts))
        if good := [call for call in calls if isinstance(call, ToolCall)]:
            message["tool_calls"] = good
        if bad := [call for call in calls if isinstance(call, UnparsedToolCall)]:
            message["unparsed_tool_calls"] = bad
        return message, termination

    def _split_ending(self, response: list[int]) -> tuple[list[int], ParseTermination]:
        """(tokens before the first ending, how it ended). Tokens after an ending make it MALFORMED."""
        at = next((i for i, token in enumerate(response) if self._ends_message(token)), len(response))
        if at != len(response) - 1:
            return response[:at], ParseTermination.MALFORMED
        stopped = response[at] == self._end_id
        return response[:at], ParseTermination.STOP_SEQUENCE if stopped else ParseTermination.EOS

    def _ends_message(self, token: int) -> bool:
        return token in (self._end_id, self.tokenizer.eos_token_id)

    def parse_response_streaming(self, response: Iterator[int] | list[int]) -> Iterator[MessageDelta]:
        """Text and thinking as they settle; tool calls and the parsed Message come at the end."""
        yield StreamingMessageHeader(role="assistant")
        decoder, scanner = Utf8TokenDecoder(self.tokenizer), BlockScanner()
        seen: list[int] = []
        ended = False
        for token in response:
            seen.append(token)
            # Tokens after an ending are read for the final verdict, but are no part of the message.
            ended = ended or self._ends_message(token)
            if not ended:
                yield from _deltas(scanner.feed(decoder.decode([token])))
        yield from _deltas(scanner.feed(decoder.flush()))
        yield from _deltas(scanner.finish())
        yield self.parse_response(seen)[0]


class Qwen3DisableThinkingRenderer(Qwen3Renderer):
    """Hybrid models told not to think: the prompt supplies an empty think block. Reasoning to write is an error."""

    disables_thinking = True

    def _prompt_think_block(self, ctx: RenderContext) -> str:
        return _EMPTY_THINK_BLOCK if ctx.is_last or not self.strip_thinking_from_history else ""

    def _think_block(self, reasoning: str, ctx: RenderContext) -> str:
        if reasoning:
            raise RendererError(
                f"message {ctx.idx} holds reasoning, but this renderer disables thinking: "
                "remove its thinking part, or use the renderer qwen3"
            )
        return ""


class Qwen3InstructRenderer(Qwen3Renderer):
    """Models that never think (Instruct-2507). A think block that is there all the same passes through as written."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer, strip_thinking_from_history=False)


def _tool_call_text(call: ToolCall) -> str:
    return f'<tool_call>\n{{"name": "{call.function.name}", "arguments": {call.function.arguments}}}\n</tool_call>'


def _without_empty_thinking(content: Content) -> Content:
    if isinstance(content, str):
        return content
    kept = [part for part in content if part["type"] != "thinking" or part["thinking"].strip("\n")]
    return kept if any(part["type"] == "thinking" for part in kept) else text_of(kept)


def _deltas(pieces: list[Piece]) -> Iterator[MessageDelta]:
    for piece in pieces:
        if piece.kind is BlockKind.TEXT and piece.text:
            yield StreamingTextDelta(piece.text)
        elif piece.kind is BlockKind.THINKING and piece.text:
            yield StreamingThinkingDelta(piece.text)
