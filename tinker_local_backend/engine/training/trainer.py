"""Forward and backward passes over datums, and the optimizer step, for one adapter at a time.

Losses are sums, so any split into micro-batches gives the same loss and gradient up to rounding (accumulation.py sums the
gradients of several calls).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import tinker
import torch

from tinker_local_backend.engine.model.base_model import Backward, BaseModel
from tinker_local_backend.engine.model.head import ScoreGradient, Scorer, SlopedRows
from tinker_local_backend.engine.model.lora import Adapter
from tinker_local_backend.engine.model.routes import Replay
from tinker_local_backend.engine.training.accumulation import TrainState, not_finite
from tinker_local_backend.engine.training.datums import (
    ENTROPIES,
    Example,
    LossConfig,
    Routes,
    check_datum,
    loss_function,
)
from tinker_local_backend.engine.training.losses import Config, LossFn, RatioStats
from tinker_local_backend.engine.training.micro_batch import (
    MicroBatch,
    MicroBatchResult,
    each_micro_batch,
    split_positions,
)
from tinker_local_backend.engine.training.optimizer import check_adam_params, global_norm
from tinker_local_backend.errors import RequestError

T = TypeVar("T")

Parts = Generator[int | None, None, T]
"""An operation that yields between its parts the number of tokens of the last one (None: unknown), and returns its result."""


def in_one(operation: Callable[[], T]) -> Parts[T]:
    """An operation with a single part."""
    yield from ()
    return operation()


def finish(parts: Parts[T]) -> T:
    """Run all parts at once."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            return end.value


def forward_backward(
    model: BaseModel,
    state: TrainState,
    data: Sequence[tinker.Datum],
    loss_fn: str,
    loss_fn_config: LossConfig,
    backward: bool,
    indices: Sequence[int] | None = None,
    routes: Sequence[Routes] | None = None,
) -> Parts[tinker.ForwardBackwardOutput]:
    """Loss, per-token logprobs and (with `backward`) gradients of a list of datums, in parts: one per micro-batch.

    `indices` identify the datums in errors, if they come from a longer list. `routes`: the experts to replay in each.

    Returns:
        loss_fn_outputs[i]["logprobs"]: float32 with the shape of data[i]'s target_tokens; metrics with "loss:sum". A forward
        pass with loss_fn_config["entropies"] also has "entropies" of softmax(logits / temperature), in nats.

    Raises:
        RequestError: the data, the loss or its config is invalid.
        NonFiniteError: the loss or the gradient is NaN or infinite; it names the datums that cause it.
    """
    loss, config, temperature = loss_function(loss_fn, loss_fn_config)
    names = indices or range(len(data))
    wants_entropies = _wants_entropies(config, backward)
    examples = _examples(model, data, loss_fn, loss, names, routes)
    gradients: list[torch.Tensor] = []
    outputs: list[dict[str, tinker.TensorData]] = [{} for _ in examples]
    loss_sum, computed, trained = 0.0, 0, 0
    broken: list[int] = []
    ratios = RatioStats(loss)

    def run(batch: MicroBatch, recompute: bool, into: list[torch.Tensor] = gradients) -> MicroBatchResult:
        """Logprobs and elementwise loss of a micro-batch; adds its gradients to `into`."""
        sloped = sloped_rows(loss, batch) if backward else None  # copied while the device is still idle
        with torch.no_grad(), model.routed(state.adapter), model.recompute(recompute):
            hidden, backward_fn = batch_pass(model, state.adapter, batch, gradient=backward)
            scorer = Scorer(model.head_weights(state.adapter), temperature)
            gradient, entropies = None, None
            if backward:
                scores, gradient = _scores_and_gradient(scorer, hidden, batch, loss, config, sloped)
            else:
                scores, entropies = _scores(scorer, hidden, batch, wants_entropies)
            logprobs = batch.of_positions(scores)
            elementwise = loss.compute(logprobs, batch.inputs, config)
            if gradient is not None:  # last, so that a failed pass adds no gradient
                backpropagate(model, backward_fn, gradient, state.adapter, into)
        return logprobs, elementwise, entropies

    for batch, (logprobs, elementwise, entropies), more in each_micro_batch(model, examples, run):
        scores, batch_loss = _read(logprobs, elementwise)
        loss_sum += batch_loss
        if not math.isfinite(batch_loss):
            rows = batch.inputs["sequence_index"][~elementwise.isfinite().all(dim=1)]
            broken += [batch.indices[i] for i in rows.unique().tolist()]
        computed += batch.tokens
        trained += int(loss.trained(batch.host_inputs).sum())
        if loss.is_policy_loss:
            ratios.add(logprobs, batch.inputs, config)
        _split_outputs(batch, examples, scores, entropies, outputs)
        if more:
            yield batch.tokens

    if not math.isfinite(loss_sum):
        raise not_finite("loss", sorted(names[i] for i in broken))
    if backward:
        norm = global_norm(gradients)
        if not math.isfinite(norm):
            broken = yield from _find_broken(model, examples, run)
            raise not_finite("gradient", [names[i] for i in broken])
        state.accumulate(gradients, norm)
    metrics = {
        "loss:sum": loss_sum,
        "tokens:sum": float(sum(len(example.tokens) for example in examples)),
        "computed_tokens:sum": float(computed),
        "trained_tokens:sum": float(trained),
        **ratios.metrics(config),
    }
    return tinker.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", loss_fn_outputs=outputs, metrics=metrics)


def _examples(
    model: BaseModel,
    data: Sequence[tinker.Datum],
    loss_fn: str,
    loss: LossFn,
    names: Sequence[int],
    routes: Sequence[Routes] | None,
) -> list[Example]:
    """The checked datums, with the experts to replay."""
    if not data:
        raise RequestError("data is empty; give at least one datum")
    checked = [check_datum(datum, i, loss_fn, loss, model) for i, datum in zip(names, data, strict=True)]
    return [
        replace(example, routes=chosen) for example, chosen in zip(checked, routes or [None] * len(data), strict=True)
    ]


def _split_outputs(
    batch: MicroBatch,
    examples: Sequence[Example],
    scores: npt.NDArray[np.float32],
    entropies: torch.Tensor | None,
    outputs: list[dict[str, tinker.TensorData]],
) -> None:
    """Add the logprobs and entropies of a micro-batch to the outputs of its examples."""
    named = {"logprobs": scores}
    if entropies is not None:
        named["entropies"] = np.broadcast_to(entropies.float().cpu().numpy(), scores.shape)
    for name, values in named.items():
        for i, array in zip(batch.indices, split_positions(values, batch, examples), strict=True):
            outputs[i][name] = tinker.TensorData.from_numpy(array)


def _wants_entropies(config: dict[str, float], backward: bool) -> bool:
    """Whether entropies are requested; removes the key from the config."""
    requested = bool(config.pop(ENTROPIES, 0.0))
    if requested and backward:
        raise RequestError("loss_fn_config['entropies'] is for a forward pass; call forward, or leave it out")
    return requested


def _find_broken(
    model: BaseModel, examples: Sequence[Example], run: Callable[..., MicroBatchResult]
) -> Parts[list[int]]:
    """Find the datums whose gradient is not finite, with one pass `run(batch, recompute, into)` per datum."""
    broken = []
    for i, example in enumerate(examples):
        yield
        gradients: list[torch.Tensor] = []
        for _ in each_micro_batch(model, [example], partial(run, into=gradients)):
            pass
        if not math.isfinite(global_norm(gradients)):
            broken.append(i)
    return broken


def batch_pass(
    model: BaseModel, adapter: Adapter, batch: MicroBatch, gradient: bool = True
) -> tuple[torch.Tensor, Backward]:
    """Hidden states (S, H) of the rows to score, and the backward pass from their gradient to the adapter's matrices."""
    replay = None if batch.routes is None else Replay(batch.routes)
    hidden_TH, backward = model.training_pass(
        *batch.packed.on(model.device), batch.packed.plan(), adapter, gradient=gradient, routes=replay
    )
    rows = batch.score_rows
    if rows is None:
        return hidden_TH, backward

    def backward_rows(by_hidden_SH: torch.Tensor) -> list[torch.Tensor | None]:
        return backward(torch.zeros_like(hidden_TH).index_put_((rows,), by_hidden_SH, accumulate=True))

    return hidden_TH[rows], backward_rows


def _read(logprobs: torch.Tensor, elementwise: torch.Tensor) -> tuple[npt.NDArray[np.float32], float]:
    """Copy logprobs and the sum of the losses to the host in one transfer, as float64, which represents both exactly."""
    both = torch.cat([logprobs.double().flatten(), elementwise.double().sum()[None]]).cpu().numpy()
    return both[:-1].astype(np.float32).reshape(logprobs.shape), float(both[-1])


def sloped_rows(loss: LossFn, batch: MicroBatch) -> SlopedRows | None:
    """The rows that may have a slope, on a GPU. None on a CPU, where checking the slopes is cheap and excludes more rows."""
    device = batch.score_targets.device
    if device.type == "cpu":
        return None
    rows = np.unique(batch.host_scored[loss.trained(batch.host_inputs).any(axis=1)])
    return SlopedRows(rows, torch.from_numpy(rows).to(device))


def _scores(
    scorer: Scorer, hidden: torch.Tensor, batch: MicroBatch, wants_entropies: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The logprobs of the scores, and the entropies of all positions if requested."""
    if not wants_entropies:
        return scorer.logprobs(hidden, batch.score_targets), None
    scores, entropies = scorer.logprobs_and_entropies(hidden, batch.score_targets)
    return scores, batch.of_positions(entropies)


def _scores_and_gradient(
    scorer: Scorer, hidden: torch.Tensor, batch: MicroBatch, loss: LossFn, config: Config, sloped: SlopedRows | None
) -> tuple[torch.Tensor, ScoreGradient]:
    if not loss.is_elementwise:
        scores = scorer.logprobs(hidden, batch.score_targets)
        slopes = _slopes(loss, batch.of_positions(scores), batch.inputs, config)
        return scores, scorer.gradient(hidden, batch.score_targets, batch.of_scores(slopes), sloped)

    @cache
    def in_order() -> tuple[torch.Tensor, torch.Tensor, npt.NDArray[np.int64]]:
        # Positions sorted by score, so that the positions of a range of scores are adjacent.
        by_score, order = batch.scored.sort(stable=True)
        return by_score, order, np.sort(batch.host_scored)

    def slope_fn(start: int, end: int, chunk: torch.Tensor) -> torch.Tensor:
        if end - start == len(batch.score_targets):
            return batch.of_scores(_slopes(loss, batch.of_positions(chunk), batch.inputs, config))
        by_score, order, on_host = in_order()
        first, last = np.searchsorted(on_host, (start, end)).tolist()
        positions, index = order[first:last], by_score[first:last] - start
        inputs = {key: value[positions] for key, value in batch.inputs.items()}
        return torch.zeros_like(chunk).index_add_(0, index, _slopes(loss, chunk[index], inputs, config))

    return scorer.logprobs_and_gradient(hidden, batch.score_targets, slope_fn, sloped)


def _slopes(loss: LossFn, logprobs: torch.Tensor, inputs: Mapping[str, torch.Tensor], config: Config) -> torch.Tensor:
    """dL/d logprobs, of the same shape."""
    if loss.is_linear:
        return loss.compute(torch.ones_like(logprobs), inputs, config)
    with torch.enable_grad():
        leaf = logprobs.detach().requires_grad_()
        return torch.autograd.grad(loss.compute(leaf, inputs, config).sum(), leaf)[0]


def backpropagate(
    model: BaseModel, backward_fn: Backward, gradient: ScoreGradient, adapter: Adapter, gradients: list[torch.Tensor]
) -> None:
    """Backpropagate the gradient of the scored hidden states to the adapter's matrices; add it to `gradients`, initially
    empty.
    """
    parameters = adapter.parameters()
    new: list[torch.Tensor | None] = [None] * len(parameters) if gradient.is_zero else backward_fn(gradient.hidden)
    index = {id(parameter): i for i, parameter in enumerate(parameters)}
    for matrix, by_matrix in zip(model.head_matrices(adapter), gradient.head, strict=True):
        new[index[id(matrix)]] = by_matrix
    if not gradients:
        # The optimizer's kernel needs contiguous gradients.
        gradients += [
            torch.zeros_like(parameter) if by_matrix is None else by_matrix.contiguous()
            for parameter, by_matrix in zip(parameters, new, strict=True)
        ]
        return
    sums = [(total, by_matrix) for total, by_matrix in zip(gradients, new, strict=True) if by_matrix is not None]
    if sums:
        torch._foreach_add_(*map(list, zip(*sums, strict=True)))  # pyright: ignore[reportPrivateImportUsage]


def optim_step(state: TrainState, params: tinker.AdamParams) -> tinker.types.OptimStepResponse:
    """Apply and clear the accumulated gradient sum. Metrics: the gradient norm before clipping.

    Raises RequestError, with the gradients cleared, if a pass since the last step failed.
    """
    if state.failure is not None:
        failure = state.failure
        state.clear()
        raise RequestError(
            f"no step was taken: a forward_backward before it failed ({failure}), so its gradient is missing from the sum. "
            "The gradients are cleared; submit the passes of this step again"
        )
    if state.gradients is None:
        raise RequestError(
            "optim_step without gradients: submit forward_backward first (it accumulates until optim_step)"
        )
    check_adam_params(params)
    gradients, norm = state.gradients, state.norm
    state.clear()
    grad_norm = state.optimizer.step(gradients, params, norm)
    return tinker.types.OptimStepResponse(metrics={"grad_norm": grad_norm})
