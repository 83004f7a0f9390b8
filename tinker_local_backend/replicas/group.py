"""The processes of torchrun as one program: rank 0 broadcasts a command, every rank runs it, and rank 0 gathers the results.

Objects of which every rank has a copy (models, runs, snapshots, samplers) are sent as keys. All ranks run the same command, so it
may contain collectives. The other ranks have no clients and no threads, and wait for the next command without a limit: a run may
pause for hours. Within a command TINKER_LOCAL_REPLICA_TIMEOUT applies, and the death of a process ends the command at once.
"""

from __future__ import annotations

import atexit
import io
import itertools
import pickle
import signal
import threading
import time
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from datetime import timedelta
from functools import cache, partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from tinker_local_backend import environment
from tinker_local_backend.engine import models
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.model.memory import keep_freed_memory
from tinker_local_backend.engine.model.sharding import Ranks
from tinker_local_backend.errors import LocalBackendError, ReplicaError, RequestError
from tinker_local_backend.replicas.launch import check_sampler, rank, sharded, world_size

T = TypeVar("T")

DEFAULT_TIMEOUT_SECONDS = 1800
ENDING_SECONDS = 30
"""How long to wait for the last command when the program ends."""

NOTICE_SECONDS = 5
"""Time within which the death of a process shows on all of its connections."""

_NO_LIMIT = timedelta(days=3650)


class _Pickler(pickle.Pickler):
    """Pickles commands. `made`: objects of which every rank has a copy, by key."""

    def __init__(self, file: io.BytesIO, made: MutableMapping[int, Any]):
        super().__init__(file)
        self._keys = {id(thing): key for key, thing in made.items()}

    def reducer_override(self, obj: Any) -> Any:
        if (key := self._keys.get(id(obj))) is not None:
            return _local_copy, (key,)
        if isinstance(obj, torch.Tensor) and not obj.is_cpu:  # the receiving rank moves it to its device
            return _on_device, (obj.detach().cpu(), obj.requires_grad)
        return NotImplemented


def _local_copy(key: int) -> Any:
    return joined().made[key]


def _on_device(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    return tensor.to(environment.default_device()).requires_grad_(requires_grad)


class Replicas(Ranks):
    """This process's connection to the others. Rank 0 may issue commands from any thread; they run one after the other."""

    def __init__(self) -> None:
        check_sampler()
        divides = sharded()
        super().__init__(environment.default_device(), self._explain)
        self._seconds = environment.read("TINKER_LOCAL_REPLICA_TIMEOUT") or DEFAULT_TIMEOUT_SECONDS
        limit = timedelta(seconds=self._seconds)
        dist.init_process_group("cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo", timeout=limit)
        self._group: Any = dist.new_group(timeout=limit if rank() == 0 else _NO_LIMIT, backend="gloo")  # pyright: ignore[reportUnknownMemberType]
        """for commands and results"""
        all_divide: list[Any] = [None] * world_size()
        dist.all_gather_object(all_divide, divides, self._group)  # pyright: ignore[reportUnknownMemberType]
        if len(set(all_divide)) > 1:
            raise RequestError(
                "TINKER_LOCAL_BASE_WEIGHTS differs between the processes: set it for all of them, or for none"
            )
        self.made: MutableMapping[int, Any] = {} if rank() else WeakValueDictionary()
        """objects of which every rank has a copy, by key; on rank 0 only while they are in use there"""
        self.made[0] = self
        self._next_key = itertools.count(1)
        self._lock = threading.Lock()
        self.steps = 0
        """sampler steps since the last other command"""
        if rank() == 0:
            atexit.register(self.end)

    def run(self, call: Callable[..., T], *arguments: Any) -> list[T]:
        """Call this on every rank. Returns the results by rank; raises the error of a rank that failed."""
        return self._command(partial(call, *arguments), None)

    def make(self, call: Callable[..., T], *arguments: Any) -> T:
        """Create an object on every rank, and keep it while rank 0's is in use. Returns rank 0's."""
        return self._command(partial(call, *arguments), next(self._next_key))[0]

    def has(self, thing: Any) -> bool:
        """Whether every rank has a copy of this object."""
        return any(thing is made for made in self.made.values())

    def _command(self, call: Callable[[], Any], key: int | None) -> list[Any]:
        with self._lock:
            _Pickler(sent := io.BytesIO(), self.made).dump(call)
            with self.together():
                dist.broadcast_object_list([(set(self.made), key, sent.getvalue())], src=0, group=self._group)
            self.steps = 0
            results = self._results(call, key)
        errors = [(other, result) for other, result in enumerate(results) if isinstance(result, Exception)]
        if errors:  # prefer the original error to the ReplicaError of a rank that waited
            failed, error = min(errors, key=lambda error: isinstance(error[1], ReplicaError))
            raise as_local(failed, error) from (error if failed else None)
        return results

    def _results(self, call: Callable[[], Any], key: int | None) -> list[Any]:
        """On every rank: make the call, and gather all results or errors on rank 0. With a key, keep the result."""
        try:
            result = call()
            if key is not None:
                self.made[key] = result
        except Exception as error:
            result, key = portable(error) if rank() else error, None
        results: list[Any] = [None] * world_size()
        with self.together():
            sent = result if rank() and key is None else None
            dist.gather_object(sent, None if rank() else results, group=self._group)
        return [result, *results[1:]]

    def follow(self) -> None:
        """Run the commands of rank 0 until it ends. Raises ReplicaError if rank 0 dies or this rank cannot continue."""
        while True:
            box: list[Any] = [None]
            with self.together():
                dist.broadcast_object_list(box, src=0, group=self._group)
            if box[0] is None:
                return dist.destroy_process_group()
            kept, key, sent = box[0]
            for gone in self.made.keys() - kept:
                del self.made[gone]
            self._results(pickle.loads(sent), key)

    def end(self) -> None:
        """Tell the other ranks to end."""
        if self._lock.acquire(timeout=ENDING_SECONDS):
            with suppress(ReplicaError), self.together():
                dist.broadcast_object_list([None], src=0, group=self._group)
            self.lost = self.lost or ReplicaError("this run has ended")
            self._lock.release()
            dist.destroy_process_group()

    def _explain(self, error: RuntimeError) -> ReplicaError:
        """The ReplicaError for a failed collective."""
        others = [other for other in range(world_size()) if other != rank()]
        if "imed out" in str(error):
            return ReplicaError(
                f"{'a rank' if len(others) > 1 else f'rank {others[0]}'} has not answered for {self._seconds} seconds; if its "
                "work takes longer, raise TINKER_LOCAL_REPLICA_TIMEOUT"
            )
        deadline = time.monotonic() + NOTICE_SECONDS
        while not (gone := list(filter(self._is_gone, others))) and time.monotonic() < deadline:
            time.sleep(0.05)
        if not gone:
            return ReplicaError(f"{world_size()} ranks could not work together: {error}")
        names = f"rank {' and rank '.join(map(str, gone))} {'is' if len(gone) == 1 else 'are'} gone"
        return ReplicaError(f"{names} ({error}): see its output, and start the run again, which resumes it")

    def _is_gone(self, other: int) -> bool:
        try:
            dist.isend(torch.zeros(1), other, group=self._group)  # which no rank ever receives
        except RuntimeError:
            return True
        return False


def portable(error: BaseException) -> BaseException:
    """The error, or its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


def as_local(failed: int, error: BaseException) -> BaseException:
    """The error of a rank, as rank 0 raises it."""
    if failed == 0 or isinstance(error, LocalBackendError):
        return error
    return ReplicaError(f"rank {failed} failed: {type(error).__name__}: {error}")


joined = cache(Replicas)
"""This process's connection to the others, on any rank of torchrun."""


def replicas() -> Replicas | None:
    """The processes of torchrun, for rank 0; None without torchrun. Raises RequestError on another rank, which has no clients."""
    if world_size() == 1:
        sharded()  # refused
        return None
    if rank() > 0:
        raise RequestError(
            f"this is rank {rank()} of {world_size()}: clients are made on rank 0 alone. Call "
            "tinker_local_backend.serve_as_replica() before the first client, or start the program as "
            "torchrun ... -m tinker_local_backend.run script.py"
        )
    return joined()


def load_model(name: str) -> BaseModel:
    """Load a base model, or this process's part of it under torchrun with TINKER_LOCAL_BASE_WEIGHTS=sharded."""
    group = replicas()
    if group is None:
        return models.load_model(name)
    return group.make(models.load_model, name, None, None, group if sharded() else None)


def serve_as_replica() -> None:
    """On a rank other than 0 of torchrun's: follow rank 0 until it ends, then exit the process. Elsewhere: return at once.

    Recipes and `python -m tinker_local_backend.run` call it; other programs call it before they make a client.
    """
    if rank() == 0:
        return
    environment.check_environment()
    # Rank 0 gets these too: it saves what is done, and its end is the end here.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if environment.default_device().type == "cpu":
        keep_freed_memory()
    try:
        joined().follow()
    except ReplicaError as error:
        raise SystemExit(f"rank {rank()}: {error}") from None
    raise SystemExit(0)
