"""Families that reason write what their chat templates write, which stand here in our own words."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from tests.drawn import examples
from tests.renderers.reasoning_families import (
    deepseek_v4_1_tokenizer,
    glm_tokenizer,
    kimi_tokenizer,
    trimmed,
    with_kimi_ids,
)
from tests.renderers.synthetic import conversation, make_tokenizer, template_tokens
from tests.renderers.test_all_families import ENTRIES, make
from tinker_cookbook.renderers import Message
from tinker_cookbook.renderers.content import thinking_of
from tinker_cookbook.renderers.qwen3_8 import REASONING_EFFORT_INSTRUCTIONS

_CHATML = r"""
{%- macro turn(role, text) %}{{- '<|im_start|>' + role + '\n' + text + '<|im_end|>\n' }}{% endmacro %}
{%- macro shown(value) %}
    {%- if value is string %}{{- value }}
    {%- elif json_scalars or value is mapping or value is sequence %}{{- value | tojson }}
    {%- else %}{{- value | string }}{% endif %}
{%- endmacro %}
{%- macro written(call) %}
    {{- '<tool_call>\n<function=' + call.function.name + '>\n' }}
    {%- for name, value in call.function.arguments | items %}
        {{- '<parameter=' + name + '>\n' + shown(value) + '\n</parameter>\n' }}
    {%- endfor %}
    {{- '</function>\n</tool_call>' }}
{%- endmacro %}
{%- set question = namespace(index=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set question.index = loop.index0 %}{% endif %}
{%- endfor %}
"""

QWEN_TEMPLATE = (
    _CHATML
    + r"""
{%- set opening = messages[0].content | trim if messages[0].role == 'system' else none %}
{%- set rest = messages[1:] if opening is not none else messages %}
{%- if instruction %}{{- turn('system', (instruction + '\n\n' + (opening or '')) | trim) }}
{%- elif opening or (opening is not none and not drops_empty) %}{{- turn('system', opening) }}{% endif %}
{%- set shift = messages | length - rest | length %}
{%- for message in rest %}
    {%- set text = message.content | trim %}
    {%- if message.role == 'tool' %}
        {{- '' if loop.previtem.role == 'tool' else '<|im_start|>user' }}
        {{- '\n<tool_response>\n' + text + '\n</tool_response>' }}
        {{- '' if loop.nextitem is defined and loop.nextitem.role == 'tool' else '<|im_end|>\n' }}
    {%- elif message.role != 'assistant' %}{{- turn(message.role, text) }}
    {%- else %}
        {%- set framed = preserves or loop.index0 + shift > question.index %}
        {{- '<|im_start|>assistant\n' }}
        {{- '<think>\n' + ((message.reasoning_content or '') | trim) + '\n</think>\n\n' if framed else '' }}
        {{- text }}
        {%- for call in message.tool_calls or [] %}
            {{- ('\n\n' if text else '') if loop.first else '\n' }}{{- written(call) }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' + block }}{% endif %}
"""
)

NEMOTRON_TEMPLATE = (
    _CHATML
    + r"""
{%- if messages[0].role != 'system' %}{{- turn('system', '') }}{% endif %}
{%- for message in messages %}
    {%- set old = not preserves and loop.index0 < question.index %}
    {%- if message.role == 'tool' %}
        {{- '' if loop.previtem.role == 'tool' else '<|im_start|>user\n' }}
        {{- '<tool_response>\n' + message.content + '\n</tool_response>\n' }}
        {{- '' if loop.nextitem is defined and loop.nextitem.role == 'tool' else '<|im_end|>\n' }}
    {%- elif message.role != 'assistant' %}
        {{- turn(message.role, message.content + (effort if effort and loop.index0 == question.index else '')) }}
    {%- else %}
        {%- set content = '<think></think>' + message.content %}
        {%- if (message.reasoning_content or '') | trim %}
            {%- set close = '</think>' if ultra else '\n</think>\n' %}
            {%- set content = '<think>\n' + message.reasoning_content + close + message.content %}
        {%- endif %}
        {%- set after = content.split('</think>') | last %}
        {{- '<|im_start|>assistant\n' }}
        {%- if message.tool_calls %}
            {{- ('<think></think>' + (after if ultra else after | trim) if old else content | trim) + '\n' }}
            {%- for call in message.tool_calls %}{{- written(call) + '\n' }}{% endfor %}
        {%- else %}{{- ('<think></think>' + after if old else content) | trim }}{% endif %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' + block }}{% endif %}
"""
)

KIMI_TEMPLATE = r"""
{%- set default = 'You are Kimi, an AI assistant created by Moonshot AI.' %}
{%- macro head(token, name) %}{{- '<|im_' + token + '|>' + name + '<|im_middle|>' }}{% endmacro %}
{%- set answered = namespace(at=-1) %}
{%- for message in messages %}
    {%- set asked_for = loop.last and not add_generation_prompt %}
    {%- if message.role == 'assistant' and not message.tool_calls and not asked_for %}
        {%- set answered.at = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- if messages[0].role != 'system' %}{{- head('system', 'system') + default + '<|im_end|>' }}{% endif %}
{%- for message in messages %}
    {{- head(message.role if message.role in ('user', 'assistant') else 'system', message.name or message.role) }}
    {%- if message.role == 'assistant' %}
        {%- set keeps = preserves or loop.index0 > answered.at %}
        {{- '<think>' + ((message.reasoning_content or '') if keeps else '') + '</think>' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<|tool_calls_section_begin|>' if loop.first else '' }}
            {{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' + call.function.arguments }}
            {{- '<|tool_call_end|>' + ('<|tool_calls_section_end|>' if loop.last else '') }}
        {%- endfor %}
    {%- else %}
        {{- '## Return of ' + message.tool_call_id + '\n' if message.role == 'tool' else '' }}{{- message.content }}
    {%- endif %}
    {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- head('assistant', 'assistant') + block }}{% endif %}
"""

GLM_TEMPLATE = r"""
{{- '[gMASK]<sop><|system|>Reasoning Effort: ' + effort }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|assistant|><think>' + (message.reasoning_content or '') + '</think>' + message.content | trim }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>' + call.function.name }}
            {%- for name, value in call.function.arguments | items %}
                {{- '<arg_key>' + name + '</arg_key><arg_value>' }}
                {{- (value if value is string else value | tojson) + '</arg_value>' }}
            {%- endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}
    {%- elif message.role == 'tool' %}
        {{- '' if loop.previtem.role == 'tool' else '<|observation|>' }}
        {{- '<tool_response>' + message.content + '</tool_response>' }}
    {%- else %}{{- '<|' + message.role + '|>' + message.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|><think>' }}{% endif %}
"""

DEEPSEEK_V4_1_TEMPLATE = r"""
{{- '<｜begin▁of▁sentence｜>' + ('<｜System｜>' if effort or messages[0].role == 'system' else '') }}
{%- if effort %}
    {{- 'Reasoning Effort: ' + effort | string + ' (range 1-100, the higher the value, the more thorough the reasoning)\n\n' }}
{%- endif %}
{%- set asked = namespace(at=-1) %}
{%- for message in messages %}
    {%- if message.role in ('user', 'tool') and not preserves %}{% set asked.at = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{{- message.content }}
    {%- elif message.role == 'assistant' %}
        {%- set keeps = effort and loop.index0 > asked.at %}
        {{- '<｜Assistant｜>' + ('<think>' + (message.reasoning_content or '') if keeps else '') + '</think>' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\n\n<｜DSML｜ calls>\n' if loop.first else '\n' }}
            {{- '<｜DSML｜ invoke name="' + call.function.name + '">\n' }}
            {%- for name, value in call.function.arguments | items %}
                {{- '<｜DSML｜ parameter name="' + name + '" string="' + ('true' if value is string else 'false') + '">' }}
                {{- (value if value is string else value | tojson) + '</｜DSML｜ parameter>' + ('' if loop.last else '\n') }}
            {%- endfor %}
            {{- '\n</｜DSML｜ invoke>' + ('\n</｜DSML｜ calls>' if loop.last else '') }}
        {%- endfor %}
        {{- '<｜end▁of▁sentence｜>' }}
    {%- else %}
        {{- '\n\n' if not loop.first and loop.previtem.role in ('user', 'tool') else '<｜User｜>' }}
        {{- '<tool_result>' + message.content + '</tool_result>' if message.role == 'tool' else message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜>' + ('<think>' if effort else '</think>') }}{% endif %}
"""

_OPEN, _CLOSED = "<think>\n", "<think>\n\n</think>\n\n"
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": (QWEN_TEMPLATE, {"block": _OPEN}),
    "qwen3_5_disable_thinking": (QWEN_TEMPLATE, {"block": _CLOSED}),
    "qwen3_5_preserve_thinking": (QWEN_TEMPLATE, {"block": _OPEN, "preserves": True}),
    **{
        f"qwen3_8_{effort}_reasoning": (
            QWEN_TEMPLATE,
            {"block": _OPEN, "preserves": True, "instruction": said, "drops_empty": True, "json_scalars": True},
        )
        for effort, said in REASONING_EFFORT_INSTRUCTIONS.items()
    },
    "qwen3_8_disable_thinking": (
        QWEN_TEMPLATE,
        {"block": _CLOSED, "preserves": True, "drops_empty": True, "json_scalars": True},
    ),
    **{
        f"nemotron3_{ultra}{kind}": (NEMOTRON_TEMPLATE, {"block": block, "ultra": bool(ultra), **more})
        for ultra in ("", "ultra_")
        for kind, block, more in (
            ("disable_thinking", "<think></think>", {}),
            ("preserve_thinking", _OPEN, {"preserves": True}),
        )
    },
    "nemotron3": (NEMOTRON_TEMPLATE, {"block": _OPEN}),
    "nemotron3_low_thinking": (NEMOTRON_TEMPLATE, {"block": _OPEN, "effort": "\n\n{reasoning effort: low}"}),
    "nemotron3_ultra": (NEMOTRON_TEMPLATE, {"block": _OPEN, "ultra": True}),
    "nemotron3_ultra_medium_thinking": (
        NEMOTRON_TEMPLATE,
        {"block": _OPEN, "ultra": True, "effort": "\n\n{reasoning effort: efficient}"},
    ),
    **{f"glm5_3_{effort.lower()}_reasoning": (GLM_TEMPLATE, {"effort": effort}) for effort in ("Max", "High", "Low")},
    "deepseekv4_1": (DEEPSEEK_V4_1_TEMPLATE, {"effort": 75}),
    "deepseekv4_1_low_reasoning": (DEEPSEEK_V4_1_TEMPLATE, {"effort": 50}),
    "deepseekv4_1_max_reasoning": (DEEPSEEK_V4_1_TEMPLATE, {"effort": 100}),
    "deepseekv4_1_preserve_thinking": (DEEPSEEK_V4_1_TEMPLATE, {"effort": 75, "preserves": True}),
    "deepseekv4_1_disable_thinking": (DEEPSEEK_V4_1_TEMPLATE, {"effort": 0, "preserves": True}),
    "kimi_k2": (KIMI_TEMPLATE, {"block": ""}),
    "kimi_k25": (KIMI_TEMPLATE, {"block": "<think>"}),
    "kimi_k25_disable_thinking": (KIMI_TEMPLATE, {"block": "<think></think>"}),
    "kimi_k26_preserve_thinking": (KIMI_TEMPLATE, {"block": "<think>", "preserves": True}),
}
every_name = pytest.mark.parametrize("name", OPTIONS)


def conversations(name: str) -> st.SearchStrategy[list[Message]]:
    thinks = not ENTRIES[name].disables_thinking
    if name.startswith("kimi"):
        return with_kimi_ids(thinks)
    # The formats that take white space off are also given some to take off.
    return trimmed(thinks) | conversation(thinking=thinks, tools=False)


def reference(name: str, messages: list[Message], *, prompt: bool) -> list[int]:
    template, options = OPTIONS[name]
    is_kimi = template is KIMI_TEMPLATE
    own = {KIMI_TEMPLATE: kimi_tokenizer, GLM_TEMPLATE: glm_tokenizer, DEEPSEEK_V4_1_TEMPLATE: deepseek_v4_1_tokenizer}
    tokenizer: PreTrainedTokenizerFast = own.get(template, make_tokenizer)()
    hf_messages: list[dict[str, Any]] = [make(name).to_openai_message(message) for message in messages]
    for message in hf_messages if not is_kimi else []:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return template_tokens(tokenizer, hf_messages, prompt=prompt, chat_template=template, **options)


@every_name
@given(data=st.data())
@examples(40)
def test_prompts_equal_the_template(name: str, data: st.DataObject) -> None:
    messages = data.draw(conversations(name))
    ends = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    asking = messages[: data.draw(st.sampled_from(ends))]
    assert make(name).build_generation_prompt(asking).to_ints() == reference(name, asking, prompt=True)


@every_name
@given(data=st.data())
@examples(30)
def test_whole_conversations_read_as_the_template_writes_them(name: str, data: st.DataObject) -> None:
    """As text: the block that the prompt opens is encoded with the prompt. Nemotron's template closes the block of an
    answer without reasoning in a way that no prompt has opened."""
    messages, renderer = data.draw(conversations(name)), make(name)
    reasons = bool(thinking_of(messages[-1]["content"]).strip())
    if name.startswith("nemotron3") and not (reasons or renderer.disables_thinking):
        return
    whole = str(renderer.tokenizer.decode(renderer.build_supervised_example(messages)[0].to_ints()))
    # In GLM-5.3 the token that ends an answer is the next role's, which the template writes with the next message.
    whole = whole.removesuffix("<|user|>") if name.startswith("glm") else whole
    assert whole == str(renderer.tokenizer.decode(reference(name, messages, prompt=False))).removesuffix("\n")
