"""The pass that this thread runs: what the functions that we plug into transformers' modules need and are not handed.

Not every model passes its keyword arguments on to its attention, and none to its layers with a state.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from tinker_local_backend.engine.model.paged_attention import LayerAttention

BothWays = Literal["no", "windowed", "everywhere"]
"""The layers in which the tokens of a picture see each other in both directions: none, those with a sliding window, all."""


class AttentionPlan(Protocol):
    """The sequences of a pass, and their attention.

    query (1, H, T, D), key (1, KV, T, D), value (1, KV, T, V) -> (1, T, H, V)
    """

    def attend(
        self, layer: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor: ...


class SequenceMixing(Protocol):
    """How the sequences of a pass go through a module that keeps a state of each (mixers.py)."""

    def mix(self, forward: Callable[..., Any], cache_name: str, arguments: Mapping[str, Any]) -> Any:
        """The result of `forward(**arguments)`, whose tensors have one row of T tokens: (1, T, ...)."""
        ...


class Routes(Protocol):
    """What wants to know which experts the tokens of a pass go to (routes.py)."""

    def note(self, place: int, chosen_Tk: torch.Tensor) -> None:
        """In one of the layers with experts, by its number: int64 (T, k)."""
        ...


@dataclass(frozen=True, eq=False)
class Pass:
    """One forward pass."""

    attention: AttentionPlan
    mixing: SequenceMixing | None = None
    """None: no layer has a state"""
    routes: Routes | None = None
    """what records or replays the choice of experts"""


class _Running(threading.local):
    current: Pass | None = None


_RUNNING = _Running()


def current_pass() -> Pass | None:
    """The pass that this thread runs."""
    return _RUNNING.current


@contextmanager
def running(current: Pass | None) -> Iterator[None]:
    """Within: modules compute this pass. In the backward pass, recomputed layers enter it again, on whatever thread."""
    previous, _RUNNING.current = _RUNNING.current, current
    try:
        yield
    finally:
        _RUNNING.current = previous
