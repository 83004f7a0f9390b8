"""The spec of an adapter. Imports no torch: checkpoints and the registry need no tensors to name it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from tinker_local_backend.errors import RequestError

Part: TypeAlias = Literal["attn", "mlp", "unembed"]
"""Where a linear stands: within attention, anywhere else in the decoder, or at the head."""

LORA_ALPHA = 32.0
"""The hosted service's constant: updates are scaled by alpha / rank, so the best learning rate does not depend on the rank."""


@dataclass(frozen=True)
class LoraSpec:
    """Rank and targets of an adapter. `alpha` is 32 unless a loaded checkpoint has another value."""

    rank: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    alpha: float = LORA_ALPHA

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise RequestError(f"rank must be an integer >= 1, got {self.rank!r}")
        if not self.parts:
            raise RequestError("train_attn, train_mlp and train_unembed are all False: nothing would train; set one")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of the model that get an adapter."""
        return (
            *(("attn",) if self.train_attn else ()),
            *(("mlp",) if self.train_mlp else ()),
            *(("unembed",) if self.train_unembed else ()),
        )
