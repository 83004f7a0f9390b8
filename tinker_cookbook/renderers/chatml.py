"""ChatML as the Qwen families write it: turns between <|im_start|> and <|im_end|>, tools in <tool_call> blocks.

    <|im_start|>system\nBe brief.<|im_end|>\n
    <|im_start|>user\nWhat is 1+1?<|im_end|>\n
    <|im_start|>assistant\n2<|im_end|>

Assistant messages are written as the model wrote them, reasoning in <think> blocks included. What a family adds (rules
for reasoning, a default system prompt) is in its own file.
"""

import json

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.base import RenderContext, RenderedMessage
from tinker_cookbook.renderers.blocks import BlockScanner
from tinker_cookbook.renderers.content import ensure_list, ensure_text, parse_content_blocks, text_of
from tinker_cookbook.renderers.decoding import decode_tokens, encode_text, special_token_id
from tinker_cookbook.renderers.end_token import EndTokenRenderer
from tinker_cookbook.renderers.types import (
    Content,
    Message,
    Role,
    ToolCall,
    ToolSpec,
    UnparsedToolCall,
)
from tinker_cookbook.tokenizer_utils import Tokenizer

START, END = "<|im_start|>", "<|im_end|>"
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


class ChatMLRenderer(EndTokenRenderer):
    """ChatML with nothing added to what was said."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer, END)
        special_token_id(tokenizer, START)

    @property
    def has_extension_property(self) -> bool:
        return True

    # Writing --------------------------------------------------------------------------------------------------------

    def render_message(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        role = message["role"]
        if role != "assistant" and (message.get("tool_calls") or message.get("unparsed_tool_calls")):
            raise RendererError(f"message {ctx.idx}: only an assistant message can call tools, not role {role!r}")
        if role == "assistant":
            header = self._header(role, ctx) + "\n" + self._prompt_think_block(ctx)
            output = self._assistant_body(message, ctx) + END
        elif role == "tool":
            header, output = self._tool_result(message, ctx)
        elif role in ("system", "user"):
            # The line break goes with the text: a tokenizer joins it with line breaks that the text begins with.
            header, output = self._header(role, ctx), "\n" + ensure_text(message["content"]) + END
        else:
            raise RendererError(
                f"message {ctx.idx}: the Qwen format has no role {role!r}; it has system, user, assistant and tool"
            )
        return self._rendered(header, output)

    def _get_generation_suffix(self, role: Role, ctx: RenderContext) -> list[int]:
        suffix = self._header(role, ctx) + "\n"
        if role == "assistant":
            suffix += self._prompt_think_block(ctx)
        return encode_text(self.tokenizer, suffix)

    def _header(self, role: Role, ctx: RenderContext) -> str:
        # The line break after <|im_end|> belongs to the next header: the model stops at <|im_end|>.
        return ("\n" if ctx.idx else "") + START + role

    def _prompt_think_block(self, ctx: RenderContext) -> str:
        """The think block that the prompt supplies, so that it is never trained."""
        return ""

    def _tool_result(self, message: Message, ctx: RenderContext) -> tuple[str, str]:
        """Results in a row share one user turn."""
        after_result = ctx.prev_message is not None and ctx.prev_message["role"] == "tool"
        before_result = ctx.next_message is not None and ctx.next_message["role"] == "tool"
        header = "" if after_result else self._header("user", ctx)
        result = f"\n<tool_response>\n{ensure_text(message['content'])}\n</tool_response>"
        return header, result if before_result else result + END

    def _assistant_body(self, message: Message, ctx: RenderContext) -> str:
        content = message["content"]
        media = {part["type"] for part in ensure_list(content)} - {"text", "thinking"}
        if media:
            raise RendererError(f"message {ctx.idx}: the Qwen text format cannot hold {', '.join(sorted(media))}")
        think_block, text = self._think_block_and_text(content, ctx)
        calls = [_tool_call_text(call) for call in message.get("tool_calls", [])]
        calls += [call.raw_text for call in message.get("unparsed_tool_calls", [])]
        return think_block + "\n".join([text, *calls] if text else calls)

    def _think_block_and_text(self, content: Content, ctx: RenderContext) -> tuple[str, str]:
        """(think block set apart, text). Here: parts in their order, nothing added or taken away; a string verbatim."""
        if isinstance(content, str):
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

    def create_conversation_prefix_with_tools(self, tools: list[ToolSpec], system_prompt: str = "") -> list[Message]:
        if not tools:
            raise RendererError("tools is empty; declare at least one, or start with a plain system message")
        declarations = "\n".join(
            json.dumps({"type": "function", "function": tool}, ensure_ascii=False) for tool in tools
        )
        prompt = _TOOLS_PROMPT.format(declarations=declarations)
        return [Message(role="system", content=f"{system_prompt}\n\n{prompt}" if system_prompt else prompt)]

    # Reading --------------------------------------------------------------------------------------------------------

    def _read_message(self, tokens: list[int]) -> Message:
        """The message with every block that was written, empty ones too."""
        parts, calls = parse_content_blocks(decode_tokens(self.tokenizer, tokens))
        has_thinking = any(part["type"] == "thinking" for part in parts)
        message = Message(role="assistant", content=parts if has_thinking else text_of(parts))
        if good := [call for call in calls if isinstance(call, ToolCall)]:
            message["tool_calls"] = good
        if bad := [call for call in calls if isinstance(call, UnparsedToolCall)]:
            message["unparsed_tool_calls"] = bad
        return message

    def _new_scanner(self) -> BlockScanner:
        return BlockScanner()


def _tool_call_text(call: ToolCall) -> str:
    return f'<tool_call>\n{{"name": "{call.function.name}", "arguments": {call.function.arguments}}}\n</tool_call>'
