"""Refuse names without a model and configs of unsupported models, before any weight is read.

Imports neither torch nor transformers, so that a mistake in a command line fails at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tinker_local_backend.errors import ModelLoadError, RequestError

_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Config names of the number of experts in a layer."""

_REFUSED = {
    "blt": "divides its bytes into patches, which depend on all bytes of a pass",
    "cpmant": "puts tokens of its own before a sequence",
    "modernbert-decoder": "has layers between its decoder and its head",
    "openai-gpt": "keeps no keys, so every new token would compute its sequence again",
    "recurrent_gemma": "keeps the states of one batch in its modules, not in a cache",
    "reformer": "attends within chunks of hashes, not to the keys of its cache",
    "rwkv": "keeps its states in tensors of another kind than transformers' cache",
    "xlnet": "predicts tokens in any order, with attention to both sides",
    "xlstm": "keeps its states in a cache of another kind than transformers'",
    "zamba": "has recurrent layers that advance by one token only, and custom attention code",
    "zamba2": "limits the steps of its states in prefill and not in decoding, so sampled and trained logprobs would differ",
}
"""Model types that fail because of transformers' code, not of their config."""
_CUSTOM_EXPERTS = frozenset({"llama4_text", "longcat_flash"})
"""Model types with custom expert code, to which the engine cannot add adapters."""
_SAMPLES_ONLY = frozenset({"dbrx", "jetmoe"})
"""Model types with matrices that are not linears, which adapters do not cover."""

QUANTIZED = {
    "bitsandbytes": "bitsandbytes>=0.50",
    "compressed-tensors": "compressed-tensors>=0.20",
    "fp8": None,
    "mxfp4": None,
    "torchao": "torchao>=0.18",
}
"""Quantization methods of checkpoints that the engine loads, and the package that each needs besides transformers."""

_LAYER_TYPES = frozenset(
    ("full_attention", "sliding_attention", "linear_attention", "conv", "hybrid", "hybrid_sliding", "mlp", "moe")
)
"""Supported values of config.layer_types. Others are refused, because the check at load has too few tokens to test them."""
_OTHER_ATTENTION = frozenset(
    ("chunked_attention", "indexed_attention", "deepseek_sparse_attention", "qwen_sparse_attention")
)
"""Layer types whose masks depend on more than a window; the last two are names of indexed_attention before transformers 5.18.
They run through transformers' forward (original_forward.py)."""

_CONTEXT_NAMES = (
    "max_position_embeddings",
    "model_max_length",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "n_ctx",
    "context_length",
)
"""Config names of the context length."""

_INSTEAD = "use a dense Llama- or Qwen-like model, or backend=tinker"


def base_model_of(name: str) -> str:
    """The base model in a hosted name `<model>:peft:<tokens>`, a variant with a longer context; other names are unchanged."""
    return name.partition(":peft:")[0]


def check_context(name: str, context_length: int) -> None:
    """Raise RequestError if a name asks for a longer context (in tokens) than the model has."""
    requested = name.partition(":peft:")[2]
    if requested.isdecimal() and int(requested) > context_length:
        raise RequestError(
            f"model {name!r}: a context of {requested} tokens is requested, but the model has {context_length}; leave "
            f"':peft:{requested}' out"
        )


def check_model_name(name: str) -> None:
    """Raise ModelLoadError for a path that is not a model directory, before anything is loaded."""
    path = Path(name).expanduser()
    looks_like_path = name.startswith((".", "/", "~")) or path.exists() or name.count("/") != 1
    if looks_like_path and not (path / "config.json").is_file():
        raise ModelLoadError(
            f"model {name!r}: no config.json there. Give a directory that transformers can load, or a Hugging Face id "
            "such as Qwen/Qwen3-4B-Instruct-2507"
        )


def refused(name: str, config: Any, why: str) -> ModelLoadError:
    """The error for a model that the engine does not support."""
    return ModelLoadError(f"model {name!r} ({config.model_type}) {why}; {_INSTEAD}")


def has_experts(config: Any) -> bool:
    """Whether a model with this text config is a mixture of experts."""
    can = getattr(config, "is_moe", True)  # Doge's config always has a number of experts
    return can and any((getattr(config, key, None) or 0) > 1 for key in _EXPERT_COUNTS)


def leaves_experts(config: Any) -> bool:
    """Whether the routed experts of a model with this text config stay frozen."""
    return has_experts(config) and config.model_type in _CUSTOM_EXPERTS


def samples_only(config: Any) -> bool:
    """Whether a model with this text config can be sampled from but not trained."""
    return config.model_type in _SAMPLES_ONLY


def context_length(config: Any) -> int | None:
    """The context length of a text config, in tokens."""
    stated = (getattr(config, name, None) for name in _CONTEXT_NAMES)
    return next((length for length in stated if isinstance(length, int) and length > 0), None)


def needs_original_forward(config: Any) -> bool:
    """Whether a model with this text config needs transformers' forward for attention that the check at load cannot distinguish
    from plain attention: chunked, sparse, or with a position-dependent temperature.
    """
    return bool(_layer_types(config) & _OTHER_ATTENTION) or bool(getattr(config, "attn_temperature_tuning", False))


def _layer_types(config: Any) -> set[str]:
    return set(getattr(config, "layer_types", None) or [])


def refuse_unsupported(name: str, config: Any) -> None:
    """Raise ModelLoadError if a text config is unsupported. Loading checks more."""
    if getattr(config, "is_encoder_decoder", None):
        what = "an encoder (config.is_encoder_decoder)"
        raise refused(name, config, f"has {what}, which the local engine does not support")
    if (why := _REFUSED.get(config.model_type)) is not None:
        raise refused(name, config, why)
    if context_length(config) is None:
        fix = "set max_position_embeddings in its config.json to the number of tokens of its longest sequences"
        raise refused(name, config, f"states no context length: {fix}")
    kinds = _layer_types(config) - _LAYER_TYPES - _OTHER_ATTENTION
    if kinds:
        layers = ", ".join(sorted(kinds))
        raise refused(name, config, f"has layers of type {layers}, which the local engine does not support")
    if (method := quantization_method(config)) is not None and method not in QUANTIZED:
        others = ", ".join(QUANTIZED)
        raise refused(name, config, f"is quantized with {method}; the local engine loads {others}, and plain weights")


def quantization_method(config: Any) -> str | None:
    """The quantization method of a checkpoint with this config; None for plain weights."""
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return None
    method = quantization["quant_method"] if isinstance(quantization, dict) else quantization.quant_method
    return str(getattr(method, "value", method))
