"""Released models by hub name: the patterns that say what a name means, and the names that belong to each organization.

Only models whose chat format a renderer writes: a near relative (Qwen3.5, Thinking-2507, Qwen2.5-1M, DeepSeek-V3) is no
match. Reading a local folder, and what to do with the answers, is model_info's.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

BASE = ("role_colon",)


@dataclass(frozen=True)
class ModelAttributes:
    """What a hub name says. `version_str` and `size_str` are as in the name ("3.1", "30B-A3B"), empty if it names none.

    is_chat: trained to chat; False for a base model.
    recommended_renderers: names for get_renderer, the default first. All of them write text only, whatever else the
        model takes in (is_vl: images, is_audio_in: audio).
    """

    organization: str
    version_str: str
    size_str: str
    is_chat: bool
    recommended_renderers: tuple[str, ...]
    is_vl: bool = False
    is_audio_in: bool = False


class _Family(NamedTuple):
    """`version` and `size` stand in where the name does not spell them (groups `v` and `s` of the pattern)."""

    pattern: re.Pattern[str]
    renderers: tuple[str, ...]
    version: str = ""
    size: str = ""
    is_vl: bool = False


_S = r"(?P<s>\d+(\.\d+)?B(-A\d+(\.\d+)?B)?)"
QWEN3_HYBRID = ("qwen3", "qwen3_disable_thinking")
_DEEPSEEK = ("deepseekv3", "deepseekv3_disable_thinking", "deepseekv3_thinking")
GPT_OSS_EFFORTS = (
    "gpt_oss_medium_reasoning",
    "gpt_oss_low_reasoning",
    "gpt_oss_high_reasoning",
    "gpt_oss_no_sysprompt",
)


def _family(pattern: str, renderers: tuple[str, ...], version: str = "", size: str = "", vl: bool = False) -> _Family:
    return _Family(re.compile(pattern), renderers, version, size, vl)


_FAMILIES = (
    _family(rf"Qwen/Qwen(?P<v>3)-{_S}-Instruct-2507(-FP8)?", ("qwen3_instruct",)),
    _family(rf"Qwen/Qwen(?P<v>3)-{_S}-Base", BASE),
    _family(rf"Qwen/Qwen(?P<v>3)-{_S}(-FP8)?", QWEN3_HYBRID),
    _family(rf"Qwen/Qwen(?P<v>2\.5)-(Coder-)?{_S}-Instruct", ("qwen2_5",)),
    _family(rf"Qwen/Qwen(?P<v>2\.5)-(Coder-|Math-)?{_S}", BASE),
    # The plain form of Llama 3.0, which the later ones read too (see renderers/llama3.py).
    _family(rf"meta-llama/(Meta-)?Llama-(?P<v>3(\.\d)?)-{_S}-Instruct", ("llama3",)),
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
    _family(r"deepseek-ai/DeepSeek-V(?P<v>3\.1)", _DEEPSEEK, size="671B-A37B"),
    _family(r"deepseek-ai/DeepSeek-V(?P<v>3(\.1)?)-Base", BASE, size="671B-A37B"),
    _family(r"openai/gpt-oss-(?P<s>20b|120b)", GPT_OSS_EFFORTS),
    # Whoever made it, a base model has no format of its own.
    _family(r"[^/]+/[^/]+-Base", BASE),
)

LLAMA = (
    *("Meta-Llama-3-8B", "Meta-Llama-3-8B-Instruct", "Meta-Llama-3-70B", "Meta-Llama-3-70B-Instruct"),
    *("Llama-3.1-8B", "Llama-3.1-8B-Instruct", "Llama-3.1-70B", "Llama-3.1-70B-Instruct"),
    *("Llama-3.1-405B", "Llama-3.1-405B-Instruct"),
    *("Llama-3.2-1B", "Llama-3.2-1B-Instruct", "Llama-3.2-3B", "Llama-3.2-3B-Instruct"),
    "Llama-3.3-70B-Instruct",
)
_QWEN25_SIZES = ("0.5B", "1.5B", "3B", "7B", "14B", "32B", "72B")
QWEN = (
    *(f"Qwen3-{size}" for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B", "30B-A3B", "235B-A22B")),
    *(f"Qwen3-{size}-Base" for size in ("0.6B", "1.7B", "4B", "8B", "14B", "30B-A3B")),
    *(f"Qwen3-{size}-Instruct-2507" for size in ("4B", "30B-A3B", "235B-A22B")),
    *(f"Qwen2.5-{size}{kind}" for size in _QWEN25_SIZES for kind in ("", "-Instruct")),
    *(f"Qwen2.5-Coder-{size}{kind}" for size in _QWEN25_SIZES[:-1] for kind in ("", "-Instruct")),
)
MISTRAL = (
    *("Mistral-Small-24B-Instruct-2501", "Mistral-Small-24B-Base-2501"),
    *("Mistral-Small-3.1-24B-Instruct-2503", "Mistral-Small-3.1-24B-Base-2503"),
    *("Mistral-Nemo-Instruct-2407", "Mistral-Nemo-Base-2407", "Ministral-8B-Instruct-2410"),
)
GEMMA = (
    *(f"gemma-2-{size}{kind}" for size in ("2b", "9b", "27b") for kind in ("", "-it")),
    *("gemma-3-270m", "gemma-3-270m-it"),
    *(f"gemma-3-{size}{kind}" for size in ("1b", "4b", "12b", "27b") for kind in ("-pt", "-it")),
)
DEEPSEEK = ("DeepSeek-V3.1", "DeepSeek-V3.1-Base", "DeepSeek-V3-Base")
GPT_OSS = ("gpt-oss-20b", "gpt-oss-120b")


def attributes_of(hub_name: str) -> ModelAttributes | None:
    """What the name of a model on the hub says; None when no pattern matches it."""
    for family in _FAMILIES:
        if match := family.pattern.fullmatch(hub_name):
            said = match.groupdict()
            return ModelAttributes(
                organization=hub_name.partition("/")[0],
                version_str=said.get("v") or family.version,
                size_str=said.get("s") or family.size,
                is_chat=family.renderers != BASE,
                recommended_renderers=family.renderers,
                is_vl=family.is_vl,
            )
    return None


def attributes_of_all(organization: str, names: tuple[str, ...]) -> dict[str, ModelAttributes]:
    """By name without the organization. Raises KeyError for a name that no pattern matches."""
    found = {name: attributes_of(f"{organization}/{name}") for name in names}
    if unmatched := sorted(name for name, attributes in found.items() if attributes is None):
        raise KeyError(f"{organization}: no pattern matches {', '.join(unmatched)}")
    return {name: attributes for name, attributes in found.items() if attributes is not None}
