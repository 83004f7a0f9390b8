"""A training run of all ranks: each computes its share of the datums, gradients are all-reduced, and all take the same step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tinker
import torch
import torch.distributed as dist
from tinker.types import OptimStepResponse

from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.model.lora import Adapter
from tinker_local_backend.engine.model.lora_spec import LoraSpec
from tinker_local_backend.engine.model.sharding import Ranks
from tinker_local_backend.engine.training import trainer
from tinker_local_backend.engine.training.datums import LossConfig, check_datum, loss_function
from tinker_local_backend.engine.training.losses import was_sampled
from tinker_local_backend.engine.training.trainer import Parts
from tinker_local_backend.errors import ReplicaError, RequestError
from tinker_local_backend.replicas.group import Replicas
from tinker_local_backend.replicas.launch import rank, world_size

SAME_NORM = 1e-5
"""Relative difference of gradient norms between ranks that is still rounding."""

MORE = "more"
"""What `RankRun.part` returns when there is another one."""


class RankRun:
    """A run on one rank. All ranks call its methods at the same time."""

    def __init__(self, model: BaseModel, spec: LoraSpec, seed: int):
        self.model = model
        self.state = trainer.TrainState.new(model.new_adapter(spec, seed))
        self._scratch: trainer.TrainState | None = None
        """gradients of a pass that all ranks must finish before they count"""
        self._parts: Parts[tinker.ForwardBackwardOutput] | None = None
        """of this rank's share of the pass, until it has ended"""

    def begin(
        self,
        data: Sequence[tinker.Datum],
        shares: Sequence[Sequence[int]],
        loss_fn: str,
        config: LossConfig,
        backward: bool,
    ) -> None:
        """Begin a pass. A share is a rank's indices of `data`, by which errors name the datums."""
        share = shares[rank()]
        datums = [data[i] for i in share]
        self._scratch = trainer.TrainState(self.state.adapter, self.state.optimizer)
        self._parts = (
            trainer.forward_backward(self.model, self._scratch, datums, loss_fn, config, backward, share)
            if share
            else None
        )

    def part(self) -> tinker.ForwardBackwardOutput | str | None:
        """The next micro-batch. MORE, or after the last one the output of the share; None once that was returned."""
        with self.model.shards.turn():
            if self._parts is None:
                return None
            try:
                next(self._parts)
            except StopIteration as end:
                self._parts = None
                return end.value
            return MORE

    def reduce(self, ranks: Ranks) -> None:
        """All-reduce the gradients of the pass and add them to those of the run: the same bits on every rank."""
        with ranks.together():
            gradients = (self._scratch and self._scratch.gradients) or self.state.zeros()
            self._scratch = None
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat)
        parts = flat.split([gradient.numel() for gradient in gradients])
        self.state.accumulate([part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)])

    def abandon(self) -> None:
        """Drop the pass, which has failed on some rank."""
        self._scratch = self._parts = None

    def optim_step(self, params: tinker.AdamParams, failure: str | None) -> OptimStepResponse:
        self.state.failure = failure
        return trainer.optim_step(self.state, params)

    def snapshot(self) -> Adapter:
        return self.state.adapter.snapshot(self.model.dtype)


class ReplicatedRun:
    """A run of all ranks, on rank 0. Called on an engine's worker."""

    def __init__(self, replicas: Replicas, model: BaseModel, spec: LoraSpec, seed: int):
        self._replicas = replicas
        self._run = replicas.make(RankRun, model, spec, seed)
        self.state = self._run.state

    def publish(self) -> None:
        """Copy `state` to every rank, after it was loaded."""
        self._replicas.run(setattr, self._run, "state", self.state)

    def forward_backward(
        self, data: Sequence[tinker.Datum], loss_fn: str, config: LossConfig, backward: bool
    ) -> Parts[tinker.ForwardBackwardOutput]:
        """As trainer.forward_backward, over all ranks. Raises the error of a rank, and then no rank keeps gradients."""
        if not data:
            raise RequestError("data is empty; give at least one datum")
        loss, _, _ = loss_function(loss_fn, config)
        examples = [check_datum(datum, i, loss_fn, loss, self._run.model) for i, datum in enumerate(data)]
        shares = divide([len(example.tokens) for example in examples], world_size())
        outputs: list[Any] = [None] * len(shares)
        try:
            self._replicas.tell(self._run.begin, data, shares, loss_fn, config, backward)
            while True:
                results = self._replicas.run(self._run.part)
                outputs = [result or output for result, output in zip(results, outputs, strict=True)]
                if MORE not in results:
                    break
                yield
            if backward:
                self._replicas.run(self._run.reduce, self._replicas.ranks)
        except BaseException:
            self._replicas.tell(self._run.abandon)
            raise
        sampled = [0] * len(shares)
        if loss.is_policy_loss:
            inputs = [{key: torch.from_numpy(array) for key, array in example.inputs.items()} for example in examples]
            sampled = [sum(int(was_sampled(inputs[i]).sum()) for i in share) for share in shares]
        return merged(shares, outputs, sampled)

    def optim_step(self, params: tinker.AdamParams) -> OptimStepResponse:
        """As trainer.optim_step, the same on every rank. Raises ReplicaError for ranks whose gradients differ."""
        responses = self._replicas.run(self._run.optim_step, params, self.state.failure)
        norms = [(response.metrics or {})["grad_norm"] for response in responses]
        for place, norm in enumerate(norms):
            if not math.isclose(norm, norms[0], rel_tol=SAME_NORM):
                raise ReplicaError(
                    f"rank {place} stepped with a gradient of norm {norm}, rank 0 with {norms[0]}: the replicas have diverged; "
                    "start the run again from its last checkpoint"
                )
        return responses[0]

    def snapshot(self) -> Adapter:
        """A frozen copy of the adapter on every rank."""
        return self._replicas.make(self._run.snapshot)


def merged(
    indices: Sequence[Sequence[int]], outputs: Sequence[tinker.ForwardBackwardOutput | None], sampled: Sequence[int]
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
    metrics = {key: _reduced(key, weighted) for key, weighted in values.items()}
    return tinker.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord", loss_fn_outputs=[by_datum[i] for i in sorted(by_datum)], metrics=metrics
    )


def _reduced(key: str, weighted: Sequence[tuple[float, int]]) -> float:
    reduce = {"sum": math.fsum, "min": min, "max": max}.get(key.rpartition(":")[2])
    if reduce is not None:
        return reduce(value for value, _ in weighted)
    return math.fsum(value * count for value, count in weighted) / sum(count for _, count in weighted)


def divide(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices of datums for each rank, with about as many tokens each: the longest first, each to the rank with fewest.

    Ties go to the lower index and the lower rank, so that the same lengths are always divided in the same way.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        least = loads.index(min(loads))
        shares[least].append(index)
        loads[least] += lengths[index]
    return [sorted(share) for share in shares]
