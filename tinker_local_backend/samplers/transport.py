"""What is said to a vLLM, wherever it runs, and what comes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tinker_local_backend.samplers.adapters import AdapterFiles


@dataclass(frozen=True)
class Order:
    """One completion. `number` is its name; the seed is that of this sample, and it ends on one of `stop` or at max_tokens."""

    number: int
    prompt: tuple[int, ...]
    seed: int
    max_tokens: int
    adapter: AdapterFiles | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[int, ...] = ()
    topk: int = 0
    """likeliest tokens to report with each sampled one"""
    salt: str = ""
    """only completions with the same one share what is computed of their prompts"""


@dataclass(frozen=True)
class Ready:
    """It takes orders from now on (those that came earlier too)."""

    version: str
    max_model_len: int


@dataclass(frozen=True)
class Part:
    """The next tokens of a completion. `ended` says why it ended, None while it goes on."""

    number: int
    tokens: Sequence[int]
    logprobs: Sequence[float]
    topk: Sequence[Sequence[tuple[int, float]]] | None
    """per token (id, logprob), likeliest first; None when not asked for"""
    cached: int
    """tokens of the prompt that were in the prefix cache"""
    ended: str | None


@dataclass(frozen=True)
class Tokens:
    """What came since the last event."""

    parts: Sequence[Part]


@dataclass(frozen=True)
class Failed:
    """One order cannot be carried out."""

    number: int
    error: str


@dataclass(frozen=True)
class Died:
    """Nothing comes any more: all orders are lost."""

    error: str


Event = Ready | Tokens | Failed | Died
OnEvent = Callable[[Event], None]
"""Called on a thread of the transport."""


class Transport(Protocol):
    """A connection to one vLLM. No method waits for it; after `Died` they do nothing."""

    def start(self, orders: Sequence[Order]) -> None: ...

    def cancel(self, numbers: Sequence[int]) -> None: ...

    def unload(self, adapter: AdapterFiles) -> None:
        """Forget an adapter that no order uses."""
        ...

    def close(self) -> None:
        """End it. No event comes afterwards."""
        ...


Connect = Callable[[int, OnEvent], Transport]
"""(largest rank of an adapter, ...) -> a connection; `Ready` or `Died` follows."""
