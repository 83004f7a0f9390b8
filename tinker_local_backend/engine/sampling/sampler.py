"""What the engine asks of whatever samples for it: its own generator, or one of samplers/ that uses another program."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.sampling.requests import SamplerLimits
from tinker_local_backend.engine.sampling.tickets import Ticket
from tinker_local_backend.engine.sampling.waits import SamplerStats


class Sampler(Protocol):
    """Runs the requests on one base model. All methods are called on the engine's worker; `stats` on any thread."""

    @property
    def limits(self) -> SamplerLimits: ...

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do."""
        ...

    @property
    def stats(self) -> SamplerStats: ...

    def add(self, ticket: Ticket) -> None: ...

    @property
    def tenants(self) -> Collection[str]:
        """For whom `step` has something to compute on the engine's worker."""
        ...

    def step(self) -> Mapping[str, int]:
        """One token for whatever runs. Returns how many tokens the engine's worker has computed for each tenant."""
        ...

    def forget(self, tenant: str = "") -> None:
        """Free what is kept of ended sequences of a tenant ("": of all), and let nothing that is sampled later depend on it."""
        ...

    def fail_all(self, error: BaseException) -> None:
        """The end: tell everybody who waits."""
        ...


Post = Callable[[Callable[[], None]], object]
"""Has the engine's worker call something soon. May be called on any thread."""

MakeSampler = Callable[[BaseModel, int, Callable[[], int], Post], Sampler]
"""(model, bound on the tokens of a KV cache of the engine's own, source of seeds, post) -> its sampler."""
