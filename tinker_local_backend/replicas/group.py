"""The processes of torchrun as one program: rank 0 broadcasts a call, every rank runs it, and rank 0 gets what each returned.

Objects that every rank has (a model, a run, a snapshot, a sampler) are not sent with a call: each rank uses its copy. All ranks
are in the same call, so it may have collectives. The other ranks have no clients and no threads, and wait for the next call
without a limit: a run may pause for hours. Within a call TINKER_LOCAL_REPLICA_TIMEOUT holds, and a process that dies ends it at
once.
"""

from __future__ import annotations

import atexit
import io
import itertools
import pickle
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache, partial
from typing import Any, TypeVar

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
"""How long the last call may still take when the program ends."""

NOTICE_SECONDS = 5
"""Within which the death of a process shows on all of its connections."""

_NO_LIMIT = timedelta(days=3650)

_made: dict[int, Any] = {}
"""On ranks other than 0, by key: the objects that `Replicas.make` has made on every rank."""


class _Pickler(pickle.Pickler):
    """Pickles calls. `keys` maps the `id` of an object on rank 0 that every rank has to its key."""

    def __init__(self, file: io.BytesIO, keys: dict[int, int]):
        super().__init__(file)
        self._keys = keys

    def reducer_override(self, obj: Any) -> Any:
        if (key := self._keys.get(id(obj))) is not None:
            return _get, (key,)
        if isinstance(obj, torch.Tensor) and not obj.is_cpu:  # for the device of the rank that gets it
            return _on_device, (obj.detach().cpu(), obj.requires_grad)
        return NotImplemented


def _get(key: int) -> Any:
    return _made[key]


def _on_device(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    return tensor.to(environment.default_device()).requires_grad_(requires_grad)


def _keep(key: int, make: Callable[[], Any]) -> None:
    _made[key] = make()


def _drop(key: int) -> None:
    _made.pop(key, None)


class Replicas:
    """This process's connection to the others. Rank 0 may make calls on any thread; they run one after the other."""

    def __init__(self) -> None:
        check_sampler()
        divides = int(sharded())
        self._seconds = environment.read("TINKER_LOCAL_REPLICA_TIMEOUT") or DEFAULT_TIMEOUT_SECONDS
        backend = "cpu:gloo,cuda:nccl" if environment.default_device().type == "cuda" else "gloo"
        limit = timedelta(seconds=self._seconds)
        dist.init_process_group(backend, timeout=limit)
        extremes = torch.tensor([divides, -divides])
        dist.all_reduce(extremes, dist.ReduceOp.MAX)
        if extremes.sum() != 0:
            raise RequestError(
                "TINKER_LOCAL_BASE_WEIGHTS differs between the processes: set it for all of them, or for none"
            )
        self._calls: Any = dist.new_group(timeout=limit if rank() == 0 else _NO_LIMIT, backend="gloo")
        self.ranks = _made[0] = Ranks(environment.default_device(), self._explain)
        self._keys = {id(self.ranks): 0}
        self._next_key = itertools.count(1)
        self._deferred: deque[bytes] = deque()
        """calls that the other ranks make before the next one"""
        self._lock = threading.Lock()
        self.steps = 0
        """of samplers since any other call"""

    def run(self, call: Callable[..., T], *arguments: Any) -> list[T]:
        """Have every rank call this. Returns the results by rank; raises the error of one that failed."""
        return self._run(partial(call, *arguments), partial(call, *arguments))

    def tell(self, call: Callable[..., None], *arguments: Any) -> None:
        """Have every rank call this, which is quick: rank 0 now, the others before the next call."""
        call(*arguments)
        self._deferred.append(self._pickled(partial(call, *arguments)))

    def make(self, call: Callable[..., T], *arguments: Any) -> T:
        """Have every rank make an object, and keep it as long as rank 0's is in use. Returns rank 0's."""
        key, make = next(self._next_key), partial(call, *arguments)
        try:
            made = self._run(make, partial(_keep, key, make))[0]
        except Exception:
            self.tell(_drop, key)
            raise
        self._keys[id(made)] = key
        weakref.finalize(made, self._forget, id(made), key).atexit = False
        return made

    def has(self, made: Any) -> bool:
        """Whether every rank has this object."""
        return id(made) in self._keys

    def _forget(self, address: int, key: int) -> None:
        del self._keys[address]
        self.tell(_drop, key)

    def _pickled(self, call: Callable[[], Any]) -> bytes:
        file = io.BytesIO()
        _Pickler(file, self._keys).dump(call)
        return file.getvalue()

    def _run(self, here: Callable[[], T], there: Callable[[], Any]) -> list[Any]:
        call = self._pickled(there)
        with self._lock:
            with self.ranks.together():
                deferred = [self._deferred.popleft() for _ in range(len(self._deferred))]
                dist.broadcast_object_list([[*deferred, call]], src=0, group=self._calls)
            self.steps = 0
            try:
                results: list[Any] = [here()]
            except Exception as error:
                results = [error]
            with self.ranks.together():
                for other in range(1, world_size()):
                    box: list[Any] = [None]
                    dist.recv_object_list(box, src=other)
                    results += box
        errors = [(other, result) for other, result in enumerate(results) if isinstance(result, Exception)]
        if errors:  # the error of a rank that failed says more than that of one that waited for it
            failed, error = min(errors, key=lambda error: isinstance(error[1], ReplicaError))
            raise as_local(failed, error) from (error if failed else None)
        return results

    def serve(self) -> None:
        """Follow rank 0 until it ends. Raises SystemExit when it dies, and when this rank cannot go on."""
        while True:
            box: list[Any] = [None]
            with _listening():
                dist.broadcast_object_list(box, src=0, group=self._calls)
            *deferred, call = map(pickle.loads, box[0])
            for earlier in deferred:
                earlier()
            if call is None:
                return dist.destroy_process_group()
            try:
                result = call()
            except Exception as error:
                result = portable(error)
            if self.ranks.lost is not None:
                raise SystemExit(str(self.ranks.lost))
            with _listening():
                dist.send_object_list([result], dst=0)

    def end(self) -> None:
        """Let the other ranks end."""
        if self._lock.acquire(timeout=ENDING_SECONDS):
            with suppress(ReplicaError), self.ranks.together():
                dist.broadcast_object_list([[pickle.dumps(None)]], src=0, group=self._calls)
            self.ranks.lost = self.ranks.lost or ReplicaError("this run has ended")
            self._lock.release()
            dist.destroy_process_group()

    def _explain(self, error: RuntimeError) -> ReplicaError:
        """Explain an error of a collective operation."""
        if rank() > 0:
            return ReplicaError(f"rank {rank()} could not work together with the others: {error}")
        if "imed out" in str(error):
            return ReplicaError(
                f"{'rank 1' if world_size() == 2 else 'a rank'} has not answered for {self._seconds} seconds; if its work "
                "takes longer, raise TINKER_LOCAL_REPLICA_TIMEOUT"
            )
        deadline = time.monotonic() + NOTICE_SECONDS
        while not (gone := list(filter(self._is_gone, range(1, world_size())))) and time.monotonic() < deadline:
            time.sleep(0.05)
        if not gone:
            return ReplicaError(f"{world_size()} ranks could not work together: {error}")
        names = f"rank {' and rank '.join(map(str, gone))} {'is' if len(gone) == 1 else 'are'} gone"
        return ReplicaError(f"{names} ({error}): see what it printed, and start the run again, which resumes it")

    def _is_gone(self, other: int) -> bool:
        try:
            dist.isend(torch.zeros(1), other, group=self._calls)  # which no rank ever receives
        except RuntimeError:
            return True
        return False


@contextmanager
def _listening() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise SystemExit(f"rank {rank()}: rank 0 is gone ({error})") from None


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


@cache
def _join() -> Replicas:
    joined = Replicas()
    atexit.register(joined.end)
    return joined


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
    return _join()


def load_model(name: str) -> BaseModel:
    """Load a base model, or this process's part of it under torchrun with TINKER_LOCAL_BASE_WEIGHTS=sharded."""
    joined = replicas()
    return models.load_model(name) if joined is None else joined.make(_load, name, joined.ranks)


def _load(name: str, ranks: Ranks) -> BaseModel:
    load = partial(models.load_model, name, ranks=ranks if sharded() else None)
    model = ranks.take_part_in_loading(load) if sharded() else load()
    if model.device.type == "cpu":
        keep_freed_memory()
    return model


def serve_as_replica() -> None:
    """On a rank other than 0 of torchrun's: follow rank 0 until it ends, then exit the process. Elsewhere: return at once.

    Recipes and `python -m tinker_local_backend.run` call it; other programs call it before they make a client.
    """
    if rank() == 0:
        return
    environment.check_environment()
    check_sampler()
    # Rank 0 gets these too: it saves what is done, and its end is the end here.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    Replicas().serve()
    raise SystemExit(0)
