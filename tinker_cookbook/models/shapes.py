"""Shapes of released models by hub name, copied from their config.json files, so that the hub is not needed.

An entry contains the arguments of AutoConfig.for_model; for a vision model those of its text model. Fine-tuned
variants have the shapes of their base.
"""

import re
from typing import Any

_VARIANT = re.compile(r"(-Base(-\d{4})?|-Instruct(-\d{4})?|-Thinking-\d{4}|-it|-pt)?(-FP8)?$")


def shapes_of(hub_name: str) -> dict[str, Any] | None:
    """Keyword arguments for AutoConfig.for_model; None for a name that is not in the table."""
    return _SHAPES.get(_VARIANT.sub("", hub_name.replace("/Meta-Llama", "/Llama")))


def context_length_of(hub_name: str) -> int | None:
    """The context length of a released model (max_position_embeddings); None for one that is not in the table."""
    name = hub_name.replace("/Meta-Llama", "/Llama").removesuffix("-FP8")
    return next((length for pattern, length in _CONTEXTS.items() if re.fullmatch(pattern, name)), None)


def known_names() -> list[str]:
    """The names in the table, without the suffixes of fine-tuned variants."""
    return list(_SHAPES)


def _llama(hidden: int, layers: int, mlp: int, heads: int, head_dim: int = 128, tied: bool = False) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": head_dim,
        "vocab_size": 128256,
        "tie_word_embeddings": tied,
    }


def _qwen2(hidden: int, layers: int, mlp: int, heads: int, kv_heads: int, tied: bool = False) -> dict[str, Any]:
    shapes = {"model_type": "qwen2", "num_key_value_heads": kv_heads, "vocab_size": 151936 if tied else 152064}
    return {**_llama(hidden, layers, mlp, heads, hidden // heads, tied), **shapes}


def _mistral(hidden: int, layers: int, mlp: int) -> dict[str, Any]:
    return {**_llama(hidden, layers, mlp, 32), "model_type": "mistral", "vocab_size": 131072}


def _gemma(
    version: int, hidden: int, layers: int, mlp: int, heads: int, kv_heads: int, head_dim: int, vocabulary: int
) -> dict[str, Any]:
    shapes = {"model_type": {2: "gemma2", 3: "gemma3_text"}[version], "num_key_value_heads": kv_heads}
    return {**_llama(hidden, layers, mlp, heads, head_dim, tied=True), **shapes, "vocab_size": vocabulary}


def _qwen3(hidden: int, layers: int, mlp: int, heads: int, tied: bool = False) -> dict[str, Any]:
    return {**_llama(hidden, layers, mlp, heads, 128, tied), "model_type": "qwen3", "vocab_size": 151936}


def _qwen3_moe(hidden: int, layers: int, expert: int, heads: int) -> dict[str, Any]:
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": expert, "num_key_value_heads": 4}
    return {**_qwen3(hidden, layers, 3 * expert, heads), "model_type": "qwen3_moe", **experts}


def _qwen3_5(hidden: int, layers: int, heads: int, kv_heads: int, value_heads: int, mlp: int) -> dict[str, Any]:
    """Every fourth layer has full attention, whose queries are gated; the others a gated delta rule."""
    return {
        "model_type": "qwen3_5_text",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "vocab_size": 248320,
        "tie_word_embeddings": hidden < 4096,
    }


def _qwen3_5_moe(
    hidden: int, layers: int, heads: int, value_heads: int, expert: int, experts: int, used: int
) -> dict[str, Any]:
    routed = {"moe_intermediate_size": expert, "num_experts": experts, "num_experts_per_tok": used}
    return {
        **_qwen3_5(hidden, layers, heads, 2, value_heads, 0),
        "model_type": "qwen3_5_moe_text",
        "shared_expert_intermediate_size": expert,
        "tie_word_embeddings": False,
        **routed,
    }


def _deepseek_v3(heads: int, experts: int, dense_layers: int, vocabulary: int, quantized: str) -> dict[str, Any]:
    return {
        "model_type": "deepseek_v3",
        "quantization_config": {"quant_method": quantized},
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "first_k_dense_replace": dense_layers,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": vocabulary,
    }


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "num_hidden_layers": layers,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": experts,
        "vocab_size": 201088,
        "quantization_config": {"quant_method": "mxfp4"},  # as released
    }


def _nemotron_h(
    hidden: int, mamba: int, moe: int, attention: int, heads: int, mamba_heads: int, experts: tuple[int, int, int, int]
) -> dict[str, Any]:
    """`experts`: their number, their width, that of the shared one, and the width of the projection in front of them
    (0: none). The order of the layer types is left out; counts do not depend on it.
    """
    number, expert, shared, latent = experts
    return {
        "model_type": "nemotron_h",
        "hidden_size": hidden,
        "layers_block_type": ["linear_attention"] * mamba + ["moe"] * moe + ["full_attention"] * attention,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_num_heads": mamba_heads,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "n_routed_experts": number,
        "n_shared_experts": 1,
        "moe_intermediate_size": expert,
        "moe_shared_expert_intermediate_size": shared,
        "moe_latent_size": latent or None,
        "vocab_size": 131072,
    }


_QWEN2_5 = {
    "0.5B": _qwen2(896, 24, 4864, 14, 2, tied=True),
    "1.5B": _qwen2(1536, 28, 8960, 12, 2, tied=True),
    "3B": _qwen2(2048, 36, 11008, 16, 2, tied=True),
    "7B": _qwen2(3584, 28, 18944, 28, 4),
    "14B": _qwen2(5120, 48, 13824, 40, 8),
    "32B": _qwen2(5120, 64, 27648, 40, 8),
    "72B": _qwen2(8192, 80, 29568, 64, 8),
}
_GEMMA = {
    "2-2b": _gemma(2, 2304, 26, 9216, 8, 4, 256, 256000),
    "2-9b": _gemma(2, 3584, 42, 14336, 16, 8, 256, 256000),
    "2-27b": _gemma(2, 4608, 46, 36864, 32, 16, 128, 256000),
    "3-270m": _gemma(3, 640, 18, 2048, 4, 1, 256, 262144),
    "3-1b": _gemma(3, 1152, 26, 6912, 4, 1, 256, 262144),
    "3-4b": _gemma(3, 2560, 34, 10240, 8, 4, 256, 262208),
    "3-12b": _gemma(3, 3840, 48, 15360, 16, 8, 256, 262208),
    "3-27b": _gemma(3, 5376, 62, 21504, 32, 16, 128, 262208),
}
_LLAMA_8B, _LLAMA_70B = _llama(4096, 32, 14336, 32), _llama(8192, 80, 28672, 64)
_MISTRAL_24B, _MISTRAL_NEMO = _mistral(5120, 40, 32768), _mistral(5120, 40, 14336)
_NEMOTRON3_SUPER = _nemotron_h(4096, 40, 40, 8, 32, 128, (512, 2688, 5376, 1024))
_DEEPSEEK_V3 = _deepseek_v3(128, 256, 3, 129280, "fp8")
_KIMI_K2 = _deepseek_v3(64, 384, 1, 163840, "compressed-tensors")
# Qwen3.6 has the shapes of Qwen3.5, as its model cards state them (hidden dimension, layers, heads, experts). Qwen3.8-27B is
# run as the same Qwen3_5ForConditionalGeneration of 27B (docs.nvidia.com/nemo/automodel, Qwen3.8-27B).
_QWEN3_5_27B = _qwen3_5(5120, 64, 24, 4, 48, 17408)
_QWEN3_5_35B = _qwen3_5_moe(2048, 40, 16, 32, 512, 256, 8)
_NEMOTRON3_30B = _nemotron_h(2688, 23, 23, 6, 32, 64, (128, 1856, 3712, 0))

_SHAPES: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.2-1B": _llama(2048, 16, 8192, 32, head_dim=64, tied=True),
    "meta-llama/Llama-3.2-3B": _llama(3072, 28, 8192, 24, tied=True),
    "meta-llama/Llama-3-8B": _LLAMA_8B,
    "meta-llama/Llama-3-70B": _LLAMA_70B,
    "meta-llama/Llama-3.1-8B": _LLAMA_8B,
    "meta-llama/Llama-3.1-70B": _LLAMA_70B,
    "meta-llama/Llama-3.1-405B": _llama(16384, 126, 53248, 128),
    "meta-llama/Llama-3.3-70B": _LLAMA_70B,
    **{f"Qwen/Qwen2.5-{size}": shapes for size, shapes in _QWEN2_5.items()},
    **{f"Qwen/Qwen2.5-Coder-{size}": shapes for size, shapes in _QWEN2_5.items() if size != "72B"},
    **{f"Qwen/Qwen2.5-Math-{size}": _QWEN2_5[size] for size in ("1.5B", "7B", "72B")},
    "mistralai/Mistral-Small-24B": _MISTRAL_24B,
    "mistralai/Mistral-Small-3.1-24B": _MISTRAL_24B,
    "mistralai/Mistral-Nemo": _MISTRAL_NEMO,
    "mistralai/Ministral-8B": _mistral(4096, 36, 12288),
    **{f"google/gemma-{size}": shapes for size, shapes in _GEMMA.items()},
    "Qwen/Qwen3-0.6B": _qwen3(1024, 28, 3072, 16, tied=True),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 28, 6144, 16, tied=True),
    "Qwen/Qwen3-4B": _qwen3(2560, 36, 9728, 32, tied=True),
    "Qwen/Qwen3-8B": _qwen3(4096, 36, 12288, 32),
    "Qwen/Qwen3-14B": _qwen3(5120, 40, 17408, 40),
    "Qwen/Qwen3-32B": _qwen3(5120, 64, 25600, 64),
    "Qwen/Qwen3-30B-A3B": _qwen3_moe(2048, 48, 768, 32),
    "Qwen/Qwen3-235B-A22B": _qwen3_moe(4096, 94, 1536, 64),
    "Qwen/Qwen3-VL-30B-A3B": _qwen3_moe(2048, 48, 768, 32),
    "Qwen/Qwen3-VL-235B-A22B": _qwen3_moe(4096, 94, 1536, 64),
    "Qwen/Qwen3.5-4B": _qwen3_5(2560, 32, 16, 4, 32, 9216),
    "Qwen/Qwen3.5-9B": _qwen3_5(4096, 32, 16, 4, 32, 12288),
    "Qwen/Qwen3.5-27B": _QWEN3_5_27B,
    "Qwen/Qwen3.5-35B-A3B": _QWEN3_5_35B,
    "Qwen/Qwen3.5-397B-A17B": _qwen3_5_moe(4096, 60, 32, 64, 1024, 512, 10),
    "Qwen/Qwen3.6-27B": _QWEN3_5_27B,
    "Qwen/Qwen3.6-35B-A3B": _QWEN3_5_35B,
    "Qwen/Qwen3.8-27B": _QWEN3_5_27B,
    "deepseek-ai/DeepSeek-V3": _DEEPSEEK_V3,
    "deepseek-ai/DeepSeek-V3.1": _DEEPSEEK_V3,
    "moonshotai/Kimi-K2-Thinking": _KIMI_K2,
    "moonshotai/Kimi-K2.5": _KIMI_K2,
    "moonshotai/Kimi-K2.6": _KIMI_K2,
    "openai/gpt-oss-20b": _gpt_oss(24, 32),
    "openai/gpt-oss-120b": _gpt_oss(36, 128),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": _NEMOTRON3_30B,
    "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16": _NEMOTRON3_30B,
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": _NEMOTRON3_SUPER,
    "nvidia/NVIDIA-Nemotron-3.5-Super-VL-120B-A12B-BF16": _NEMOTRON3_SUPER,
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": _nemotron_h(8192, 48, 48, 12, 64, 256, (512, 5120, 10240, 2048)),
}

_CONTEXTS = {
    r"meta-llama/Llama-3\.[123]-.*": 131072,
    r"Qwen/Qwen3-.*-2507": 262144,
    r"Qwen/Qwen3-VL-.*": 262144,
    r"Qwen/Qwen3-.*-Base": 32768,
    r"Qwen/Qwen3-[\d.]+B(-A\d+B)?": 40960,
    # 3.6: its model cards, "262,144 natively". 3.8: docs.nvidia.com/nemo/automodel, inference.readthedocs.io (qwen3.8).
    r"Qwen/Qwen3\.[568]-.*": 262144,
    r"Qwen/Qwen2\.5-(Coder-)?[\d.]+B-Instruct": 32768,
    r"deepseek-ai/DeepSeek-V3\.1(-Base)?": 163840,
    r"openai/gpt-oss-(20|120)b": 131072,
    r"moonshotai/Kimi-K2(-Thinking|\.5)": 262144,
    r"nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 262144,
    r"google/gemma-2-.*": 8192,
}
"""Context lengths by pattern of the name; the first match counts."""
