"""Rank 0: divides training operations over the ranks, adds up what they give, and sends sampling to the least busy.

Each rank runs its share of the datums; the gradients are all-reduced, and the optimizer steps are then the same everywhere.
A pass counts only when every rank has finished its share: an error of one is the error of the call, and no rank keeps gradients.
"""

from __future__ import annotations

import atexit
import itertools
import math
import threading
import uuid
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import cache
from typing import Any

import tinker
import torch
import torch.distributed as dist

from tinker_local_backend.engine import models
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.model.lora import Adapter
from tinker_local_backend.engine.model.sharding import Ranks, Turn
from tinker_local_backend.engine.training import trainer
from tinker_local_backend.engine.training.datums import LossConfig, check_datum, loss_function
from tinker_local_backend.engine.training.losses import was_sampled
from tinker_local_backend.engine.training.parts import Parts
from tinker_local_backend.environment import default_device
from tinker_local_backend.errors import LocalBackendError, ReplicaError, RequestError
from tinker_local_backend.replicas import links
from tinker_local_backend.replicas.launch import check_sampler, rank, sharded, world_size
from tinker_local_backend.replicas.messages import (
    Command,
    Progress,
    Share,
    divide,
    on_cpu,
    packed,
    reduce_gradients,
)

SAME_NORM = 1e-5
"""Relative difference of gradient norms between ranks that is still rounding."""


ENDING_SECONDS = 30
"""That a follower may take to end, and that the death of one may take to show."""


class Peer:
    """A follower as rank 0 sees it."""

    def __init__(self, follower: int, groups: links.Directions):
        self.rank = follower
        self.adapters: set[str] = set()
        """that it has"""
        self._waiting: dict[int, Future[Any]] = {}
        self._lock = threading.RLock()  # the garbage collector may call in `forget` here while it is held
        self._death: ReplicaError | None = None
        self._numbers = itertools.count()
        self._up = groups.up
        self._outbox = links.Outbox(follower, groups.down, self._die)
        self._listener = threading.Thread(target=self._listen, name=f"tinker-from-rank-{follower}", daemon=True)
        self._listener.start()

    def ask(self, kind: str, *arguments: Any) -> tuple[int, Future[Any]]:
        """Send a command. Its number, and its answer to come."""
        future: Future[Any] = Future()
        number = next(self._numbers)
        with self._lock:
            if self._death is not None:
                future.set_exception(self._death)
                return number, future
            self._waiting[number] = future
        self._outbox.put(Command(number, kind, arguments))
        return number, future

    def cancel(self, number: int) -> None:
        with self._lock:
            asked = self._waiting.pop(number, None)
        if asked is not None:
            self._outbox.put(Command(number, "cancel", ()))

    def result(self, asked: Future[Any]) -> Any:
        """The answer to a training command. Raises ReplicaError when it does not come in time."""
        seconds = links.timeout_seconds()
        try:
            return asked.result(seconds)
        except TimeoutError:
            raise ReplicaError(
                f"rank {self.rank} has not answered for {seconds} seconds; if its work takes longer, raise "
                "TINKER_LOCAL_REPLICA_TIMEOUT"
            ) from None
        except LocalBackendError:
            raise
        except Exception as error:
            raise ReplicaError(f"rank {self.rank} failed: {type(error).__name__}: {error}") from error

    @property
    def death(self) -> ReplicaError | None:
        """Why it takes no commands any more."""
        return self._death

    def end(self) -> None:
        self.ask("end")
        self._outbox.close()
        self._listener.join(ENDING_SECONDS)

    def _listen(self) -> None:
        while True:
            try:
                number, answer = links.receive(self.rank, self._up)
            except Exception as error:
                self._die(error)
                return
            with self._lock:
                future = self._waiting.pop(number, None)
            if future is None:
                continue
            if isinstance(answer, BaseException):
                future.set_exception(answer)
            else:
                future.set_result(answer)
            if answer == links.ENDED:
                self._die(ReplicaError("this run has ended"))
                return

    def _die(self, error: Exception) -> None:
        with self._lock:
            if self._death is None:
                why = f"rank {self.rank} is gone ({error}): see what it printed, and start the run again, which resumes it"
                self._death = error if isinstance(error, ReplicaError) else ReplicaError(why)
            waiting, self._waiting = list(self._waiting.values()), {}
        for future in waiting:
            future.set_exception(self._death)


class Leader:
    """One for the process. Training operations are called on an engine's worker; the rest on any thread."""

    def __init__(self) -> None:
        check_sampler()
        self.peers = [Peer(follower, groups) for follower, groups in links.join().items()]
        self._adapter_ids: weakref.WeakKeyDictionary[Adapter, str] = weakref.WeakKeyDictionary()
        self._together = threading.Lock()
        """what ranks do together comes in the same order on each, whichever engine begins it"""
        self._asked: list[Future[Any]] = []
        """answers to the command that began the turn of all ranks"""
        self.ranks = Ranks(default_device(), self._lost) if sharded() else None
        """with which this one shares the base weights"""

    def ask_all(self, kind: str, *arguments: Any) -> list[Any]:
        """The answers of all followers."""
        asked = [(peer, peer.ask(kind, *arguments)[1]) for peer in self.peers]
        return [peer.result(future) for peer, future in asked]

    def load_model(self, name: str) -> BaseModel:
        """A base model, on this rank; where the weights are divided, on all."""
        ranks = self.ranks
        if ranks is None:
            return models.load_model(name)
        with self._together:
            self._ask_for_turn("load_part", name)
            try:
                return ranks.take_part_in_loading(lambda: models.load_model(name, ranks=ranks))
            except ReplicaError:
                for peer, future in zip(self.peers, self._asked, strict=True):
                    peer.result(future)  # the error of the rank that failed says more
                raise

    def turn(self, model: BaseModel, act: Callable[[Turn], None], kind: str, *arguments: Any) -> bool:
        """`act` here while the followers carry out the command, as one turn of the model.

        Returns whether any rank has more to do. Raises ReplicaError when one is gone.
        """
        with self._together:
            self._ask_for_turn(kind, *arguments)
            with model.shards.turn() as turn:
                act(turn)
        return turn.again

    def _ask_for_turn(self, kind: str, *arguments: Any) -> None:
        self._asked = [peer.ask(kind, *arguments)[1] for peer in self.peers]
        for peer in self.peers:
            if peer.death is not None:
                raise peer.death

    def _lost(self, error: RuntimeError) -> ReplicaError:
        """What it means that a collective failed: a rank is gone, which shows soon after, or something else."""
        wait(self._asked, ENDING_SECONDS)
        deaths = [peer.death for peer in self.peers if peer.death is not None]
        return deaths[0] if deaths else ReplicaError(f"{1 + len(self.peers)} ranks could not work together: {error}")

    def load(self, model_name: str) -> int:
        """Have all followers load a model. Returns the least bound on the tokens of a sequence."""
        return min(self.ask_all("load", model_name))

    def put_run(self, run_id: str, model: BaseModel, state: trainer.TrainState) -> None:
        """Give all followers the state of a run that was created or loaded."""
        self.ask_all("put_run", run_id, model.name, packed(state))

    def forget_run(self, run_id: str) -> None:
        for peer in self.peers:
            peer.ask("forget_run", run_id)

    def forward_backward(
        self,
        run_id: str,
        model: BaseModel,
        state: trainer.TrainState,
        data: Sequence[tinker.Datum],
        loss_fn: str,
        loss_fn_config: LossConfig,
        backward: bool,
    ) -> Parts[tinker.ForwardBackwardOutput]:
        """As trainer.forward_backward, over all ranks."""
        if not data:
            raise RequestError("data is empty; give at least one datum")
        loss, _, _ = loss_function(loss_fn, loss_fn_config)
        examples = [check_datum(datum, i, loss_fn, loss, model) for i, datum in enumerate(data)]
        indices = divide([len(example.tokens) for example in examples], 1 + len(self.peers))
        own, *others = [Share(part, [data[i] for i in part], loss_fn, loss_fn_config, backward) for part in indices]
        asked = [
            (peer, peer.ask("forward_backward", run_id, share)[1])
            for peer, share in zip(self.peers, others, strict=True)
        ]
        scratch = trainer.TrainState(state.adapter, state.optimizer)
        failure: Exception | None = None
        outputs: list[tinker.ForwardBackwardOutput | None] = [None]
        try:
            outputs = [(yield from self._run_own(run_id, model, own.run(model, scratch)))]
        except Exception as error:  # of all ranks, once each has ended its share
            failure = error
        if self.ranks is not None:
            asked = [(peer, peer.ask("outcome", run_id)[1]) for peer in self.peers]
        for peer, future in asked:
            try:
                outputs.append(peer.result(future))
            except LocalBackendError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        if backward:
            state.accumulate(self._reduce(run_id, scratch.gradients or state.zeros()))
        sampled = [
            sum(int(was_sampled(_tensors(examples[i].inputs)).sum()) for i in part) if loss.is_policy_loss else 0
            for part in indices
        ]
        return merged(indices, outputs, sampled)

    def _run_own(
        self, run_id: str, model: BaseModel, parts: Parts[tinker.ForwardBackwardOutput | None]
    ) -> Parts[tinker.ForwardBackwardOutput | None]:
        """This rank's share; where the weights are divided, in turns until every rank has ended its own."""
        if self.ranks is None:
            return (yield from parts)
        progress = Progress(parts)
        while self.turn(model, progress.step, "turn", run_id):
            yield
        return progress.result()

    def _reduce(self, run_id: str, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        with self._together:
            self._asked = [peer.ask("reduce", run_id)[1] for peer in self.peers]
            try:
                total = reduce_gradients(gradients)
            except RuntimeError as error:
                raise self._lost(error) from error
            for peer, future in zip(self.peers, self._asked, strict=True):
                peer.result(future)
        return total

    def optim_step(
        self, run_id: str, state: trainer.TrainState, params: tinker.AdamParams
    ) -> tinker.types.OptimStepResponse:
        """As trainer.optim_step, the same on every rank. Raises ReplicaError for ranks whose gradients differ."""
        try:
            response = trainer.optim_step(state, params)
        except RequestError:
            if state.gradients is None:
                self.ask_all("clear", run_id)
            raise
        norm = (response.metrics or {})["grad_norm"]
        for peer, metrics in zip(self.peers, self.ask_all("optim_step", run_id, params), strict=True):
            if not math.isclose(metrics["grad_norm"], norm, rel_tol=SAME_NORM):
                raise ReplicaError(
                    f"rank {peer.rank} stepped with a gradient of norm {metrics['grad_norm']}, rank 0 with {norm}: the replicas "
                    "have diverged; start the run again from its last checkpoint"
                )
        return response

    def snapshot(self, run_id: str, adapter: Adapter) -> None:
        """Have all followers freeze the run's adapter as it is, and know it as `adapter`."""
        name = self._name(adapter)
        self.ask_all("snapshot", run_id, name)
        for peer in self.peers:
            peer.adapters.add(name)

    def adapter_id(self, peer: Peer, model_name: str, adapter: Adapter) -> str:
        """What a follower calls this adapter, which is sent to it if it does not have it."""
        name = self._name(adapter)
        if name not in peer.adapters:
            table = Adapter(adapter.spec, on_cpu(adapter.a), on_cpu(adapter.b))
            peer.result(peer.ask("put_adapter", model_name, name, table)[1])
            peer.adapters.add(name)
        return name

    def _name(self, adapter: Adapter) -> str:
        name = self._adapter_ids.get(adapter)
        if name is None:
            name = self._adapter_ids[adapter] = uuid.uuid4().hex
            weakref.finalize(adapter, self._forget_adapter, name).atexit = False
        return name

    def _forget_adapter(self, name: str) -> None:
        for peer in self.peers:
            if name in peer.adapters:
                peer.adapters.discard(name)
                peer.ask("forget_adapter", name)

    def end(self) -> None:
        """Let the followers end, and leave the group."""
        for peer in self.peers:
            peer.end()
        dist.destroy_process_group()


def _tensors(inputs: Any) -> dict[str, torch.Tensor]:
    return {key: torch.from_numpy(value) for key, value in inputs.items()}


def merged(
    indices: Sequence[Sequence[int]],
    outputs: Sequence[tinker.ForwardBackwardOutput | None],
    sampled: Sequence[int],
) -> tinker.ForwardBackwardOutput:
    """One output from those of the ranks, datums in the order of the call.

    Metrics that end in :sum are added up, of :min and :max the extreme counts, and the others are means over the `sampled`
    positions of each rank.
    """
    by_datum: dict[int, Any] = {}
    values: dict[str, list[tuple[float, int]]] = {}
    for part, output, count in zip(indices, outputs, sampled, strict=True):
        if output is not None:
            by_datum.update(zip(part, output.loss_fn_outputs, strict=True))
            for key, value in output.metrics.items():
                values.setdefault(key, []).append((value, count))
    metrics = {key: _folded(key, found) for key, found in values.items()}
    return tinker.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord", loss_fn_outputs=[by_datum[i] for i in sorted(by_datum)], metrics=metrics
    )


def _folded(key: str, found: Sequence[tuple[float, int]]) -> float:
    values = [value for value, _ in found]
    kind = key.rpartition(":")[2]
    if kind in ("sum", "min", "max"):
        return {"sum": math.fsum, "min": min, "max": max}[kind](values)
    return math.fsum(value * count for value, count in found) / sum(count for _, count in found)


@cache
def _make_leader() -> Leader:
    leader = Leader()
    atexit.register(leader.end)
    return leader


def leader() -> Leader | None:
    """The leader of this process; None without torchrun. Raises RequestError on another rank, which has no clients."""
    if world_size() == 1:
        sharded()  # refused
        return None
    if rank() > 0:
        raise RequestError(
            f"this is rank {rank()} of {world_size()}: clients are made on rank 0 alone. Call "
            "tinker_local_backend.serve_as_replica() before the first client, or start the program as "
            "torchrun ... -m tinker_local_backend.run script.py"
        )
    return _make_leader()


def load_model(name: str) -> BaseModel:
    """A base model as this process has it: whole, or its part under torchrun with TINKER_LOCAL_BASE_WEIGHTS=sharded."""
    ranks = leader()
    return models.load_model(name) if ranks is None else ranks.load_model(name)
