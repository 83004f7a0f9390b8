"""How the passes of a model are computed where there is more than one way: the reference, or what only a GPU runs (cuda/).

The reference is plain torch on any device and decides what is right; any other execution is compared with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from tinker_local_backend.engine.attention import PackedPlan
    from tinker_local_backend.engine.base_model import BaseModel
    from tinker_local_backend.engine.decode_attention import LayerAttention
    from tinker_local_backend.engine.generation import Generator


class AttentionPlan(Protocol):
    """The sequences of a pass, and their attention: query (1, H, T, D), key and value (1, KV, T, D) -> (1, T, H, D)."""

    def attend(
        self, layer: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor: ...


class Execution(Protocol):
    """One way. It belongs to one model, and may have changed modules of it."""

    def packed(self, plan: PackedPlan) -> AttentionPlan:
        """What attends in a packed pass (training, prefill)."""
        ...

    def generator(self, model: BaseModel, kv_budget_tokens: int, random_seed: Callable[[], int]) -> Generator:
        """What samples: the decode step, and the adapters in it."""
        ...

    def parts(self) -> Mapping[str, str]:
        """What runs in place of the reference, by part, and what was turned off, with the reason."""
        ...


def describe(model: BaseModel) -> dict[str, str]:
    """What this model runs on, for whoever asks: `device`, `dtype`, `path` ("reference": plain torch computes everything;
    "cuda"), and on the latter each part: "on", or "off: " and why.
    """
    parts = model.execution.parts()
    return {
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "path": "cuda" if parts else "reference",
        **parts,
    }


class Reference:
    """Plain torch."""

    def packed(self, plan: PackedPlan) -> AttentionPlan:
        return plan

    def generator(self, model: BaseModel, kv_budget_tokens: int, random_seed: Callable[[], int]) -> Generator:
        from tinker_local_backend.engine.generation import Generator

        return Generator(model, kv_budget_tokens, random_seed)

    def parts(self) -> Mapping[str, str]:
        return {}
