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
from tinker_local_backend.engine.training import trainer
from tinker_local_backend.engine.training.datums import LossConfig, check_datum, loss_function
from tinker_local_backend.engine.training.losses import was_sampled
from tinker_local_backend.engine.training.trainer import Parts, in_one
from tinker_local_backend.errors import ReplicaError, RequestError
from tinker_local_backend.replicas.group import joined
from tinker_local_backend.replicas.launch import rank, world_size

Output = tinker.ForwardBackwardOutput

SAME_NORM = 1e-5
"""Relative difference of gradient norms between ranks that counts as rounding."""


class ReplicatedRun:
    """A training run with a copy on every rank. Rank 0 calls the public methods, on the engine's worker; all ranks run the
    private ones together."""

    def __init__(self, model: BaseModel, spec: LoraSpec, seed: int):
        self._model = model
        self.state = trainer.TrainState.new(model.new_adapter(spec, seed))

    def forward_backward(
        self, data: Sequence[tinker.Datum], loss_fn: str, config: LossConfig, backward: bool
    ) -> Parts[Output]:
        """As trainer.forward_backward, over all ranks. If a rank fails, its error is raised and no rank keeps gradients."""
        if not data:
            raise RequestError("data is empty; give at least one datum")
        loss, _, _ = loss_function(loss_fn, config)
        examples = [check_datum(datum, i, loss_fn, loss, self._model) for i, datum in enumerate(data)]
        shares = divide([len(example.tokens) for example in examples], world_size())
        joined().run(self._begin, data, shares, loss_fn, config, backward)
        while any(joined().run(self._part)):
            yield
        outputs = joined().run(self._finish, backward)
        sampled = [int(was_sampled(example.inputs).sum()) if loss.is_policy_loss else 0 for example in examples]
        return merged(shares, outputs, [sum(sampled[i] for i in share) for share in shares])

    def _begin(
        self,
        data: Sequence[tinker.Datum],
        shares: Sequence[Sequence[int]],
        loss_fn: str,
        config: LossConfig,
        backward: bool,
    ) -> None:
        """Begin a pass. shares[rank] are the indices of that rank's datums in `data`; errors name datums by them."""
        share, self._output = shares[rank()], None
        datums = [data[i] for i in share]
        # Its gradients are added to the run's only when all ranks have finished.
        self._pass = trainer.TrainState(self.state.adapter, self.state.optimizer)
        self._parts: Parts[Output | None] = in_one(lambda: None)
        if share:
            self._parts = trainer.forward_backward(self._model, self._pass, datums, loss_fn, config, backward, share)

    def _part(self) -> bool:
        """The next micro-batch of this rank's share. Returns whether there may be another one."""
        with self._model.shards.turn():
            try:
                next(self._parts)
            except StopIteration as end:
                self._output = end.value or self._output
                return False
            return True

    def _finish(self, backward: bool) -> Output | None:
        """All-reduce the gradients of the pass and add them to those of the run: the same bits on every rank."""
        if backward:
            with joined().together():
                gradients = self._pass.gradients or self.state.zeros()
                self._pass.clear()
                flat = torch.cat([gradient.flatten() for gradient in gradients])
                dist.all_reduce(flat)  # pyright: ignore[reportUnknownMemberType]
            parts: Sequence[torch.Tensor] = torch.split(flat, [gradient.numel() for gradient in gradients])
            self.state.accumulate([part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)])
        return self._output

    def optim_step(self, params: tinker.AdamParams) -> OptimStepResponse:
        """As trainer.optim_step, the same on every rank. Raises ReplicaError for ranks whose gradients differ."""
        responses = joined().run(self._step, params, self.state.failure)
        norms = [(response.metrics or {})["grad_norm"] for response in responses]
        for other, norm in enumerate(norms):
            if not math.isclose(norm, norms[0], rel_tol=SAME_NORM):
                raise ReplicaError(
                    f"rank {other} stepped with a gradient of norm {norm}, rank 0 with {norms[0]}: the replicas have diverged; "
                    "start the run again from its last checkpoint"
                )
        return responses[0]

    def _step(self, params: tinker.AdamParams, failure: str | None) -> OptimStepResponse:
        self.state.failure = failure
        return trainer.optim_step(self.state, params)

    def publish(self) -> None:
        """Copy `state` from rank 0 to every rank, after a load."""
        joined().run(setattr, self, "state", self.state)

    def snapshot(self) -> Adapter:
        """A frozen copy of the adapter on every rank."""
        return joined().make(self._snapshot)

    def _snapshot(self) -> Adapter:
        return self.state.adapter.snapshot(self._model.dtype)


def merged(indices: Sequence[Sequence[int]], outputs: Sequence[Output | None], sampled: Sequence[int]) -> Output:
    """Merge the ranks' outputs into one, with datums in the order of the call.

    Metrics that end in :sum, :min or :max are reduced accordingly; others are means weighted by the `sampled` positions of
    each rank.
    """
    by_datum: dict[int, Any] = {}
    values: dict[str, list[tuple[float, int]]] = {}
    for part, output, count in zip(indices, outputs, sampled, strict=True):
        if output is not None:
            by_datum.update(zip(part, output.loss_fn_outputs, strict=True))
            for key, value in output.metrics.items():
                values.setdefault(key, []).append((value, count))
    metrics = {key: _reduced(key, weighted) for key, weighted in values.items()}
    in_order = [by_datum[i] for i in sorted(by_datum)]
    return Output(loss_fn_output_type="ArrayRecord", loss_fn_outputs=in_order, metrics=metrics)


def _reduced(key: str, weighted: Sequence[tuple[float, int]]) -> float:
    reduce = {"sum": math.fsum, "min": min, "max": max}.get(key.rpartition(":")[2])
    if reduce is not None:
        return reduce(value for value, _ in weighted)
    return math.fsum(value * count for value, count in weighted) / sum(count for _, count in weighted)


def divide(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices of datums for each rank, balanced by tokens: the longest first, each to the rank with the fewest tokens so far.

    Ties go to the lower index and the lower rank, so that the same lengths are always divided in the same way.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        least = loads.index(min(loads))
        shares[least].append(index)
        loads[least] += lengths[index]
    return [sorted(share) for share in shares]
