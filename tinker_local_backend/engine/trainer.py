"""Forward and backward passes over datums, and the optimizer step, for one adapter at a time.

Gradients of a call are gathered aside and added to the adapter only when the whole call has succeeded: a call that fails
leaves no trace. Losses are sums, so any split into micro-batches gives the same loss and gradient up to rounding.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import tinker
import torch

from tinker_local_backend.engine.attention import PackedPlan
from tinker_local_backend.engine.base_model import BaseModel
from tinker_local_backend.engine.datums import Example, check_datum, loss_function
from tinker_local_backend.engine.lora import Adapter
from tinker_local_backend.engine.losses import RatioStats
from tinker_local_backend.engine.memory import ActivationBudget, out_of_memory
from tinker_local_backend.engine.optimizer import AdamW, check_adam_params
from tinker_local_backend.engine.packing import Packed, PrefixGroup, micro_batches, pack
from tinker_local_backend.engine.scoring import target_logprobs
from tinker_local_backend.environment import env_int
from tinker_local_backend.errors import RequestError

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class TrainState:
    """What one training client owns: its adapter, its optimizer's moments, and the gradient accumulated so far."""

    adapter: Adapter
    optimizer: AdamW
    gradients: list[torch.Tensor] | None = None

    def accumulate(self, gradients: list[torch.Tensor]) -> None:
        """Add the gradients of a call. Raises RequestError, with nothing added, when one is not finite."""
        if not all(bool(gradient.isfinite().all()) for gradient in gradients):
            raise RequestError(
                "the gradient of this call is not finite: check advantages, weights and sampled logprobs (a probability "
                "ratio overflowed) and the learning rate; it was not kept"
            )
        if self.gradients is None:
            self.gradients = gradients
            return
        for total, part in zip(self.gradients, gradients, strict=True):
            total += part


@dataclass(eq=False)
class MicroBatch:
    """One pass over some examples: where each position of each example is scored, and the loss inputs of all positions.

    A position of a shared prefix whose target is the same in several examples is scored once; `scored` says for every
    position, example after example, which row of the scores is its own.
    """

    indices: list[int]
    """of the examples, in the order of their positions"""
    packed: Packed
    tokens: int
    """rows of the pass, prefixes counted once"""
    score_rows: torch.Tensor
    """(S,) int64: row of the pass for each score"""
    score_targets: torch.Tensor
    """(S, K) int64"""
    scored: torch.Tensor
    """(P,) int64: the score of each position"""
    inputs: dict[str, torch.Tensor]
    """(P, K) each; `sequence_index` says which example (0, 1, ... within the batch) a position belongs to"""


def forward_backward(
    model: BaseModel,
    state: TrainState,
    data: Sequence[tinker.Datum],
    loss_fn: str,
    loss_fn_config: Mapping[str, float | str] | None,
    backward: bool,
) -> tinker.ForwardBackwardOutput:
    """Loss, per-token logprobs and (with `backward`) gradients of a list of datums.

    Returns:
        loss_fn_outputs[i]["logprobs"]: float32 of the shape of data[i]'s target_tokens; metrics with "loss:sum".

    Raises:
        RequestError: anything about the data, the loss or its config that is not as it must be.
    """
    if not data:
        raise RequestError("data is empty; give at least one datum")
    loss, config, temperature = loss_function(loss_fn, loss_fn_config)
    examples = [check_datum(datum, i, loss_fn, loss, model) for i, datum in enumerate(data)]
    gradients = [torch.zeros_like(parameter) for parameter in state.adapter.parameters()]
    outputs: list[dict[str, tinker.TensorData]] = [{} for _ in examples]
    loss_sum, passed, trained = 0.0, 0, 0
    ratios = RatioStats(loss)

    def run(batch: MicroBatch, recompute: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprobs and elementwise loss of a micro-batch; its gradient is added to the others."""
        with torch.set_grad_enabled(backward), model.routed(state.adapter), model.recompute(recompute):
            logprobs = batch_logprobs(model, state.adapter, batch, temperature)
            elementwise = loss.compute(logprobs, batch.inputs, config)
            if backward:
                add_gradients(elementwise.sum(), state.adapter, gradients)
        return logprobs.detach(), elementwise.detach()

    for batch, (logprobs, elementwise) in each_micro_batch(model, examples, run):
        loss_sum += float(elementwise.double().sum())
        passed += batch.tokens
        signal = batch.inputs["advantages"] if loss.is_policy_loss else batch.inputs["weights"]
        trained += int((signal != 0).sum())
        if loss.is_policy_loss:
            with torch.no_grad():
                ratios.add(logprobs, batch.inputs, config)
        for i, array in zip(batch.indices, split_positions(logprobs, batch, examples), strict=True):
            outputs[i] = {"logprobs": tinker.TensorData.from_numpy(array)}

    if not np.isfinite(loss_sum):
        raise RequestError(
            f"the loss of this call is {loss_sum}: check the sampled logprobs (a probability ratio overflowed) and the "
            "learning rate; no gradient was kept"
        )
    if backward:
        state.accumulate(gradients)
    metrics = {
        "loss:sum": loss_sum,
        "tokens:sum": float(sum(len(example.tokens) for example in examples)),
        "computed_tokens:sum": float(passed),
        "trained_tokens:sum": float(trained),
        **ratios.metrics(config),
    }
    return tinker.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", loss_fn_outputs=outputs, metrics=metrics)


def each_micro_batch(
    model: BaseModel,
    examples: Sequence[Example],
    run: Callable[[MicroBatch, bool], tuple[torch.Tensor, torch.Tensor]],
) -> Iterator[tuple[MicroBatch, tuple[torch.Tensor, torch.Tensor]]]:
    """Divide examples into micro-batches that fit the memory and `run(batch, recompute)` each.

    There are at least `least_micro_batches` of them, if there are as many examples. Whoever runs out of memory is tried again
    in halves, and a single example with its layers recomputed in the backward pass; `run` must leave nothing behind when it
    raises.
    """
    budget = ActivationBudget(model)
    waiting = divide(examples, range(len(examples)), budget.tokens, least_micro_batches())
    waiting.reverse()
    force = False
    while waiting:
        indices, groups = waiting.pop()
        if len(indices) > 1 and sum(group.tokens for group in groups) > budget.tokens:  # an earlier pass was too large
            waiting.extend(reversed(divide(examples, indices, budget.tokens, at_least=1)))
            continue
        batch = make_micro_batch(model, examples, indices, groups)
        try:
            result = run(batch, force or budget.must_recompute(batch.tokens))
        except Exception as error:
            if not out_of_memory(error):
                raise
            result = None
        if result is not None:
            yield batch, result
            continue
        budget.release()
        if len(indices) > 1:
            smaller = -(-batch.tokens // 2)
            logger.warning("out of memory with %d tokens in one pass; going on with at most %d", batch.tokens, smaller)
            budget.tokens = min(budget.tokens, smaller)
            waiting.extend(reversed(divide(examples, indices, budget.tokens, at_least=2)))
        elif not (force or budget.must_recompute(batch.tokens)):
            logger.warning("out of memory with one datum of %d tokens; recomputing layers from now on", batch.tokens)
            force = True
            waiting.append((indices, groups))
        else:
            raise RequestError(
                f"data[{indices[0]}] of {batch.tokens} tokens does not fit into memory, even with recomputation; "
                "shorten it, use a smaller model, or free memory (a smaller TINKER_LOCAL_KV_CACHE_TOKENS)"
            )


def least_micro_batches() -> int:
    """TINKER_LOCAL_GRAD_ACCUM_STEPS, or 1."""
    return env_int("TINKER_LOCAL_GRAD_ACCUM_STEPS", minimum=1) or 1


def divide(
    examples: Sequence[Example], indices: Sequence[int], token_budget: int, at_least: int
) -> list[tuple[list[int], list[PrefixGroup]]]:
    """Micro-batches as (indices of examples, groups over those), see packing.micro_batches."""
    parts = []
    for groups in micro_batches([examples[i].tokens for i in indices], token_budget, at_least):
        own = sorted(member for group in groups for member in group.members)
        place = {member: i for i, member in enumerate(own)}
        local = [PrefixGroup(tuple(place[m] for m in group.members), group.prefix, group.tokens) for group in groups]
        parts.append(([indices[member] for member in own], local))
    return parts


def make_micro_batch(
    model: BaseModel, examples: Sequence[Example], indices: list[int], groups: Sequence[PrefixGroup]
) -> MicroBatch:
    """Lay out these examples for one pass on the model's device."""
    chosen = [examples[i] for i in indices]
    packed = pack([example.tokens for example in chosen], groups)
    width = max(_width(example.inputs["target_tokens"]) for example in chosen)
    targets = [_widen(example.inputs["target_tokens"], width) for example in chosen]
    rows: list[npt.NDArray[np.int64]] = []
    kept: list[npt.NDArray[np.int64]] = []
    scored: list[npt.NDArray[np.int64]] = [np.zeros(0, dtype=np.int64)] * len(chosen)
    count = 0
    for group in groups:
        leader = group.members[0]
        for member in group.members:
            new = np.ones(len(targets[member]), dtype=bool)
            own = np.empty(len(new), dtype=np.int64)
            if member != leader:
                shared = min(group.prefix, len(new))
                new[:shared] = (targets[member][:shared] != targets[leader][:shared]).any(axis=1)
                own[:shared] = scored[leader][:shared]
            own[new] = count + np.arange(new.sum())
            count += int(new.sum())
            rows.append(packed.rows[member][new])
            kept.append(targets[member][new])
            scored[member] = own
    device = model.device
    inputs = {
        key: torch.from_numpy(np.concatenate([_widen(example.inputs[key], width) for example in chosen])).to(device)
        for key in chosen[0].inputs
        if key != "target_tokens"
    }
    sequence = np.repeat(np.arange(len(chosen)), [len(example.tokens) for example in chosen])
    inputs["sequence_index"] = torch.from_numpy(sequence)[:, None].to(device)
    return MicroBatch(
        indices=indices,
        packed=packed,
        tokens=len(packed.tokens),
        score_rows=torch.from_numpy(np.concatenate(rows)).to(device),
        score_targets=torch.from_numpy(np.concatenate(kept)).to(device),
        scored=torch.from_numpy(np.concatenate(scored)).to(device),
        inputs=inputs,
    )


def _width(array: npt.NDArray) -> int:
    return 1 if array.ndim == 1 else array.shape[1]


def _widen(array: npt.NDArray, width: int) -> npt.NDArray:
    """(N,) or (N, K) as (N, width): what is added has weight 0."""
    matrix = array if array.ndim == 2 else array[:, None]
    return np.pad(matrix, ((0, 0), (0, width - matrix.shape[1])))


def batch_logprobs(model: BaseModel, adapter: Adapter, batch: MicroBatch, temperature: float) -> torch.Tensor:
    """Logprobs (P, K) of all target tokens of a micro-batch, example after example."""
    tokens_T = torch.tensor(batch.packed.tokens, device=model.device)
    positions_T = torch.tensor(batch.packed.positions, device=model.device)
    hidden_TH = model.hidden_states(tokens_T, positions_T, PackedPlan(batch.packed.segments), adapter)
    scores_SK = target_logprobs(model, hidden_TH[batch.score_rows], batch.score_targets, adapter, temperature)
    return scores_SK[batch.scored]


def add_gradients(loss: torch.Tensor, adapter: Adapter, gradients: list[torch.Tensor]) -> None:
    """Differentiate by the adapter's matrices and add to `gradients`."""
    # A loss may be constant in the parameters (all weights zero): the gradient is zero, not an error.
    parts = torch.autograd.grad(loss, adapter.parameters(), allow_unused=True)
    for total, part in zip(gradients, parts, strict=True):
        if part is not None:
            total += part


def split_positions(values: torch.Tensor, batch: MicroBatch, examples: Sequence[Example]) -> Iterator[npt.NDArray]:
    """Per-position values (P, K) as one array per example, each of the shape of its targets."""
    array = values.cpu().numpy()
    start = 0
    for i in batch.indices:
        targets = examples[i].inputs["target_tokens"]
        end = start + len(targets)
        yield array[start:end, : _width(targets)].reshape(targets.shape).copy()
        start = end


def optim_step(state: TrainState, params: tinker.AdamParams) -> tinker.types.OptimStepResponse:
    """Apply the accumulated gradient sum and clear it. Metrics: the gradient norm before clipping."""
    if state.gradients is None:
        raise RequestError(
            "optim_step without gradients: submit forward_backward first (it accumulates until optim_step)"
        )
    check_adam_params(params)
    gradients, state.gradients = state.gradients, None
    grad_norm = state.optimizer.step(state.adapter.parameters(), gradients, params)
    return tinker.types.OptimStepResponse(metrics={"grad_norm": grad_norm})
