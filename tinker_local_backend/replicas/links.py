"""Messages between rank 0 and each follower, over gloo groups of torch.distributed.

Every pair has two groups of its own, one for each direction, so that no message waits for another direction or another rank.
Waiting for a message has no time limit (a run may think for hours), and a process that dies ends it at once.
"""

from __future__ import annotations

import logging
import pickle
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tinker_local_backend import environment
from tinker_local_backend.errors import RequestError
from tinker_local_backend.replicas.launch import sharded, world_size

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT_SECONDS = 1800
ENDED = "ended"
"""The last answer of a follower."""

_NO_LIMIT = timedelta(days=3650)


def timeout_seconds() -> int:
    """How long a rank may take for its part of a training operation, or to start."""
    return environment.read("TINKER_LOCAL_REPLICA_TIMEOUT") or DEFAULT_TIMEOUT_SECONDS


@dataclass(frozen=True)
class Directions:
    """The groups of rank 0 and one follower."""

    down: Any
    up: Any


def join() -> dict[int, Directions]:
    """Join the other ranks. Returns the groups of rank 0 with each follower, by rank; called once by every process.

    Raises RequestError when some would divide the base weights and others not.
    """
    divides = int(sharded())
    backend = "cpu:gloo,cuda:nccl" if environment.default_device().type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds()))
    extremes = torch.tensor([divides, -divides])
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    if extremes.sum() != 0:
        raise RequestError(
            "TINKER_LOCAL_BASE_WEIGHTS differs between the processes: set it for all of them, or for none"
        )

    def pair(follower: int) -> Any:
        return dist.new_group([0, follower], timeout=_NO_LIMIT, backend="gloo")

    return {follower: Directions(pair(follower), pair(follower)) for follower in range(1, world_size())}


def receive(source: int, group: Any) -> Any:
    """Block until a message comes. Raises RuntimeError when the other process has died."""
    box: list[Any] = [None]
    dist.recv_object_list(box, src=source, group=group)
    return box[0]


class Outbox:
    """Sends messages in order, on a thread of its own. `on_failure` is called there, once, when the other process has died."""

    def __init__(self, target: int, group: Any, on_failure: Callable[[Exception], None]):
        self._target, self._group, self._on_failure = target, group, on_failure
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"tinker-to-rank-{target}", daemon=True)
        self._thread.start()

    def put(self, message: Any) -> None:
        self._messages.put(message)

    def close(self) -> None:
        """Send what is waiting, and no more."""
        self._messages.put(None)
        self._thread.join(timeout_seconds())

    def _run(self) -> None:
        while (message := self._messages.get()) is not None:
            try:
                dist.send_object_list([message], dst=self._target, group=self._group)
            except Exception as error:
                self._on_failure(error)
                return


def portable(error: BaseException) -> BaseException:
    """The error, or what can be said of it where it cannot be sent."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
