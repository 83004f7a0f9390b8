"""Re-exports models/hyperparameters.py, for scripts that import this path."""

from tinker_cookbook.models.hyperparameters import (
    get_full_finetune_lr_multiplier,
    get_full_finetune_param_count,
    get_hidden_size,
    get_lora_lr_multiplier,
    get_lora_lr_over_full_finetune_lr,
    get_lora_param_count,
    get_lr,
    is_known,
    known_lr,
    model_config,
    warn_if_low,
)

__all__ = [
    "get_full_finetune_lr_multiplier",
    "get_full_finetune_param_count",
    "get_hidden_size",
    "get_lora_lr_multiplier",
    "get_lora_lr_over_full_finetune_lr",
    "get_lora_param_count",
    "get_lr",
    "is_known",
    "known_lr",
    "model_config",
    "warn_if_low",
]
