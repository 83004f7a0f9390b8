"""The messages to a vLLM, wherever it runs, and its answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tinker_local_backend.engine.model.lora_spec import ExpertLayout
from tinker_local_backend.samplers.adapters import AdapterFiles


@dataclass(frozen=True)
class Request:
    """A request for one completion, named by `number`. `seed` is this sample's; it ends on a token of `stop` or at max_tokens."""

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
    """how many most likely tokens to report with each sampled one"""
    salt: str = ""
    """only completions with the same salt share cached prefixes"""


@dataclass(frozen=True)
class Ready:
    """vLLM has started. Requests that were submitted earlier are served too."""

    version: str
    max_model_len: int


@dataclass(frozen=True)
class Delta:
    """The next tokens of a completion. `ended` says why it ended; None: it goes on."""

    number: int
    tokens: Sequence[int]
    logprobs: Sequence[float]
    topk: Sequence[Sequence[tuple[int, float]]] | None
    """per token (id, logprob), most likely first; None when not asked for"""
    cached: int
    """tokens of the prompt that were in the prefix cache"""
    ended: str | None


@dataclass(frozen=True)
class Failed:
    """One completion cannot be sampled."""

    number: int
    error: str


@dataclass(frozen=True)
class Died:
    """The connection has ended, and all requests are lost."""

    error: str


Event = Ready | Failed | Died | list[Delta]
OnEvent = Callable[[Event], None]
"""Called on a thread of the transport."""


class Transport(Protocol):
    """A connection to one vLLM. No method but `sleep` waits for vLLM; after `Died` they do nothing."""

    def start(self, requests: Sequence[Request]) -> None: ...

    def cancel(self, numbers: Sequence[int]) -> None: ...

    def unload(self, adapter: AdapterFiles) -> None:
        """Unload an adapter that no completion uses."""

    def sleep(self) -> bool:
        """Return when vLLM has given its memory back, and whether it has: not while it samples. The next completion wakes it."""
        ...

    def close(self) -> None:
        """End the connection. No event follows."""


@dataclass(frozen=True)
class Accepts:
    """The adapters that a vLLM is started for."""

    rank: int
    """the largest"""
    experts: ExpertLayout = "frozen"
    """the one layout of routed experts beside frozen ones"""


Connect = Callable[[Accepts, OnEvent], Transport]
"""(the adapters to come, on_event) -> a connection; `Ready` or `Died` follows."""
