"""Tokenizers, chat templates and conversations for DeepSeek-V3.1 and gpt-oss.

The templates say in our own words what the two families document: the model card of DeepSeek-V3.1 and the guide to the
Harmony format.
"""

import json
from functools import cache

from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from tests.reference.subjects import FAMILIES
from tests.reference.subjects import KIMI as KIMI_TOKENS
from tests.renderers import synthetic
from tests.renderers.synthetic import make_tokenizer, template_tokens
from tinker_cookbook.renderers import ContentPart, Message, Renderer, TextPart, ThinkingPart, ToolCall
from tinker_cookbook.renderers.deepseek_v3 import DeepSeekV3DisableThinkingRenderer, DeepSeekV3ThinkingRenderer
from tinker_cookbook.renderers.gpt_oss import CONVERSATION_DATE, GptOssRenderer

DEEPSEEK_END = "<｜end▁of▁sentence｜>"
DEEPSEEK_TOKENS = (
    *("<｜begin▁of▁sentence｜>", DEEPSEEK_END, "<｜User｜>", "<｜Assistant｜>", "<｜tool▁sep｜>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
)
KIMI_K3_TOKENS = ("[BOS]", "[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>")
HARMONY_TOKENS = (
    *("<|endoftext|>", "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"),
    *("<|end|>", "<|return|>", "<|call|>"),
)

DEEPSEEK_TEMPLATE = r"""
{{- bos_token }}
{%- set last = namespace(role='') %}
{%- for message in messages %}
    {%- set before = '' if last.role == 'tool' else '<｜Assistant｜></think>' %}
    {%- if message.role == 'system' %}{{- message.content }}
    {%- elif message.role == 'user' %}{{- '<｜User｜>' + message.content }}
    {%- elif message.role == 'tool' %}{{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
    {%- else %}
        {{- before + (message.content.split('</think>', 1) | last) }}
        {%- for call in message.tool_calls or [] %}
            {{- '<｜tool▁calls▁begin｜>' if loop.first else '' }}
            {{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments }}
            {{- '<｜tool▁call▁end｜>' + ('<｜tool▁calls▁end｜>' if loop.last else '') }}
        {%- endfor %}
        {{- eos_token }}
    {%- endif %}
    {%- set last.role = message.role %}
{%- endfor %}
{%- if add_generation_prompt and last.role != 'tool' %}
    {{- '<｜Assistant｜>' + ('<think>' if thinking else '</think>') }}
{%- endif %}
"""

HARMONY_TEMPLATE = r"""
{%- macro say(head, text, ending='<|end|>') %}{{- '<|start|>' + head + '<|message|>' + text + ending }}{% endmacro %}
{%- if reasoning_effort %}
    {%- set about -%}
You are ChatGPT, a large language model trained by OpenAI.
Knowledge cutoff: 2024-06
Current date: {{ current_date }}

Reasoning: {{ reasoning_effort }}

# Valid channels: analysis, commentary, final. Channel must be included for every message.
    {%- endset %}
    {{- say('system', about) }}
{%- endif %}
{%- set end = (messages | length) if add_generation_prompt else (messages | length) - 1 %}
{%- set answered = namespace(at=-1) %}
{%- for message in messages[:end] %}
    {%- if message.role == 'assistant' and not message.tool_calls %}{% set answered.at = loop.index0 %}{% endif %}
{%- endfor %}
{%- set called = namespace(name='') %}
{%- for message in messages %}
    {%- if message.role == 'system' and message.content %}
        {{- say('developer', '# Instructions\n\n' + message.content + '\n\n') }}
    {%- elif message.role == 'user' %}
        {{- say('user', message.content) }}
    {%- elif message.role == 'tool' %}
        {{- say('functions.' + called.name + ' to=assistant<|channel|>commentary', message.content) }}
    {%- elif message.role == 'assistant' %}
        {%- if message.reasoning_content and loop.index0 > answered.at %}
            {{- say('assistant<|channel|>analysis', message.reasoning_content) }}
        {%- endif %}
        {%- if not message.tool_calls %}
            {{- say('assistant<|channel|>final', message.content, '<|end|>' if loop.index0 < end else '<|return|>') }}
        {%- else %}
            {{- say('assistant<|channel|>commentary', message.content) if message.content else '' }}
            {%- set call = message.tool_calls[0].function %}
            {%- set called.name = call.name %}
            {%- set head = 'assistant to=functions.' + call.name + '<|channel|>commentary <|constrain|>json' %}
            {{- say(head, call.arguments, '<|call|>') }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{{- '<|start|>assistant' if add_generation_prompt else '' }}
"""


@cache
def deepseek_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer(markers=DEEPSEEK_TOKENS, chat_template=DEEPSEEK_TEMPLATE)
    tokenizer.bos_token, tokenizer.eos_token = DEEPSEEK_TOKENS[0], DEEPSEEK_END
    return tokenizer


@cache
def harmony_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer(markers=HARMONY_TOKENS, chat_template=HARMONY_TEMPLATE)
    tokenizer.eos_token, tokenizer.pad_token = "<|return|>", "<|endoftext|>"
    return tokenizer


@cache
def kimi_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer(markers=KIMI_TOKENS)
    tokenizer.bos_token, tokenizer.eos_token = "[BOS]", "[EOS]"
    return tokenizer


@cache
def deepseek_v4_1_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer(markers=FAMILIES["deepseekv4_1"].markers)
    tokenizer.bos_token, tokenizer.eos_token = "<｜begin▁of▁sentence｜>", DEEPSEEK_END
    return tokenizer


@cache
def glm_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer(markers=FAMILIES["glm5_3"].markers)
    tokenizer.eos_token = "<|endoftext|>"
    return tokenizer


@cache
def kimi_k3_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer(markers=KIMI_K3_TOKENS)
    tokenizer.bos_token, tokenizer.eos_token = "[BOS]", "[EOS]"
    return tokenizer


DEEPSEEK = {
    "disable_thinking": lambda: DeepSeekV3DisableThinkingRenderer(deepseek_tokenizer()),
    "thinking": lambda: DeepSeekV3ThinkingRenderer(deepseek_tokenizer()),
    "thinking_kept": lambda: DeepSeekV3ThinkingRenderer(deepseek_tokenizer(), strip_thinking_from_history=False),
}
EFFORTS = (None, "low", "medium", "high")


def reference(renderer: Renderer, messages: list[Message], *, prompt: bool) -> list[int]:
    """The ids of the family's chat template."""
    assert isinstance(renderer.tokenizer, PreTrainedTokenizerFast)
    options: dict[str, object] = {"thinking": not renderer.disables_thinking}
    if isinstance(renderer, GptOssRenderer):
        options = {"reasoning_effort": renderer.reasoning_effort, "current_date": CONVERSATION_DATE}
    hf_messages = [renderer.to_openai_message(message) for message in messages]
    return template_tokens(renderer.tokenizer, hf_messages, prompt=prompt, **options)


def one_call_at_a_time() -> st.SearchStrategy[list[Message]]:
    """Conversations in which an assistant message has one call at most, as in the Harmony format."""
    return synthetic.conversation().map(_with_single_calls)


def _with_single_calls(messages: list[Message]) -> list[Message]:
    kept: list[Message] = []
    for message in messages:
        if calls := message.get("tool_calls"):
            message["tool_calls"] = calls[:1]
        if message["role"] != "tool" or kept[-1]["role"] != "tool":
            kept.append(message)
    return kept


def trimmed(thinking: bool = True) -> st.SearchStrategy[list[Message]]:
    """Conversations in the form that formats give back which take white space off, and whose tool calls have tags."""
    return synthetic.conversation(thinking=thinking, calls=tagged_call()).map(_trimmed)


def tagged_call() -> st.SearchStrategy[ToolCall]:
    """A call with values that a format without types gives back."""
    values = st.integers() | synthetic.text(start="a") | st.none() | st.booleans() | st.just({"k": ["é", None]})
    arguments = st.dictionaries(st.sampled_from(["a", "b c", "é"]), values, max_size=2)
    return arguments.map(lambda found: call("add_2", json.dumps(found, ensure_ascii=False)))


def _trimmed(messages: list[Message]) -> list[Message]:
    for message in messages:
        if message["role"] != "assistant":
            continue
        if isinstance(message["content"], str):
            message["content"] = message["content"].strip()
            continue
        for part in message["content"]:
            if part["type"] == "thinking":
                part["thinking"] = part["thinking"].strip() or "hm"
            elif part["type"] == "text":
                part["text"] = part["text"].strip()
    return messages


def reasoned(messages: list[Message]) -> list[Message]:
    """Conversations in which every answer reasons."""
    for message in messages:
        if message["role"] == "assistant" and isinstance(content := message["content"], str):
            parts: list[ContentPart] = [ThinkingPart(type="thinking", thinking="hm")]
            message["content"] = [*parts, TextPart(type="text", text=content)] if content else parts
    return messages


def with_kimi_ids(thinking: bool = True) -> st.SearchStrategy[list[Message]]:
    """Conversations in which calls and results carry ids."""
    return synthetic.conversation(thinking=thinking).map(_with_kimi_ids)


def _with_kimi_ids(messages: list[Message]) -> list[Message]:
    number, waiting = 0, []
    for message in messages:
        if message["role"] == "tool":
            message["tool_call_id"] = waiting.pop(0)
        elif calls := message.get("tool_calls"):
            waiting = [f"functions.{call.function.name}:{number + i}" for i, call in enumerate(calls)]
            number += len(calls)
            named = zip(calls, waiting, strict=True)
            message["tool_calls"] = [call.model_copy(update={"id": call_id}) for call, call_id in named]
    return messages


def call(name: str = "add", arguments: str = '{"a": 1}') -> ToolCall:
    return ToolCall(function=ToolCall.FunctionBody(name=name, arguments=arguments))
