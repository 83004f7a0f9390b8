"""A small tokenizer, chat templates and message strategies for renderer tests; nothing is read from disk.

The tokenizer is a byte-level BPE with merges over letters and line breaks, so that a renderer that cuts text in the
wrong place gets other ids than the template. The templates are our own statement of what the families document.
"""

import json
from functools import cache
from typing import cast

from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tinker_cookbook.renderers import (
    Message,
    ParseFailureKind,
    ParseTermination,
    TextPart,
    ThinkingPart,
    ToolCall,
    classify_parse_failure,
)

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CORPUS = [
    "user assistant system\n\n\n",
    "think hello world answer User: Assistant: System:\n\n",
    "name arguments\n",
] * 4

_TURN = """
{%- macro turn(role, text) %}{{- '<|im_start|>' + role + '\n' + text + '<|im_end|>\n' }}{% endmacro %}
{%- macro calls(message, text) %}
    {%- for call in message.tool_calls or [] %}
        {{- '' if loop.first and not text else '\n' }}
        {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
        {%- set args = call.function.arguments %}
        {{- (args if args is string else args | tojson) + '}\n</tool_call>' }}
    {%- endfor %}
{%- endmacro %}
{%- macro tool_list() %}
    {{- '# Tools\n\nYou may call one or more functions to assist with the user query.\n\n' }}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\n<tools>' }}
    {%- for tool in tools %}{{- '\n' + (tool | tojson) }}{% endfor %}
    {{- '\n</tools>\n\nFor each function call, return a json object with function name and arguments within ' }}
    {{- '<tool_call></tool_call> XML tags:\n<tool_call>\n' }}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>' }}
{%- endmacro %}
{%- set has_system = messages and messages[0].role == 'system' %}
{%- if tools %}{{- turn('system', (messages[0].content + '\n\n' if has_system else '') + tool_list()) }}{% endif %}
{%- set rest = messages[1:] if tools and has_system else messages %}
{%- set query = namespace(index=rest | length) %}
{%- for message in rest %}
    {%- set wraps_result = message.content.startswith('<tool_response>')
                           and message.content.endswith('</tool_response>') %}
    {%- if message.role == 'user' and not wraps_result %}{% set query.index = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in rest %}
    {%- set text = message.content %}
    {%- if message.role == 'tool' %}
        {{- '' if loop.previtem is defined and loop.previtem.role == 'tool' else '<|im_start|>user' }}
        {{- '\n<tool_response>\n' + text + '\n</tool_response>' }}
        {{- '' if loop.nextitem is defined and loop.nextitem.role == 'tool' else '<|im_end|>\n' }}
    {%- elif message.role != 'assistant' %}
        {{- turn(message.role, text) }}
    {%- else %}
        ASSISTANT
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}SUFFIX{% endif %}
"""

INSTRUCT_TEMPLATE = _TURN.replace("ASSISTANT", "{{- turn('assistant', text + calls(message, text)) }}").replace(
    "SUFFIX", ""
)

HYBRID_TEMPLATE = _TURN.replace(
    "ASSISTANT",
    r"""
        {%- set reasoning = message.reasoning_content or '' %}
        {%- if not reasoning and '</think>' in text %}
            {%- set reasoning = text.split('</think>') | first %}
            {%- set reasoning = reasoning.rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set text = (text.split('</think>') | last).lstrip('\n') %}
        {%- endif %}
        {%- set think = '' %}
        {%- if loop.index0 > query.index and (loop.last or reasoning) %}
            {%- set think = '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' %}
            {%- set text = text.lstrip('\n') %}
        {%- endif %}
        {{- turn('assistant', think + text + calls(message, text)) }}
    """,
).replace(
    "SUFFIX",
    r"{% if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}{% endif %}",
)


@cache
def make_tokenizer(
    markers: tuple[str, ...] = _SPECIAL, chat_template: str | None = None, words: str = ""
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of about 300 ids with the ChatML tokens; more ids where it also learns `words`."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=900 if words else 300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    core.train_from_iterator([*_CORPUS, *[words] * 4], trainer)
    core.add_special_tokens([AddedToken(token, special=True) for token in markers])
    core.add_tokens([AddedToken(token, normalized=False) for token in _MARKERS])
    known = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, **{key: token for key, token in known.items() if token in markers}
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def failure_kind(message: Message, termination: ParseTermination) -> ParseFailureKind | None:
    """What classify_parse_failure says is at fault."""
    failure = classify_parse_failure(message, termination)
    return failure[0] if failure else None


def text(start: str = "", min_size: int = 0) -> st.SearchStrategy[str]:
    """Text without angle brackets: spaces, line breaks, quotes, and characters of 1 to 4 bytes."""
    return st.text(alphabet='ab hello\n{}"\\:.,1é漢🙂', min_size=min_size, max_size=20).map(lambda t: start + t)


def assistant_text() -> st.SearchStrategy[str]:
    """Text that does not begin with white space: there a template's tokens and a sampled answer's tokens agree."""
    return st.just("") | text(start="a")


def canonical_thinking() -> st.SearchStrategy[str]:
    return text(min_size=1).map(lambda t: t.strip("\n")).filter(bool)


def tool_call() -> st.SearchStrategy[ToolCall]:
    arguments = st.dictionaries(text(), st.integers() | text() | st.none(), max_size=2)
    return st.builds(
        lambda name, args: ToolCall(
            function=ToolCall.FunctionBody(name=name, arguments=json.dumps(args, ensure_ascii=False))
        ),
        st.sampled_from(["search", "add_2"]),
        arguments,
    )


@st.composite
def assistant(
    draw: st.DrawFn, thinking: bool, calls: int = 0, call: st.SearchStrategy[ToolCall] | None = None
) -> Message:
    body = draw(assistant_text())
    message = Message(role="assistant", content=body)
    if thinking and draw(st.booleans()):
        message["content"] = [ThinkingPart(type="thinking", thinking=draw(canonical_thinking()))]
        if body:
            message["content"].append(TextPart(type="text", text=body))
    if calls:
        message["tool_calls"] = draw(st.lists(tool_call() if call is None else call, min_size=1, max_size=calls))
    return message


@st.composite
def turn(
    draw: st.DrawFn, thinking: bool, tools: bool, call: st.SearchStrategy[ToolCall] | None = None
) -> list[Message]:
    """One user message and everything up to and including the final answer."""
    messages = [Message(role="user", content=draw(text()))]
    if tools and draw(st.booleans()):
        messages.append(draw(assistant(thinking, calls=2, call=call)))
        messages += [Message(role="tool", content=draw(text())) for _ in messages[-1].get("tool_calls", [])]
    messages.append(draw(assistant(thinking)))
    return messages


@st.composite
def conversation(
    draw: st.DrawFn, thinking: bool = True, tools: bool = True, calls: st.SearchStrategy[ToolCall] | None = None
) -> list[Message]:
    """Ends with an assistant message; drop the last message to get one that asks for an answer."""
    messages = [Message(role="system", content=draw(text()))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages += draw(turn(thinking, tools, calls))
    return messages


def template_tokens(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, object]], *, prompt: bool, **options: object
) -> list[int]:
    """The ids of transformers' own template engine."""
    rendered = tokenizer.apply_chat_template(
        cast("list[dict[str, str]]", messages),
        tokenize=False,
        add_generation_prompt=prompt,
        **options,  # type: ignore[arg-type]
    )
    return tokenizer.encode(cast(str, rendered), add_special_tokens=False)
