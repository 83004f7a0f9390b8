"""How the passes of a model are computed where there is more than one way: the reference, or what only a GPU runs (cuda/).

The reference is plain torch on any device and decides what is right; any other execution is compared with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from tinker_local_backend.engine.model.attention import AttentionPlan, PackedPlan


class Execution(Protocol):
    """One way. It belongs to one model, and may have changed modules of it."""

    def packed(self, plan: PackedPlan) -> AttentionPlan:
        """What attends in a packed pass (training, prefill)."""
        ...

    def parts(self) -> Mapping[str, str]:
        """What runs in place of the reference, by part, and what was turned off, with the reason."""
        ...


class Reference:
    """Plain torch."""

    def packed(self, plan: PackedPlan) -> AttentionPlan:
        return plan

    def parts(self) -> Mapping[str, str]:
        return {}
