"""Rules of thumb for learning rates, and parameter counts, from the shapes in a model's config; no weights are loaded.

The learning rate rule is the one that the hosted service publishes for LoRA (Thinking Machines, "LoRA Without Regret"): the
best rate falls with a power of the hidden size that was fitted per family, LoRA's is ten times that of full fine-tuning,
and it does not depend on the rank (the update is scaled by alpha / rank).

Shapes come from a model folder, from the table of well-known hub names below, or from the Hugging Face cache or hub.
"""

import math
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.tokenizer_utils import base_model_of

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

BASE_LEARNING_RATE = 5e-5
LORA_OVER_FULL = 10.0
REFERENCE_HIDDEN_SIZE = 2000
HIDDEN_SIZE_EXPONENTS = {"llama": 0.781, "qwen": 0.0775}
"""Fitted per family; a family without an entry has no published rule."""

_FAMILIES = {"llama": "llama", "qwen2": "qwen", "qwen2_moe": "qwen", "qwen3": "qwen", "qwen3_moe": "qwen"}
"""`model_type` of a config -> family. Later generations of these organizations were not part of the fit."""

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_UNEMBED = ("lm_head",)


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


def _qwen3(hidden: int, layers: int, mlp: int, heads: int, tied: bool = False) -> dict[str, Any]:
    return {**_llama(hidden, layers, mlp, heads, 128, tied), "model_type": "qwen3", "vocab_size": 151936}


def _qwen3_moe(hidden: int, layers: int, expert: int, heads: int) -> dict[str, Any]:
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": expert, "num_key_value_heads": 4}
    return {**_qwen3(hidden, layers, 3 * expert, heads), "model_type": "qwen3_moe", **experts}


_SHAPES: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.2-1B": _llama(2048, 16, 8192, 32, head_dim=64, tied=True),
    "meta-llama/Llama-3.2-3B": _llama(3072, 28, 8192, 24, tied=True),
    "meta-llama/Llama-3.1-8B": _llama(4096, 32, 14336, 32),
    "meta-llama/Llama-3.1-70B": _llama(8192, 80, 28672, 64),
    "meta-llama/Llama-3.3-70B": _llama(8192, 80, 28672, 64),
    "Qwen/Qwen3-0.6B": _qwen3(1024, 28, 3072, 16, tied=True),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 28, 6144, 16, tied=True),
    "Qwen/Qwen3-4B": _qwen3(2560, 36, 9728, 32, tied=True),
    "Qwen/Qwen3-8B": _qwen3(4096, 36, 12288, 32),
    "Qwen/Qwen3-14B": _qwen3(5120, 40, 17408, 40),
    "Qwen/Qwen3-32B": _qwen3(5120, 64, 25600, 64),
    "Qwen/Qwen3-30B-A3B": _qwen3_moe(2048, 48, 768, 32),
    "Qwen/Qwen3-235B-A22B": _qwen3_moe(4096, 94, 1536, 64),
}
"""Shapes of released models, as their config.json files say. Tuned variants have those of their base."""
_VARIANT = re.compile(r"(-Base|-Instruct(-\d{4})?|-Thinking-\d{4})?(-FP8)?$")


def get_lr(model_name: str, is_lora: bool = True) -> float:
    """A learning rate to begin with: 5e-5 * (10 with LoRA) * (2000 / hidden size) ** exponent of the family.

    Raises:
        ConfigurationError: nothing is known of the model.
        NotImplementedError: there is no published rule for its family.
    """
    config = _config(model_name)
    family = _FAMILIES.get(config.model_type)
    if family is None:
        raise NotImplementedError(
            f"model_name={model_name!r}: no learning rate rule is known for model_type {config.model_type!r}, only for "
            f"{', '.join(_FAMILIES)}; sweep over learning_rate (python -m recipes.sweep) and set it yourself"
        )
    ratio = REFERENCE_HIDDEN_SIZE / config.get_text_config().hidden_size
    multiplier = get_lora_lr_over_full_finetune_lr(model_name) if is_lora else 1.0
    return BASE_LEARNING_RATE * multiplier * ratio ** HIDDEN_SIZE_EXPONENTS[family]


def get_lora_lr_over_full_finetune_lr(model_name: str) -> float:
    """How many times the best learning rate of full fine-tuning that of LoRA is: 10 for every model that was measured."""
    return LORA_OVER_FULL


def get_full_finetune_lr_multiplier(model_name: str) -> float:
    """1 / sqrt(parameters): by how much a full fine-tuning learning rate shrinks as models grow."""
    return 1.0 / math.sqrt(get_full_finetune_param_count(model_name))


def get_lora_lr_multiplier(model_name: str) -> float:
    """What a LoRA learning rate is multiplied with when the model changes: carry it over as lr * new / old.

    get_full_finetune_lr_multiplier * get_lora_lr_over_full_finetune_lr.
    """
    return get_full_finetune_lr_multiplier(model_name) * get_lora_lr_over_full_finetune_lr(model_name)


def get_full_finetune_param_count(model_name: str) -> int:
    """Parameters of the model; tied embeddings count once."""
    return sum(parameter.numel() for parameter in _skeleton(model_name).parameters())


def get_lora_param_count(
    model_name: str,
    lora_rank: int = 32,
    train_mlp: bool = True,
    train_attn: bool = True,
    train_unembed: bool = True,
) -> int:
    """Parameters of an adapter: rank * (inputs + outputs), summed over the linears that it is put on.

    Raises:
        ConfigurationError: nothing is known of the model, the rank is below 1, or nothing would train.
        NotImplementedError: the model has weights in other forms than these linears (experts, fused projections).
    """
    if lora_rank < 1:
        raise ConfigurationError(f"lora_rank={lora_rank}: must be at least 1")
    chosen = (_ATTENTION if train_attn else ()) + (_MLP if train_mlp else ()) + (_UNEMBED if train_unembed else ())
    if not chosen:
        raise ConfigurationError("train_mlp, train_attn and train_unembed are all False: nothing would train; set one")
    linears = _linears(model_name)
    return sum(lora_rank * sum(sizes) for path, sizes in linears.items() if path.rpartition(".")[2] in chosen)


def _linears(model_name: str) -> dict[str, tuple[int, int]]:
    """Path -> (inputs, outputs) of every linear of the model."""
    from torch import nn

    skeleton = _skeleton(model_name)
    known = (*_ATTENTION, *_MLP, *_UNEMBED)
    linears = {
        path: (module.in_features, module.out_features)
        for path, module in skeleton.named_modules()
        if isinstance(module, nn.Linear)
    }
    strange = [path for path in linears if path.rpartition(".")[2] not in known]
    strange += [path for path, parameter in skeleton.named_parameters() if parameter.dim() > 2]
    if strange:
        raise NotImplementedError(
            f"model_name={model_name!r}: adapters on {strange[0]} (and {len(strange) - 1} more) are not counted; only "
            f"linears named {', '.join(known)} are"
        )
    return linears


@cache
def _skeleton(model_name: str) -> "nn.Module":
    """The module tree without memory for weights."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(_config(model_name))


def _config(model_name: str) -> "PreTrainedConfig":
    from transformers import AutoConfig

    name = base_model_of(model_name)
    folder = Path(name).expanduser()
    shapes = _SHAPES.get(_VARIANT.sub("", name.replace("/Meta-Llama", "/Llama")))
    if shapes is not None and not folder.is_dir():
        return AutoConfig.for_model(**shapes)
    try:
        return AutoConfig.from_pretrained(str(folder) if folder.is_dir() else name)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"model_name={model_name!r}: its shapes are not known; give a model folder, a hub id that can be reached, or "
            f"one of {', '.join(_SHAPES)}"
        ) from error
