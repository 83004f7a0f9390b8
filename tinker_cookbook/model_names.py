"""The released models that this library knows by name, and suggestions for misspelt names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_LLAMA_NAMES = (
    *("Meta-Llama-3-8B", "Meta-Llama-3-8B-Instruct", "Meta-Llama-3-70B", "Meta-Llama-3-70B-Instruct"),
    *("Llama-3.1-8B", "Llama-3.1-8B-Instruct", "Llama-3.1-70B", "Llama-3.1-70B-Instruct"),
    *("Llama-3.1-405B", "Llama-3.1-405B-Instruct"),
    *("Llama-3.2-1B", "Llama-3.2-1B-Instruct", "Llama-3.2-3B", "Llama-3.2-3B-Instruct"),
    "Llama-3.3-70B-Instruct",
)
_QWEN25_SIZES = ("0.5B", "1.5B", "3B", "7B", "14B", "32B", "72B")
_QWEN_NAMES = (
    *(f"Qwen3-{size}" for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B", "30B-A3B", "235B-A22B")),
    *(f"Qwen3-{size}-Base" for size in ("0.6B", "1.7B", "4B", "8B", "14B", "30B-A3B")),
    *(f"Qwen3-{size}-Instruct-2507" for size in ("4B", "30B-A3B", "235B-A22B")),
    *(f"Qwen3-VL-{size}-Instruct" for size in ("30B-A3B", "235B-A22B")),
    *(f"Qwen3.5-{size}" for size in ("4B", "9B", "9B-Base", "27B", "35B-A3B", "35B-A3B-Base", "397B-A17B")),
    *("Qwen3.6-27B", "Qwen3.6-35B-A3B", "Qwen3.8-27B"),
    *(f"Qwen2.5-{size}{kind}" for size in _QWEN25_SIZES for kind in ("", "-Instruct")),
    *(f"Qwen2.5-Coder-{size}{kind}" for size in _QWEN25_SIZES[:-1] for kind in ("", "-Instruct")),
)
_MISTRAL_NAMES = (
    *("Mistral-Small-24B-Instruct-2501", "Mistral-Small-24B-Base-2501"),
    *("Mistral-Small-3.1-24B-Instruct-2503", "Mistral-Small-3.1-24B-Base-2503"),
    *("Mistral-Nemo-Instruct-2407", "Mistral-Nemo-Base-2407", "Ministral-8B-Instruct-2410"),
)
_GEMMA_NAMES = (
    *(f"gemma-2-{size}{kind}" for size in ("2b", "9b", "27b") for kind in ("", "-it")),
    *("gemma-3-270m", "gemma-3-270m-it"),
    *(f"gemma-3-{size}{kind}" for size in ("1b", "4b", "12b", "27b") for kind in ("-pt", "-it")),
)
_DEEPSEEK_NAMES = (
    *("DeepSeek-V3.1", "DeepSeek-V3.1-Base", "DeepSeek-V3-Base"),
    *("DeepSeek-V4.1-Flash", "DeepSeek-V4.1-Flash-1017"),
)
_GPT_OSS_NAMES = ("gpt-oss-20b", "gpt-oss-120b")
_MOONSHOT_NAMES = ("Kimi-K2-Thinking", "Kimi-K2.5", "Kimi-K2.6", "Kimi-K3.1-Pro")
_ZAI_NAMES = ("GLM-5.3", "GLM-5.3-Flash")
_THINKINGMACHINES_NAMES = ("Inkling", "Inkling-Small", "Inkling-2-Small")
_NVIDIA_NAMES = (
    *("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "NVIDIA-Nemotron-3-Super-120B-A12B-BF16"),
    *("NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16", "NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16"),
    "NVIDIA-Nemotron-3.5-Super-VL-120B-A12B-BF16",
)


RELEASED: dict[str, tuple[str, ...]] = {
    "meta-llama": _LLAMA_NAMES,
    "Qwen": _QWEN_NAMES,
    "mistralai": _MISTRAL_NAMES,
    "google": _GEMMA_NAMES,
    "deepseek-ai": _DEEPSEEK_NAMES,
    "openai": _GPT_OSS_NAMES,
    "moonshotai": _MOONSHOT_NAMES,
    "zai-org": _ZAI_NAMES,
    "thinkingmachines": _THINKINGMACHINES_NAMES,
    "nvidia": _NVIDIA_NAMES,
}
"""Text models of known families, by organization on the hub; not a complete list."""

HOSTED_MODELS = frozenset(
    [
        *(f"meta-llama/{name}" for name in ("Llama-3.1-8B-Instruct", "Llama-3.3-70B-Instruct")),
        *(f"Qwen/{name}" for name in _QWEN_NAMES if re.match(r"Qwen3(-VL|\.\d)-.*(?<!-Base)$", name)),
        *(f"Qwen/Qwen3-{size}" for size in ("8B", "32B", "30B-A3B")),
        *(f"Qwen/Qwen3-{size}-Instruct-2507" for size in ("4B", "30B-A3B", "235B-A22B")),
        *(f"deepseek-ai/{name}" for name in _DEEPSEEK_NAMES if not name.endswith("-Base")),
        *(f"zai-org/{name}" for name in _ZAI_NAMES),
        *(f"openai/{name}" for name in _GPT_OSS_NAMES),
        *(f"moonshotai/{name}" for name in _MOONSHOT_NAMES),
        *(f"nvidia/{name}" for name in _NVIDIA_NAMES),
    ]
)
"""Text models that the hosted service has offered. ServiceClient.get_server_capabilities lists the current ones."""


def did_you_mean(model_name: str, also: Iterable[str] = ()) -> str:
    """` (did you mean X?)` for the closest known model, or name in `also`; empty if none is close."""
    known = {f"{organization}/{name}" for organization, names in RELEASED.items() for name in names}
    known |= {*HOSTED_MODELS, *also}
    written = {full.lower(): full for full in sorted(known)}
    written |= {full.partition("/")[2].lower(): full for full in sorted(known) if "/" in full}
    near = difflib.get_close_matches(model_name.lower(), written, n=1, cutoff=0.75)
    return f" (did you mean {written[near[0]]}?)" if near and written[near[0]] != model_name else ""
