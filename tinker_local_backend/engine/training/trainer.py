"""Forward and backward passes over datums, and the optimizer step, for one adapter at a time.

Losses are sums, so any split into micro-batches gives the same loss and gradient up to rounding (accumulation.py adds up the
gradients of several calls).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial

import numpy as np
import numpy.typing as npt
import tinker
import torch

from tinker_local_backend.engine.model.attention import PackedPlan
from tinker_local_backend.engine.model.base_model import Backward, BaseModel
from tinker_local_backend.engine.model.lora import Adapter
from tinker_local_backend.engine.model.scoring import ScoreGradient, Scorer, SlopedRows
from tinker_local_backend.engine.training.accumulation import TrainState, norm_of, not_finite
from tinker_local_backend.engine.training.datums import Example, LossConfig, check_datum, loss_function
from tinker_local_backend.engine.training.losses import Config, LossFn, RatioStats
from tinker_local_backend.engine.training.micro_batch import MicroBatch, each_micro_batch, split_positions
from tinker_local_backend.engine.training.optimizer import check_adam_params
from tinker_local_backend.engine.training.parts import Parts
from tinker_local_backend.errors import RequestError


def forward_backward(
    model: BaseModel,
    state: TrainState,
    data: Sequence[tinker.Datum],
    loss_fn: str,
    loss_fn_config: LossConfig,
    backward: bool,
    indices: Sequence[int] | None = None,
) -> Parts[tinker.ForwardBackwardOutput]:
    """Loss, per-token logprobs and (with `backward`) gradients of a list of datums, in parts: one for each micro-batch.

    `indices` are by what errors name the datums, where these are some of a longer list.

    Returns:
        loss_fn_outputs[i]["logprobs"]: float32 of the shape of data[i]'s target_tokens; metrics with "loss:sum".

    Raises:
        RequestError: anything about the data, the loss or its config that is not as it must be.
        NonFiniteError: the loss or the gradient is NaN or infinite; it names the datums that are the cause.
    """
    if not data:
        raise RequestError("data is empty; give at least one datum")
    loss, config, temperature = loss_function(loss_fn, loss_fn_config)
    names = indices or range(len(data))
    examples = [check_datum(datum, i, loss_fn, loss, model) for i, datum in zip(names, data, strict=True)]
    gradients: list[torch.Tensor] = []
    outputs: list[dict[str, tinker.TensorData]] = [{} for _ in examples]
    loss_sum, passed, trained = 0.0, 0, 0
    broken: list[int] = []
    ratios = RatioStats(loss)

    def run(
        batch: MicroBatch, recompute: bool, into: list[torch.Tensor] = gradients
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprobs and elementwise loss of a micro-batch; its gradient is added to those of `into`."""
        sloped = sloped_rows(loss, batch) if backward else None  # copied to the device before it has anything to do
        with torch.no_grad(), model.routed(state.adapter), model.recompute(recompute):
            hidden, carry_back = batch_pass(model, state.adapter, batch, gradient=backward)
            scorer = Scorer(model, state.adapter, temperature)
            if backward:
                scores, gradient = _scores_and_gradient(scorer, hidden, batch, loss, config, sloped)
            else:
                scores, gradient = scorer.logprobs(hidden, batch.score_targets), None
            logprobs = batch.of_positions(scores)
            elementwise = loss.compute(logprobs, batch.inputs, config)
            if gradient is not None:  # last, because nothing may fail once gradients have been added
                backpropagate(model, carry_back, gradient, state.adapter, into)
        return logprobs, elementwise

    for batch, (logprobs, elementwise), more in each_micro_batch(model, examples, run):
        scores, batch_loss = _read(logprobs, elementwise)
        loss_sum += batch_loss
        if not math.isfinite(batch_loss):
            rows = batch.inputs["sequence_index"][~elementwise.isfinite().all(dim=1)]
            broken += [batch.indices[i] for i in rows.unique().tolist()]
        passed += batch.tokens
        trained += int(loss.trained(batch.host_inputs).sum())
        if loss.is_policy_loss:
            ratios.add(logprobs, batch.inputs, config)
        for i, array in zip(batch.indices, split_positions(scores, batch, examples), strict=True):
            outputs[i] = {"logprobs": tinker.TensorData.from_numpy(array)}
        if more:
            yield batch.tokens

    if not math.isfinite(loss_sum):
        raise not_finite("loss", sorted(names[i] for i in broken))
    if backward:
        norm = norm_of(gradients)
        if not math.isfinite(norm):
            culprits = yield from _broken(model, examples, run)
            raise not_finite("gradient", [names[i] for i in culprits])
        state.accumulate(gradients, norm)
    metrics = {
        "loss:sum": loss_sum,
        "tokens:sum": float(sum(len(example.tokens) for example in examples)),
        "computed_tokens:sum": float(passed),
        "trained_tokens:sum": float(trained),
        **ratios.metrics(config),
    }
    return tinker.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", loss_fn_outputs=outputs, metrics=metrics)


def _broken(
    model: BaseModel,
    examples: Sequence[Example],
    run: Callable[..., tuple[torch.Tensor, torch.Tensor]],
) -> Parts[list[int]]:
    """Which datums alone have a gradient that is not finite: rare, and worth a pass `run(batch, recompute, into)` of each."""
    broken = []
    for i, example in enumerate(examples):
        yield
        own: list[torch.Tensor] = []
        for _ in each_micro_batch(model, [example], partial(run, into=own)):
            pass
        if not math.isfinite(norm_of(own)):
            broken.append(i)
    return broken


def batch_pass(
    model: BaseModel, adapter: Adapter, batch: MicroBatch, gradient: bool = True
) -> tuple[torch.Tensor, Backward]:
    """Hidden states (S, H) of the positions that are scored, and what carries a gradient by them to the adapter's matrices."""
    plan = PackedPlan(batch.packed.segments)
    hidden_TH, backward = model.training_pass(*batch.packed.on(model.device), plan, adapter, gradient=gradient)
    rows = batch.score_rows
    if rows is None:
        return hidden_TH, backward

    def of_rows(by_hidden_SH: torch.Tensor) -> list[torch.Tensor | None]:
        return backward(torch.zeros_like(hidden_TH).index_put_((rows,), by_hidden_SH, accumulate=True))

    return hidden_TH[rows], of_rows


def _read(logprobs: torch.Tensor, elementwise: torch.Tensor) -> tuple[npt.NDArray[np.float32], float]:
    """Logprobs and the sum of the losses, brought from the device at once: float64 holds both exactly."""
    both = torch.cat([logprobs.double().flatten(), elementwise.double().sum()[None]]).cpu().numpy()
    return both[:-1].astype(np.float32).reshape(logprobs.shape), float(both[-1])


def sloped_rows(loss: LossFn, batch: MicroBatch) -> SlopedRows | None:
    """Which scores may have a slope, for a GPU. None on a CPU: slopes themselves tell of more rows that can be left out, and
    nothing waits.
    """
    device = batch.score_targets.device
    if device.type == "cpu":
        return None
    trained = loss.trained(batch.host_inputs).any(axis=1)
    return SlopedRows.of(np.unique(batch.host_scored[trained]), device)


def _scores_and_gradient(
    scorer: Scorer, hidden: torch.Tensor, batch: MicroBatch, loss: LossFn, config: Config, sloped: SlopedRows | None
) -> tuple[torch.Tensor, ScoreGradient]:
    if not loss.is_elementwise:
        scores = scorer.logprobs(hidden, batch.score_targets)
        slopes = _slopes(loss, batch.of_positions(scores), batch.inputs, config)
        return scores, scorer.gradient(hidden, batch.score_targets, batch.of_scores(slopes), sloped)

    @cache
    def in_order() -> tuple[torch.Tensor, torch.Tensor, npt.NDArray[np.int64]]:
        # Positions in the order of their scores, so that those of a range of scores are neighbours.
        by_score, order = batch.scored.sort(stable=True)
        return by_score, order, np.sort(batch.host_scored)

    def slope_fn(start: int, end: int, part: torch.Tensor) -> torch.Tensor:
        if end - start == len(batch.score_targets):
            return batch.of_scores(_slopes(loss, batch.of_positions(part), batch.inputs, config))
        by_score, order, on_host = in_order()
        first, last = np.searchsorted(on_host, (start, end)).tolist()
        own, index = order[first:last], by_score[first:last] - start
        slopes = _slopes(loss, part[index], {key: value[own] for key, value in batch.inputs.items()}, config)
        return torch.zeros_like(part).index_add_(0, index, slopes)

    return scorer.logprobs_and_gradient(hidden, batch.score_targets, slope_fn, sloped)


def _slopes(loss: LossFn, logprobs: torch.Tensor, inputs: Mapping[str, torch.Tensor], config: Config) -> torch.Tensor:
    """dL/d logprobs, of the same shape."""
    if loss.is_linear:
        return loss.compute(torch.ones_like(logprobs), inputs, config)
    with torch.enable_grad():
        leaf = logprobs.detach().requires_grad_()
        return torch.autograd.grad(loss.compute(leaf, inputs, config).sum(), leaf)[0]


def backpropagate(
    model: BaseModel, carry_back: Backward, gradient: ScoreGradient, adapter: Adapter, gradients: list[torch.Tensor]
) -> None:
    """Carry a gradient by the scored hidden states to the adapter's matrices and add it to `gradients`, empty at first."""
    parameters = adapter.parameters()
    parts: list[torch.Tensor | None] = [None] * len(parameters)
    if not gradient.is_zero:
        parts = carry_back(gradient.hidden)
    place = {id(parameter): i for i, parameter in enumerate(parameters)}
    for matrix, part in zip(model.head_matrices(adapter), gradient.head, strict=True):
        parts[place[id(matrix)]] = part
    if not gradients:
        # The optimizer reads them as they lie in memory.
        gradients += [
            torch.zeros_like(parameter) if part is None else part.contiguous()
            for parameter, part in zip(parameters, parts, strict=True)
        ]
        return
    found = [(total, part) for total, part in zip(gradients, parts, strict=True) if part is not None]
    if found:
        torch._foreach_add_(*map(list, zip(*found, strict=True)))  # pyright: ignore[reportPrivateImportUsage]


def optim_step(state: TrainState, params: tinker.AdamParams) -> tinker.types.OptimStepResponse:
    """Apply the accumulated gradient sum and clear it. Metrics: the gradient norm before clipping.

    Raises RequestError, with the gradients cleared, when a pass since the last step has failed.
    """
    if state.failure is not None:
        failure = state.failure
        state.clear()
        raise RequestError(
            f"no step was taken: a forward_backward before it failed ({failure}), so its gradient is missing in the sum. "
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
