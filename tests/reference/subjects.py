"""Which renderers are compared, by family, and what of cases.py each can take. Plain data: both environments read it."""

from typing import NamedTuple

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
KIMI = (
    *("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)
WORDS = """
You are ChatGPT, a large language model trained by OpenAI. Knowledge cutoff Current date Reasoning low medium high
Valid channels analysis commentary final. Channel must be included for every message.
You are Kimi, an AI assistant created by Moonshot AI. ## Return of functions.add:0 functions.look:1 functions.odd:0
Reasoning effort is set to low xhigh. Keep your thinking brief and focused, moving directly to the conclusion without
unnecessary elaboration. Please think carefully through the task, validate key assumptions, consider plausible
alternatives, and prioritize correctness, consistency, and clarity in the answer. {reasoning effort: efficient}
Your developer instructions tool function parameter string number arguments name add look odd lines two false true null
<function=add>\n<parameter=a>\n</parameter>\n</function>\n {"a": 1, "b": 2} {"name": "add", "arguments": {}}
"""
"""What the synthetic tokenizers learn besides: the fewer tokens, the smaller the recordings."""


class Family(NamedTuple):
    """markers: the special tokens of its synthetic tokenizer. calls: the key of CALL_REPLIES; "" for no tools."""

    renderers: tuple[str, ...]
    markers: tuple[str, ...]
    end: str
    calls: str = ""
    thinks: bool = False
    bos: str | None = None
    eos: str | None = None


FAMILIES = {
    "role_colon": Family(("role_colon",), CHATML, "\n\nUser:", eos="<|im_end|>"),
    "llama3": Family(
        ("llama3",),
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
        bos="<|begin_of_text|>",
        eos="<|end_of_text|>",
    ),
    "qwen3": Family(
        ("qwen3", "qwen3_disable_thinking", "qwen3_instruct"),
        CHATML,
        "<|im_end|>",
        "json",
        thinks=True,
        eos="<|im_end|>",
    ),
    "qwen3_vl": Family(("qwen3_vl_instruct", "qwen3_vl"), CHATML, "<|im_end|>", "json", thinks=True, eos="<|im_end|>"),
    "qwen3_5": Family(
        ("qwen3_5", "qwen3_5_disable_thinking", "qwen3_5_preserve_thinking"),
        *(CHATML, "<|im_end|>", "xml"),
        thinks=True,
        eos="<|im_end|>",
    ),
    "qwen3_8": Family(
        (
            *("qwen3_8_xhigh_reasoning", "qwen3_8_medium_reasoning", "qwen3_8_low_reasoning"),
            "qwen3_8_disable_thinking",
        ),
        *(CHATML, "<|im_end|>", "xml"),
        thinks=True,
        eos="<|im_end|>",
    ),
    "nemotron3": Family(
        (
            *("nemotron3", "nemotron3_disable_thinking", "nemotron3_preserve_thinking", "nemotron3_low_thinking"),
            *("nemotron3_ultra", "nemotron3_ultra_disable_thinking", "nemotron3_ultra_medium_thinking"),
            "nemotron3_ultra_preserve_thinking",
        ),
        *(CHATML, "<|im_end|>", "xml"),
        thinks=True,
        eos="<|im_end|>",
    ),
    "kimi": Family(
        (
            *("kimi_k2", "kimi_k25", "kimi_k25_disable_thinking", "kimi_k26", "kimi_k26_disable_thinking"),
            "kimi_k26_preserve_thinking",
        ),
        *(KIMI, "<|im_end|>", "kimi"),
        thinks=True,
        bos="[BOS]",
        eos="[EOS]",
    ),
    "deepseekv3": Family(
        ("deepseekv3", "deepseekv3_disable_thinking", "deepseekv3_thinking"),
        (
            *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁sep｜>"),
            *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
            *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
        ),
        *("<｜end▁of▁sentence｜>", "deepseek"),
        thinks=True,
        bos="<｜begin▁of▁sentence｜>",
        eos="<｜end▁of▁sentence｜>",
    ),
    "deepseekv4_1": Family(
        (
            *("deepseekv4_1", "deepseekv4_1_low_reasoning", "deepseekv4_1_max_reasoning"),
            *("deepseekv4_1_disable_thinking", "deepseekv4_1_preserve_thinking"),
        ),
        (
            *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜System｜>"),
            "｜DSML｜",
        ),
        *("<｜end▁of▁sentence｜>", "dsml"),
        thinks=True,
        bos="<｜begin▁of▁sentence｜>",
        eos="<｜end▁of▁sentence｜>",
    ),
    "glm5_3": Family(
        ("glm5_3_max_reasoning", "glm5_3_high_reasoning", "glm5_3_low_reasoning"),
        (
            *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"),
            *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        ),
        *("<|user|>", "glm"),
        thinks=True,
        eos="<|endoftext|>",
    ),
    "gpt_oss": Family(
        (
            *("gpt_oss_no_sysprompt", "gpt_oss_low_reasoning", "gpt_oss_medium_reasoning"),
            "gpt_oss_high_reasoning",
        ),
        (
            *("<|endoftext|>", "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"),
            *("<|end|>", "<|return|>", "<|call|>"),
        ),
        *("<|return|>", "harmony"),
        thinks=True,
        eos="<|return|>",
    ),
}
