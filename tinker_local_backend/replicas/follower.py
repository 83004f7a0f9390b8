"""A rank other than 0: an engine without clients, which does its part of what rank 0 trains and samples."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist

from tinker_local_backend.engine.engine import Engine
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.model.lora import Adapter
from tinker_local_backend.engine.model.sharding import Ranks
from tinker_local_backend.engine.models import load_model, new_generator
from tinker_local_backend.engine.sampling.generation import Generator
from tinker_local_backend.engine.sampling.sampler import Post, Sampler
from tinker_local_backend.engine.training import trainer
from tinker_local_backend.engine.training.parts import Parts
from tinker_local_backend.environment import check_environment, default_device
from tinker_local_backend.errors import ReplicaError
from tinker_local_backend.replicas import links
from tinker_local_backend.replicas.launch import check_sampler, rank, sharded
from tinker_local_backend.replicas.messages import Command, Progress, RunState, Share, reduce_gradients
from tinker_local_backend.replicas.messages import unpacked as unpacked_run

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Run:
    model: BaseModel
    state: trainer.TrainState
    pending: list[Any] = field(default_factory=list)
    """gradients of a pass that all ranks must finish before they count"""
    progress: Progress | None = None
    """of a pass that goes on in turns"""


class _Led(Generator):
    """Steps when rank 0 says so, and never because its engine has nothing else to do."""

    @property
    def busy(self) -> bool:
        return False


class Follower:
    """Carries out the commands of rank 0, in the order in which they come for each run."""

    def __init__(self) -> None:
        self._engine = Engine(make_sampler=self._make_sampler, load_model=self._load_model)
        self._ranks: Ranks | None = None
        self._samplers: dict[str, Sampler] = {}
        """by model"""
        self._runs: dict[str, _Run] = {}
        self._adapters: dict[str, Adapter] = {}
        self._asked: dict[int, Future[Any]] = {}
        """by the number of the command"""

    def serve(self) -> None:
        """Until rank 0 ends. Raises RuntimeError when it dies without saying so."""
        own = links.join()[rank()]
        if sharded():
            self._ranks = Ranks(default_device(), _lost)
        answers = links.Outbox(0, own.up, lambda error: logger.debug("rank 0 takes no answers: %s", error))
        while (command := links.receive(0, own.down)).kind != "end":
            self._begin(command, answers)
        self._engine.close()
        answers.put((command.number, links.ENDED))
        answers.close()
        dist.destroy_process_group()

    def _begin(self, command: Command, answers: links.Outbox) -> None:
        """Start a command; its answer goes out when it is done."""
        if command.kind == "cancel":
            if (asked := self._asked.get(command.number)) is not None:
                asked.cancel()
            return
        try:
            future = getattr(self, f"_do_{command.kind}")(*command.arguments).future()
        except Exception as error:
            future = Future()
            future.set_exception(error)
        self._asked[command.number] = future

        def answer(done: Future[Any]) -> None:
            self._asked.pop(command.number, None)
            error = None if done.cancelled() else done.exception()
            if not done.cancelled():
                answers.put((command.number, done.result() if error is None else links.portable(error)))

        future.add_done_callback(answer)

    def _load_model(self, name: str) -> BaseModel:
        ranks = self._ranks
        if ranks is None:
            return load_model(name)
        return ranks.take_part_in_loading(lambda: load_model(name, ranks=ranks))

    def _make_sampler(self, model: BaseModel, kv_tokens: int, random_seed: Callable[[], int], post: Post) -> Sampler:
        if self._ranks is None:
            return new_generator(model, kv_tokens, random_seed)
        sampler = self._samplers[model.name] = _Led(model, kv_tokens, random_seed)
        return sampler

    def _on_worker(self, line: str, operation: Callable[[], Any]) -> Any:
        # What ranks do together, they do in the order in which rank 0 asks.
        return self._engine.submit(line if self._ranks is None else "rank 0", operation)

    def _do_load_part(self, model_name: str) -> Any:
        def load() -> None:
            if model_name not in self._samplers:
                self._engine.load(model_name)
                return
            # For another client of rank 0, which has loaded it anew.
            assert self._ranks is not None
            self._ranks.have_loaded()
            with self._engine.load(model_name).shards.turn():
                pass

        return self._on_worker(model_name, load)

    def _do_load(self, model_name: str) -> Any:
        """Answers with the bound on the tokens of a sequence."""

        def load() -> int:
            self._engine.load(model_name)
            return self._engine.limits(model_name).tokens

        return self._on_worker(model_name, load)

    def _do_put_run(self, run_id: str, model_name: str, packed: RunState) -> Any:
        def put() -> None:
            model = self._engine.load(model_name)
            self._runs[run_id] = _Run(model, unpacked_run(packed, model))

        return self._on_worker(run_id, put)

    def _do_forget_run(self, run_id: str) -> Any:
        def forget() -> None:
            self._runs.pop(run_id, None)

        return self._on_worker(run_id, forget)

    def _do_forward_backward(self, run_id: str, share: Share) -> Any:
        def run() -> Parts[Any]:
            own = self._runs[run_id]
            self._engine.evict_prefixes()
            scratch = trainer.TrainState(own.state.adapter, own.state.optimizer)
            output = yield from share.run(own.model, scratch)
            own.pending = scratch.gradients or []
            return output

        if self._ranks is None:
            return self._engine.submit_parts(run_id, run)

        def begin() -> None:
            self._runs[run_id].progress = Progress(run())

        return self._on_worker(run_id, begin)

    def _do_turn(self, run_id: str) -> Any:
        """The next part of the pass that was begun."""

        def turn() -> None:
            own = self._runs[run_id]
            with own.model.shards.turn() as turn:
                if own.progress is not None:
                    own.progress.step(turn)

        return self._on_worker(run_id, turn)

    def _do_outcome(self, run_id: str) -> Any:
        """Of the pass, after its last turn."""

        def outcome() -> Any:
            own = self._runs[run_id]
            progress, own.progress = own.progress, None
            return None if progress is None else progress.result()

        return self._on_worker(run_id, outcome)

    def _do_step(self, model_name: str) -> Any:
        """One of the sampler's, in turn with those of the other ranks."""

        def step() -> None:
            with self._engine.load(model_name).shards.turn():
                self._samplers[model_name].step()

        return self._on_worker(model_name, step)

    def _do_reduce(self, run_id: str) -> Any:
        def reduce() -> None:
            own = self._runs[run_id]
            gradients, own.pending = own.pending or own.state.zeros(), []  # zeros: it had no datum
            own.state.accumulate(reduce_gradients(gradients))

        return self._on_worker(run_id, reduce)

    def _do_clear(self, run_id: str) -> Any:
        return self._on_worker(run_id, lambda: self._runs[run_id].state.clear())

    def _do_optim_step(self, run_id: str, params: Any) -> Any:
        return self._on_worker(run_id, lambda: trainer.optim_step(self._runs[run_id].state, params).metrics)

    def _do_snapshot(self, run_id: str, adapter_id: str) -> Any:
        def snapshot() -> None:
            run = self._runs[run_id]
            self._adapters[adapter_id] = run.state.adapter.snapshot(run.model.dtype)

        return self._on_worker(run_id, snapshot)

    def _do_put_adapter(self, model_name: str, adapter_id: str, packed: Adapter) -> Any:
        def put() -> None:
            device = self._engine.load(model_name).device
            a, b = ({name: matrix.to(device) for name, matrix in table.items()} for table in (packed.a, packed.b))
            self._adapters[adapter_id] = Adapter(packed.spec, a, b)

        return self._on_worker(adapter_id, put)

    def _do_forget_adapter(self, adapter_id: str) -> Any:
        def forget() -> None:
            self._adapters.pop(adapter_id, None)

        return self._on_worker(adapter_id, forget)

    def _do_sample(self, model_name: str, request: Any, adapter_id: str | None) -> Any:
        adapter = None if adapter_id is None else self._adapters[adapter_id]
        return self._engine.sample(model_name, replace(request, adapter=adapter), lambda result: result)


def _lost(error: RuntimeError) -> ReplicaError:
    return ReplicaError(f"rank {rank()} could not work together with the others: {error}")


def serve_as_replica() -> None:
    """On a rank other than 0 of torchrun's: follow rank 0 until it ends, then exit the process. Elsewhere: return at once.

    Recipes and `python -m tinker_local_backend.run` call it; a program of one's own calls it before it makes a client.
    """
    if rank() == 0:
        return
    check_environment()
    check_sampler()
    # Rank 0 gets these too: it saves what is done, and its end is the end here.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        Follower().serve()
    except RuntimeError as error:
        raise SystemExit(f"rank {rank()}: rank 0 is gone ({error})") from None
    raise SystemExit(0)
