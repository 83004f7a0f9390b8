"""What environments may ask besides the policy's replies: the clients of the run that plays them.

A training loop says once which clients it has (`clients_of_run`). Each group is then given them together with the snapshot that
plays it (`EnvGroupBuilder.with_clients`), so that rewards ask the weights that gave the reply, and never those of the start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from tinker_cookbook.clients import SamplingClient, ServiceClient, TrainingClient
from tinker_cookbook.completers import TinkerTokenCompleter, TokenCompleter
from tinker_cookbook.exceptions import ConfigurationError

T = TypeVar("T")


class Shared:
    """What several environments use together, made once."""

    def __init__(self) -> None:
        self._made: dict[Hashable, asyncio.Future[Any]] = {}

    async def once(self, key: Hashable, make: Callable[[], Awaitable[T]]) -> T:
        """What `make()` gave the first that asked for this key. A failure is told to all who wait, and then forgotten.

        Raises ConfigurationError: asked from another event loop than the first time, which a rollout executor does.
        """
        future = self._made.get(key)
        if future is None:
            future = self._made[key] = asyncio.ensure_future(make())
        elif future.get_loop() is not asyncio.get_running_loop():
            raise ConfigurationError(
                f"{key!r} was made in another event loop, so it cannot be shared here; leave the rollout executor out"
            )
        try:
            return await asyncio.shield(future)  # others wait for it too
        except BaseException:
            if future.done() and (future.cancelled() or future.exception() is not None):
                self._made.pop(key, None)
            raise


@dataclass(frozen=True)
class RunClients:
    """The clients of a run, as one group sees them.

    Attributes:
        policy: plays the group. What else it is asked draws its own random numbers from a fork.
        sampling_client: the snapshot behind the policy; None behind a script or a person.
        service_client, training_client, base_model, log_path: of the training run; None outside of one.
        starting_policy: the policy that the run started from, if its dataset asks for it (`needs_starting_policy`).
        shared: lives as long as the run; for what is created once (a second training client, opponents).
    """

    policy: TokenCompleter
    sampling_client: SamplingClient | None = None
    service_client: ServiceClient | None = None
    training_client: TrainingClient | None = None
    base_model: str | None = None
    log_path: Path | None = None
    starting_policy: SamplingClient | None = None
    shared: Shared = field(default_factory=Shared)

    def for_another_process(self) -> RunClients:
        """Those that can travel: snapshots do, the clients of training and of the service do not."""
        return replace(self, service_client=None, training_client=None, shared=Shared())


@dataclass(frozen=True)
class _Run:
    service_client: ServiceClient
    training_client: TrainingClient
    base_model: str
    log_path: Path
    starting_policy: SamplingClient | None
    shared: Shared = field(default_factory=Shared)


_run: ContextVar[_Run | None] = ContextVar("run_clients", default=None)


@contextmanager
def clients_of_run(
    service_client: ServiceClient,
    training_client: TrainingClient,
    base_model: str,
    log_path: Path,
    starting_policy: SamplingClient | None = None,
) -> Iterator[None]:
    """Within the body, and in the tasks that it starts, groups are given these clients."""
    token = _run.set(_Run(service_client, training_client, base_model, log_path, starting_policy))
    try:
        yield
    finally:
        _run.reset(token)


def clients_for(policy: TokenCompleter) -> RunClients:
    """What a group that this policy plays may ask."""
    sampling_client = policy.sampling_client if isinstance(policy, TinkerTokenCompleter) else None
    run = _run.get()
    return RunClients(policy, sampling_client, **(vars(run) if run is not None else {}))
