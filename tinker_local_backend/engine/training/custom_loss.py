"""forward_backward_custom: any differentiable function of the logprobs as a loss.

The function C gets the logprobs and is differentiated separately; its gradient dC/dlp is then backpropagated through the model.
If all datums fit into one pass, it is the pass that computed the logprobs. Otherwise a second pass computes a cross-entropy with
weights -dC/dlp, which has the gradient of C; the SDK does the same over the network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import tinker
import torch

from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.model.head import Scorer
from tinker_local_backend.engine.model.memory import out_of_memory
from tinker_local_backend.engine.training import trainer
from tinker_local_backend.engine.training.accumulation import NAMED_DATUMS
from tinker_local_backend.engine.training.activations import ActivationBudget
from tinker_local_backend.engine.training.datums import Example, LossConfig, check_datum
from tinker_local_backend.engine.training.losses import LOSSES
from tinker_local_backend.engine.training.micro_batch import (
    MicroBatch,
    divide,
    make_micro_batch,
    min_micro_batches,
    split_positions,
    widen,
)
from tinker_local_backend.engine.training.trainer import Parts
from tinker_local_backend.errors import NonFiniteError, RequestError

CustomLossFn = Callable[[list[tinker.Datum], list[torch.Tensor]], tuple[torch.Tensor, dict[str, float]]]
"""(data, logprobs of each datum's targets, float32) -> (scalar loss, metrics)."""


def forward_backward_custom(
    model: BaseModel, state: trainer.TrainState, data: Sequence[tinker.Datum], loss_fn: CustomLossFn
) -> Parts[tinker.ForwardBackwardOutput]:
    """Logprobs and gradients with a custom loss, in parts: one per micro-batch.

    Metrics: the function's, loss:sum (its value) and surrogate_loss:sum (the value of the linear surrogate).

    Raises:
        RequestError: a datum is invalid, or the function's result is not a scalar that depends on every logprob array.
    """
    datums = list(data)
    if not datums:
        raise RequestError("data is empty; give at least one datum")
    plain = [_linear(datum, i, None) for i, datum in enumerate(datums)]
    examples = [check_datum(d, i, "cross_entropy", LOSSES["cross_entropy"], model) for i, d in enumerate(plain)]
    budget = ActivationBudget(model)
    batches = divide(examples, range(len(examples)), budget.tokens, min_micro_batches())
    if len(batches) == 1:
        batch = make_micro_batch(model, examples, *batches[0])
        try:
            return _one_pass(model, state, datums, examples, batch, budget, loss_fn)
        except Exception as error:
            if not out_of_memory(error):
                raise
        budget.release()
    return (yield from two_passes(datums, loss_fn, partial(trainer.forward_backward, model, state)))


def _one_pass(
    model: BaseModel,
    state: trainer.TrainState,
    datums: list[tinker.Datum],
    examples: Sequence[Example],
    batch: MicroBatch,
    budget: ActivationBudget,
    loss_fn: CustomLossFn,
) -> tinker.ForwardBackwardOutput:
    gradients: list[torch.Tensor] = []
    recompute = budget.must_recompute(batch.tokens)
    with torch.no_grad(), model.routed(state.adapter), model.recompute(recompute):
        hidden, backward = trainer.batch_pass(model, state.adapter, batch)
        scorer = Scorer(model.head_weights(state.adapter))
        logprobs = batch.of_positions(scorer.logprobs(hidden, batch.score_targets))
        arrays = list(split_positions(logprobs.cpu().numpy(), batch, examples))
        loss, metrics, slopes = _differentiate(datums, arrays, loss_fn)
        weights = torch.from_numpy(np.concatenate([widen(slope, logprobs.shape[1]) for slope in slopes])).to(logprobs)
        surrogate = float((weights * logprobs).sum())
        gradient = scorer.gradient(hidden, batch.score_targets, batch.of_scores(weights))
        trainer.backpropagate(model, backward, gradient, state.adapter, gradients)
    output = tinker.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord",
        loss_fn_outputs=[{"logprobs": tinker.TensorData.from_numpy(array)} for array in arrays],
        metrics={
            "tokens:sum": float(sum(len(example.tokens) for example in examples)),
            "computed_tokens:sum": float(batch.tokens),
            "trained_tokens:sum": float(sum(int((slope != 0).sum()) for slope in slopes)),
            "surrogate_loss:sum": surrogate,
            **metrics,
            "loss:sum": loss,
        },
    )
    state.accumulate(gradients)  # last, so that a failed call adds nothing
    return output


def two_passes(
    data: Sequence[tinker.Datum],
    loss_fn: CustomLossFn,
    forward_backward: Callable[[list[tinker.Datum], str, LossConfig, bool], Parts[tinker.ForwardBackwardOutput]],
) -> Parts[tinker.ForwardBackwardOutput]:
    """Like `forward_backward_custom`, with two calls of `forward_backward(data, loss_fn, config, backward)`."""
    datums = list(data)
    plain = [_linear(datum, i, None) for i, datum in enumerate(datums)]
    scored = yield from forward_backward(plain, "cross_entropy", None, False)
    arrays = [outputs["logprobs"].to_numpy() for outputs in scored.loss_fn_outputs]
    loss, metrics, slopes = _differentiate(datums, arrays, loss_fn)
    weighted = [_linear(datum, i, -slope) for i, (datum, slope) in enumerate(zip(datums, slopes, strict=True))]
    yield
    output = yield from forward_backward(weighted, "cross_entropy", None, True)
    output.metrics["surrogate_loss:sum"] = output.metrics.pop("loss:sum")
    output.metrics.update(metrics)
    output.metrics["loss:sum"] = loss
    return output


def _differentiate(
    datums: list[tinker.Datum], arrays: Sequence[np.ndarray], loss_fn: CustomLossFn
) -> tuple[float, dict[str, float], list[np.ndarray]]:
    """The value of the function, its metrics, and dC/dlp for each datum."""
    logprobs = [torch.from_numpy(array).clone().requires_grad_() for array in arrays]
    with torch.enable_grad():
        loss, metrics = _checked(loss_fn(datums, logprobs))
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise RequestError(
                f"the custom loss must return (scalar tensor that depends on the logprobs, metrics), got {loss!r}"
            )
        loss.backward()
    slopes, broken = [], []
    for i, array in enumerate(logprobs):
        if array.grad is None:
            raise RequestError(f"the custom loss does not depend on the logprobs of data[{i}]; leave that datum out")
        if not bool(array.grad.isfinite().all()):
            broken.append(i)
        slopes.append(array.grad.numpy())
    if broken:
        named = ", ".join(f"data[{i}]" for i in broken[:NAMED_DATUMS])
        raise NonFiniteError(f"the custom loss has a gradient with NaN or infinity at the logprobs of {named}", broken)
    return float(loss.detach()), metrics, slopes


def _checked(result: object) -> tuple[object, dict[str, float]]:
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
        raise RequestError(f"the custom loss must return (scalar tensor, metrics as a dict), got {result!r}")
    metrics = {}
    for key, value in result[1].items():
        try:
            metrics[str(key)] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise RequestError(f"the custom loss's metric {key!r} must be a number, got {value!r}") from None
    return result[0], metrics


def _linear(datum: tinker.Datum, index: int, weights: np.ndarray | None) -> tinker.Datum:
    """The datum with its target tokens and these weights (None: zeros) as its only loss inputs."""
    targets = datum.loss_fn_inputs.get("target_tokens")
    if targets is None:
        raise RequestError(
            f"data[{index}].loss_fn_inputs lacks ['target_tokens']; a custom loss is a function of their logprobs"
        )
    values = np.zeros(targets.to_numpy().shape, dtype=np.float32) if weights is None else weights
    inputs = {"target_tokens": targets, "weights": tinker.TensorData.from_numpy(values)}
    return tinker.Datum(model_input=datum.model_input, loss_fn_inputs=inputs)
