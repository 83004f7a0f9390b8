"""Distillation: on-policy, off-policy, from demonstrations, and of prompts."""

from tinker_cookbook.utils.lazy import exports

__getattr__, __dir__ = exports(
    __name__,
    {
        "sdft": "",
        "datasets": "",
        "train_on_policy": "",
        "train_off_policy": "",
    },
)
