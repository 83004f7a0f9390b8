"""Messages to a vLLM process or server, and its events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tinker_local_backend.engine.model.lora_spec import ExpertLayout
from tinker_local_backend.samplers.adapters import AdapterFiles


@dataclass(frozen=True)
class Request:
    """A request for one completion, identified by `number`. It ends on a token of `stop` or at max_tokens."""

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
    """number of most likely tokens to report with each sampled one"""
    salt: str = ""
    """only completions with the same salt share cached prefixes"""


@dataclass(frozen=True)
class Ready:
    """vLLM has started. Requests that were submitted earlier are served too."""

    version: str
    max_model_len: int


@dataclass(frozen=True)
class Delta:
    """The next tokens of a completion. `ended` is the finish reason; None while it continues."""

    number: int
    tokens: Sequence[int]
    logprobs: Sequence[float]
    topk: Sequence[Sequence[tuple[int, float]]] | None
    """per token (id, logprob), most likely first; None when not asked for"""
    cached: int
    """prompt tokens that were in the prefix cache"""
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
        """Block until vLLM has freed its memory. Returns whether it has: not while it samples. The next completion wakes it."""
        ...

    def close(self) -> None:
        """End the connection. No event follows."""


@dataclass(frozen=True)
class Accepts:
    """The adapters that a vLLM is started for."""

    rank: int
    """largest rank"""
    experts: ExpertLayout = "frozen"
    """layout of routed experts, next to frozen ones"""


Connect = Callable[[Accepts, OnEvent], Transport]
"""(adapters to accept, on_event) -> a connection; `Ready` or `Died` follows."""
