"""The spec of an adapter. Imports no torch, which checkpoints and the registry do not need for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from tinker_local_backend import environment
from tinker_local_backend.errors import RequestError

Part: TypeAlias = Literal["attn", "mlp", "unembed"]
"""Part of a model that has a linear: attention, anything else in the decoder, or the head."""

ExpertLayout: TypeAlias = Literal["shared_outer", "per_expert", "frozen"]
"""How an adapter covers routed experts. `shared_outer`, as on the hosted service: all experts of a layer share the factors on the
side of the hidden size (A of gate and up, B of down), and each has a separate inner factor. `per_expert`, as PEFT's
`target_parameters`: each expert has both factors, and gate and up are one matrix if the model fuses them. `frozen`: not at
all."""

LORA_ALPHA = 32.0
"""The hosted service's alpha. Updates are scaled by alpha / rank, so the best learning rate does not depend on the rank."""


@dataclass(frozen=True)
class LoraSpec:
    """Rank and targets of an adapter. `alpha` is 32 unless a loaded checkpoint has another value."""

    rank: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    alpha: float = LORA_ALPHA
    experts: ExpertLayout = "frozen"
    """layout of routed experts, if there are any and `train_mlp` is set"""

    @classmethod
    def asked(
        cls, rank: int, train_attn: bool, train_mlp: bool, train_unembed: bool, experts: ExpertLayout | None = None
    ) -> LoraSpec:
        """The spec of a new adapter. `experts=None`: as TINKER_LOCAL_EXPERT_LORA says. Raises RequestError."""
        layout = experts or environment.read("TINKER_LOCAL_EXPERT_LORA") or "shared_outer"
        return cls(rank, train_attn, train_mlp, train_unembed, experts=layout if train_mlp else "frozen")

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise RequestError(f"rank must be an integer >= 1, got {self.rank!r}")
        if self.experts not in get_args(ExpertLayout):
            raise RequestError(f"expert_lora must be {' or '.join(get_args(ExpertLayout))}, got {self.experts!r}")
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
