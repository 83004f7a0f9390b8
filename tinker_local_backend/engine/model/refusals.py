"""Refuse, before any weight is read, names without a model and configs of models that the engine does not support.

Imports neither torch nor transformers, so that a mistake in a command line fails at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tinker_local_backend.errors import ModelLoadError, RequestError

_NUMBERS_OF_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Names of the number of experts of a layer in configs."""

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
    "zamba": "has layers that go on from a state by one token only, and attends in a way of its own",
    "zamba2": "limits the steps of its states in prefill and not in decoding, so sampled and trained logprobs would differ",
}
"""Model types that fail for a reason that is in transformers' code, not in their config."""
_OWN_EXPERTS = frozenset({"llama4_text", "longcat_flash"})
"""Model types whose experts compute in code of their own, in which adapters here have no place."""
_SAMPLES_ONLY = frozenset({"dbrx", "jetmoe"})
"""Model types with matrices that are no linears, which adapters here do not cover."""

QUANTIZED = {
    "bitsandbytes": "bitsandbytes>=0.50",
    "compressed-tensors": "compressed-tensors>=0.20",
    "fp8": None,
    "mxfp4": None,
    "torchao": "torchao>=0.18",
}
"""Methods of checkpoints in fewer bits that the engine loads, and the package that each needs beside transformers."""

_LAYER_TYPES = frozenset(
    ("full_attention", "sliding_attention", "linear_attention", "conv", "hybrid", "hybrid_sliding", "mlp", "moe")
)
"""Of config.layer_types. What others do with more tokens than the check at load has, it cannot see."""
_OWN_LAYER_TYPES = frozenset(
    ("chunked_attention", "indexed_attention", "deepseek_sparse_attention", "qwen_sparse_attention")
)
"""Those whose masks depend on more than a window; the last two are names of indexed_attention before transformers 5.18. They run
through transformers' own forward."""

_CONTEXT_NAMES = (
    "max_position_embeddings",
    "model_max_length",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "n_ctx",
    "context_length",
)
"""Names of the context length in configs."""

_INSTEAD = "use a dense Llama- or Qwen-like model, or backend=tinker"


def base_model_of(name: str) -> str:
    """The base model of a hosted name `<model>:peft:<tokens>`, a variant with a longer context; other names are unchanged."""
    return name.partition(":peft:")[0]


def check_context(name: str, context_length: int) -> None:
    """Raise RequestError if a name asks for a longer context (in tokens) than the model has."""
    wanted = name.partition(":peft:")[2]
    if wanted.isdecimal() and int(wanted) > context_length:
        raise RequestError(
            f"model {name!r}: a context of {wanted} tokens is asked for, and the model has {context_length}; leave "
            f"':peft:{wanted}' out"
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
    """Whether layers of a model with this text config are mixtures of experts."""
    can = getattr(config, "is_moe", True)  # Doge's config has a number of experts either way
    return can and any((getattr(config, key, None) or 0) > 1 for key in _NUMBERS_OF_EXPERTS)


def leaves_experts(config: Any) -> bool:
    """Whether the routed experts of a model with this text config stay frozen."""
    return has_experts(config) and config.model_type in _OWN_EXPERTS


def samples_only(config: Any) -> bool:
    """Whether a model with this text config can be sampled from but not trained."""
    return config.model_type in _SAMPLES_ONLY


def context_length(config: Any) -> int | None:
    """The context length in tokens that a text config states."""
    stated = (getattr(config, name, None) for name in _CONTEXT_NAMES)
    return next((length for length in stated if isinstance(length, int) and length > 0), None)


def needs_own_forward(config: Any) -> bool:
    """Whether a model with this text config attends in a way that the check at load cannot tell from plain attention: by chunks,
    to chosen tokens, or with a temperature that depends on the position."""
    return bool(_layer_types(config) & _OWN_LAYER_TYPES) or bool(getattr(config, "attn_temperature_tuning", False))


def _layer_types(config: Any) -> set[str]:
    return set(getattr(config, "layer_types", None) or [])


def refuse_unsupported(name: str, config: Any) -> None:
    """Raise ModelLoadError if a text config needs what the engine does not support. Loading checks more."""
    if getattr(config, "is_encoder_decoder", None):
        what = "an encoder (config.is_encoder_decoder)"
        raise refused(name, config, f"has {what}, which the local engine does not support")
    if (why := _REFUSED.get(config.model_type)) is not None:
        raise refused(name, config, why)
    if context_length(config) is None:
        fix = "set max_position_embeddings in its config.json to the number of tokens of its longest sequences"
        raise refused(name, config, f"states no context length: {fix}")
    kinds = _layer_types(config) - _LAYER_TYPES - _OWN_LAYER_TYPES
    if kinds:
        layers = ", ".join(sorted(kinds))
        raise refused(name, config, f"has layers of type {layers}, which the local engine does not support")
    if (method := quantization_method(config)) is not None and method not in QUANTIZED:
        others = ", ".join(QUANTIZED)
        raise refused(name, config, f"is quantized with {method}; the local engine loads {others}, and plain weights")


def quantization_method(config: Any) -> str | None:
    """How the weights of a checkpoint with this config are quantized; None for plain ones."""
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return None
    method = quantization["quant_method"] if isinstance(quantization, dict) else quantization.quant_method
    return str(getattr(method, "value", method))
