"""Families of released models by the pattern of their hub names, and the renderers of each, the default first.

Only models whose chat format a renderer supports: close relatives (Thinking-2507, Qwen2.5-1M, DeepSeek-V3) do not
match. The renderer of the Inkling models is rejected when it is requested.
"""

import re
from typing import NamedTuple

from tinker_cookbook.renderers.registry import ELSEWHERE

BASE = ("role_colon",)


class Family(NamedTuple):
    """`version` and `size` are defaults for names that do not contain them (groups `v` and `s` of the pattern)."""

    pattern: re.Pattern[str]
    renderers: tuple[str, ...]
    version: str = ""
    size: str = ""
    is_vl: bool = False
    is_audio_in: bool = False


_S = r"(?P<s>\d+(\.\d+)?B(-A\d+(\.\d+)?B)?)"
QWEN3_HYBRID = ("qwen3", "qwen3_disable_thinking")
DEEPSEEK = ("deepseekv3", "deepseekv3_disable_thinking", "deepseekv3_thinking")
GPT_OSS = (
    "gpt_oss_no_sysprompt",
    "gpt_oss_medium_reasoning",
    "gpt_oss_low_reasoning",
    "gpt_oss_high_reasoning",
)
LLAMA3_1 = ("llama3", "llama3_tools")
QWEN3_5 = ("qwen3_5", "qwen3_5_disable_thinking", "qwen3_5_preserve_thinking")
QWEN3_8 = (
    "qwen3_8_xhigh_reasoning",
    "qwen3_8_disable_thinking",
    "qwen3_8_medium_reasoning",
    "qwen3_8_low_reasoning",
)
KIMI_K25 = ("kimi_k25", "kimi_k25_disable_thinking")
KIMI_K26 = ("kimi_k26", "kimi_k26_disable_thinking", "kimi_k26_preserve_thinking")
NEMOTRON3 = ("nemotron3", "nemotron3_disable_thinking", "nemotron3_preserve_thinking")
NEMOTRON3_LIGHTNING = ("nemotron3_ultra", "nemotron3_ultra_disable_thinking", "nemotron3_ultra_preserve_thinking")
NEMOTRON3_ULTRA = (
    *("nemotron3_ultra", "nemotron3_ultra_disable_thinking"),
    *("nemotron3_ultra_medium_thinking", "nemotron3_ultra_preserve_thinking"),
)
DEEPSEEK_V4_1 = (
    *("deepseekv4_1", "deepseekv4_1_low_reasoning", "deepseekv4_1_max_reasoning"),
    *("deepseekv4_1_disable_thinking", "deepseekv4_1_preserve_thinking"),
)
KIMI_K31_PRO = (
    *("kimi_k31_pro_max_reasoning", "kimi_k31_pro_high_reasoning", "kimi_k31_pro_low_reasoning"),
    *("kimi_k31_pro_disable_thinking", "kimi_k31_pro_no_reasoning_effort"),
)
GLM5_3 = ("glm5_3_max_reasoning", "glm5_3_low_reasoning", "glm5_3_high_reasoning")


def _family(pattern: str, renderers: tuple[str, ...], version: str = "", size: str = "", vl: bool = False) -> Family:
    return Family(re.compile(pattern), renderers, version, size, vl)


FAMILIES = (
    _family(rf"Qwen/Qwen(?P<v>3)-{_S}-Instruct-2507(-FP8)?", ("qwen3_instruct",)),
    _family(rf"Qwen/Qwen(?P<v>3)-{_S}-Base", BASE),
    _family(rf"Qwen/Qwen(?P<v>3)-{_S}(-FP8)?", QWEN3_HYBRID),
    _family(rf"Qwen/Qwen(?P<v>3)-VL-{_S}-Instruct(-FP8)?", ("qwen3_vl_instruct",), vl=True),
    _family(rf"Qwen/Qwen(?P<v>3)-VL-{_S}-Thinking(-FP8)?", ("qwen3_vl",), vl=True),
    _family(rf"Qwen/Qwen(?P<v>3\.5)-{_S}-Base", BASE, vl=True),
    _family(rf"Qwen/Qwen(?P<v>3\.[56])-{_S}(-FP8)?", QWEN3_5, vl=True),
    _family(rf"Qwen/Qwen(?P<v>3\.8)-{_S}(-FP8)?", QWEN3_8, vl=True),
    _family(rf"Qwen/Qwen(?P<v>2\.5)-(Coder-)?{_S}-Instruct", ("qwen2_5",)),
    _family(rf"Qwen/Qwen(?P<v>2\.5)-(Coder-|Math-)?{_S}", BASE),
    # The plain form of Llama 3.0, which the later models can read too (see renderers/llama3.py).
    _family(rf"meta-llama/(Meta-)?Llama-(?P<v>3\.\d)-{_S}-Instruct", LLAMA3_1),
    _family(rf"meta-llama/(Meta-)?Llama-(?P<v>3)-{_S}-Instruct", ("llama3",)),
    _family(rf"meta-llama/(Meta-)?Llama-(?P<v>3(\.\d)?)-{_S}", BASE),
    _family(r"mistralai/Mistral-Small-(?P<s>24B)-Instruct-2501", ("mistral",), version="3"),
    _family(r"mistralai/Mistral-Small-(?P<v>3\.1)-(?P<s>24B)-Instruct-2503", ("mistral",), vl=True),
    _family(r"mistralai/Ministral-(?P<s>8B)-Instruct-2410", ("mistral_v3",)),
    _family(r"mistralai/Mistral-Nemo-Instruct-2407", ("mistral_v3",), size="12B"),
    _family(r"mistralai/Mistral-Small-(?P<s>24B)-Base-2501", BASE, version="3"),
    _family(r"mistralai/Mistral-Small-(?P<v>3\.1)-(?P<s>24B)-Base-2503", BASE, vl=True),
    _family(r"mistralai/Mistral-Nemo-Base-2407", BASE, size="12B"),
    _family(r"google/gemma-(?P<v>2)-(?P<s>(2|9|27)b)-it", ("gemma",)),
    _family(r"google/gemma-(?P<v>3)-(?P<s>270m|1b)-it", ("gemma",)),
    _family(r"google/gemma-(?P<v>3)-(?P<s>(4|12|27)b)-it", ("gemma",), vl=True),
    _family(r"google/gemma-(?P<v>2)-(?P<s>(2|9|27)b)", BASE),
    _family(r"google/gemma-(?P<v>3)-(?P<s>1b)-pt", BASE),
    _family(r"google/gemma-(?P<v>3)-(?P<s>270m)", BASE),
    _family(r"google/gemma-(?P<v>3)-(?P<s>(4|12|27)b)-pt", BASE, vl=True),
    _family(r"deepseek-ai/DeepSeek-V(?P<v>3\.1)", DEEPSEEK, size="671B-A37B"),
    _family(r"deepseek-ai/DeepSeek-V(?P<v>3(\.1)?)-Base", BASE, size="671B-A37B"),
    _family(r"openai/gpt-oss-(?P<s>20b|120b)", GPT_OSS),
    _family(r"moonshotai/Kimi-(?P<v>K2)-Thinking", ("kimi_k2",), size="1T-A32B"),
    _family(r"moonshotai/Kimi-(?P<v>K2\.5)", KIMI_K25, size="1T-A32B", vl=True),
    _family(r"moonshotai/Kimi-(?P<v>K2\.6)", KIMI_K26, size="1T-A32B", vl=True),
    _family(rf"nvidia/NVIDIA-Nemotron-(?P<v>3)-Nano-{_S}-BF16", NEMOTRON3),
    _family(rf"nvidia/NVIDIA-Nemotron-(?P<v>3)-Super-{_S}-BF16", (*NEMOTRON3, "nemotron3_low_thinking")),
    _family(rf"nvidia/NVIDIA-Nemotron-(?P<v>3)-Ultra-{_S}-BF16", NEMOTRON3_ULTRA),
    _family(rf"nvidia/NVIDIA-Nemotron-(?P<v>3\.5)-Lightning-{_S}-BF16", NEMOTRON3_LIGHTNING),
    _family(
        rf"nvidia/NVIDIA-Nemotron-(?P<v>3\.5)-Super-VL-{_S}-BF16",
        NEMOTRON3_ULTRA,
        vl=True,
    ),
    _family(r"deepseek-ai/DeepSeek-V(?P<v>4\.1)-Flash(-1017)?", DEEPSEEK_V4_1, size="552B-A16B"),
    _family(r"moonshotai/Kimi-(?P<v>K3\.1)-Pro", KIMI_K31_PRO, size="2.8T-A104B", vl=True),
    _family(r"zai-org/GLM-(?P<v>5\.3)", GLM5_3, size="744B-A40B"),
    _family(r"zai-org/GLM-(?P<v>5\.3)-Flash", GLM5_3, size="320B-A18B"),
    _family(r"thinkingmachines/Inkling", ELSEWHERE, "1", "975B-A41B", vl=True)._replace(is_audio_in=True),
    _family(r"thinkingmachines/Inkling-Small", ELSEWHERE, "1", "276B-A12B", vl=True)._replace(is_audio_in=True),
    _family(r"thinkingmachines/Inkling-(?P<v>2)-Small", ELSEWHERE, size="594B-A17B", vl=True),
    # Other models with this name are treated the same; their size is unknown.
    _family(r"thinkingmachines/(?P<v>(?P<s>Inkling.*))", ELSEWHERE, vl=True)._replace(is_audio_in=True),
    # No base model has a chat format.
    _family(r"[^/]+/[^/]+-Base", BASE),
)
