"""Rules of thumb for learning rates, and parameter counts, from the shapes in a model's config; no weights are loaded.

The learning rate rule is the one that the hosted service publishes for LoRA (Thinking Machines, "LoRA Without
Regret"): the best rate falls with a power of the hidden size, fitted per family; LoRA's rate is ten times that of full
fine-tuning; and it does not depend on the rank (the update is scaled by alpha / rank).

Shapes come from a model folder, from the table of well-known hub names in shapes, or from the Hugging Face cache or
hub.
"""

import logging
import math
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tinker_cookbook import backends
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.models import shapes as model_shapes
from tinker_cookbook.models.adapter_sizes import STATED, LoraCount, count_lora
from tinker_cookbook.tokenizer_utils import base_model_of

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

LOW_SHARE = 0.1
logger = logging.getLogger(__name__)

BASE_LEARNING_RATE = 5e-5
LORA_OVER_FULL = 10.0
REFERENCE_HIDDEN_SIZE = 2000
HIDDEN_SIZE_EXPONENTS = {"llama": 0.781, "qwen": 0.0775}
"""Fitted per family; a family without an entry has no published rule."""

_FAMILIES = {
    "llama": "llama",
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next"), "qwen"),
    **dict.fromkeys(("qwen3_vl_text", "qwen3_vl_moe_text", "qwen3_5_text", "qwen3_5_moe_text"), "qwen"),
}
"""`model_type` of a text config -> family. The fit was made before Qwen3.5; the service applies it to all of Qwen."""

_STATED_MLP = {"nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": 254_529_536}
"""Published counts at rank 1 that differ from those of the shapes; no stack of equal expert layers gives them."""


def get_lr(model_name: str, is_lora: bool = True) -> float:
    """A starting learning rate: 5e-5 * (10 with LoRA) * (2000 / hidden size) ** exponent of the family.

    Raises:
        ConfigurationError: the model is unknown.
        NotImplementedError: there is no published rule for its family.
    """
    name = base_model_of(model_name)
    model_type = f"of {name}" if name in STATED else model_config(model_name).model_type
    family = _FAMILIES.get(model_type)
    if family is None:
        raise NotImplementedError(
            f"model_name={model_name!r}: no learning rate rule is known for model_type {model_type!r}, only for "
            f"{', '.join(_FAMILIES)}; sweep over learning_rate (python -m recipes.sweep) and set it yourself"
        )
    ratio = REFERENCE_HIDDEN_SIZE / get_hidden_size(model_name)
    multiplier = get_lora_lr_over_full_finetune_lr(model_name) if is_lora else 1.0
    return BASE_LEARNING_RATE * multiplier * ratio ** HIDDEN_SIZE_EXPONENTS[family]


def get_hidden_size(model_name: str) -> int:
    """The width of the (text) model. Raises ConfigurationError for an unknown model."""
    stated = STATED.get(base_model_of(model_name))
    return stated.hidden_size if stated else model_config(model_name).hidden_size


def is_known(model_name: str) -> bool:
    """Whether the model's shapes are known without a download: a folder, or a name of the table."""
    name = base_model_of(model_name)
    return Path(name).expanduser().is_dir() or model_shapes.shapes_of(name) is not None


def known_lr(model_name: str) -> float | None:
    """`get_lr`, or None if the model or its rule is unknown. Downloads nothing."""
    if not is_known(model_name):
        return None
    try:
        return get_lr(model_name)
    except (ConfigurationError, NotImplementedError):
        return None


def warn_if_low(learning_rate: float, model_name: str) -> None:
    """Warn about a learning rate below a tenth of `get_lr`: a rate for full fine-tuning, at which LoRA hardly learns."""
    usual = known_lr(model_name)
    if usual is not None and learning_rate < LOW_SHARE * usual:
        logger.warning(
            "learning_rate=%g is below a tenth of %.2g, the rate of supervised learning with LoRA on this model (get_lr): the "
            "weights will hardly move",
            learning_rate,
            usual,
        )


def get_lora_lr_over_full_finetune_lr(model_name: str, lora_alpha: int = 32) -> float:
    """Factor from the best learning rate of full fine-tuning to that of LoRA: 10 for every model measured.

    Measured with the service's `lora_alpha` of 32; other values are unknown, and 10 is returned for them too.
    """
    return LORA_OVER_FULL


def get_full_finetune_lr_multiplier(model_name: str) -> float:
    """1 / sqrt(parameters): how a full fine-tuning learning rate scales with model size."""
    return 1.0 / math.sqrt(get_full_finetune_param_count(model_name))


def get_lora_lr_multiplier(model_name: str) -> float:
    """The factor of a LoRA learning rate for a model: to change the model, use lr * new / old.

    get_full_finetune_lr_multiplier * get_lora_lr_over_full_finetune_lr.
    """
    return get_full_finetune_lr_multiplier(model_name) * get_lora_lr_over_full_finetune_lr(model_name)


def get_full_finetune_param_count(model_name: str) -> int:
    """Parameters of the (text) model; tied embeddings count once."""
    return sum(parameter.numel() for parameter in _skeleton(model_name).parameters())


def get_state_bytes(model_name: str) -> int:
    """Bytes of recurrent state that the local engine keeps per sequence, whatever its length (delta rule, Mamba, short
    convolution), with weights in bfloat16; 0 for a model with attention layers only.

    Raises:
        ConfigurationError: the model is unknown.
        NotImplementedError: its layers need more than hidden states.
    """
    config, skeleton = model_config(model_name), _skeleton(model_name)
    try:
        return backends.state_bytes(skeleton, config)
    except TypeError as error:
        raise NotImplementedError(f"model_name={model_name!r}: the size of its state is unknown ({error})") from error


def get_lora_param_count(
    model_name: str,
    lora_rank: int = 32,
    train_mlp: bool = True,
    train_attn: bool = True,
    train_unembed: bool = True,
) -> int:
    """Parameters of an adapter: rank * (inputs + outputs), summed over the adapted linear layers.

    For models with experts, and for those with layers other than attention, adapters and counts follow the hosted
    service (adapter_sizes); the local engine also trains the attention projections that this leaves out in the latter models.

    Raises:
        ConfigurationError: the model is unknown, the rank is below 1, or nothing would train.
        NotImplementedError: the model has weights that are not counted (another kind of experts or projections).
    """
    if lora_rank < 1:
        raise ConfigurationError(f"lora_rank={lora_rank}: must be at least 1")
    if not (train_mlp or train_attn or train_unembed):
        raise ConfigurationError("train_mlp, train_attn and train_unembed are all False: nothing would train; set one")
    stated = STATED.get(base_model_of(model_name))
    counted = stated.lora if stated else count_lora(model_config(model_name))
    counted = counted or _count_linears(model_name, train_mlp)
    mlp = _STATED_MLP.get(base_model_of(model_name), counted.mlp)
    return lora_rank * (mlp * train_mlp + counted.attn * train_attn + counted.unembed * train_unembed)


def _count_linears(model_name: str, train_mlp: bool) -> LoraCount:
    """Count the linear layers of a model without experts: in attention, the output head, and elsewhere."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    skeleton: Any = _skeleton(model_name)
    modules: dict[str, nn.Module] = dict(skeleton.named_modules())
    head: nn.Module = skeleton.get_output_embeddings()
    more: list[str] = [path for path, parameter in skeleton.named_parameters() if parameter.dim() > 2]
    if more and train_mlp:
        raise NotImplementedError(
            f"model_name={model_name!r}: adapters on {more[0]} (and {len(more) - 1} more) are not counted, only those on linears"
        )
    attention = tuple(f"{path}." for path, module in modules.items() if "attention" in type(module).__name__.lower())
    widths = {"mlp": 0, "attn": 0, "unembed": 0}
    for path, module in modules.items():
        if isinstance(module, nn.Linear | Conv1D) and min(module.weight.shape) > 1:  # not a gate with a single output
            part = "unembed" if module is head else "attn" if path.startswith(attention) else "mlp"
            widths[part] += sum(module.weight.shape)
    return LoraCount(**widths)


@cache
def _skeleton(model_name: str) -> "nn.Module":
    """The module tree without allocated weights, as if in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return cast(Any, AutoModelForCausalLM).from_config(model_config(model_name), dtype=torch.bfloat16)


def model_config(model_name: str) -> "PreTrainedConfig":
    """The config of a model; for a vision model that of its text model. Downloads nothing if its shapes are known.

    Raises ConfigurationError for an unknown model.
    """
    from transformers import AutoConfig

    auto = cast(Any, AutoConfig)
    name = base_model_of(model_name)
    folder = Path(name).expanduser()
    if not folder.is_dir() and (shapes := model_shapes.shapes_of(name)) is not None:
        return auto.for_model(**shapes)
    if not folder.is_dir():
        backends.try_hub_once()
    try:
        config = auto.from_pretrained(str(folder) if folder.is_dir() else name)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"model_name={model_name!r}: its shapes are unknown; give a model folder, a hub id that can be reached, or "
            f"one of {', '.join(model_shapes.known_names())}"
        ) from error
    return config.get_text_config()
