"""Forward and backward passes over datums, and the optimizer step, for one adapter at a time.

Gradients of a call are gathered aside and added to the adapter only when the whole call has succeeded: a call that fails
leaves no trace. Losses are sums, so any split into micro-batches gives the same loss and gradient up to rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tinker
import torch

from tinker_local_backend.engine.attention import PackedPlan
from tinker_local_backend.engine.base_model import BaseModel
from tinker_local_backend.engine.datums import Example, check_datum, loss_function, micro_batches
from tinker_local_backend.engine.lora import Adapter
from tinker_local_backend.engine.losses import RatioStats
from tinker_local_backend.engine.optimizer import AdamW, check_adam_params
from tinker_local_backend.engine.scoring import target_logprobs
from tinker_local_backend.errors import RequestError

MICRO_BATCH_TOKENS = 8192


@dataclass(eq=False)
class TrainState:
    """What one training client owns: its adapter, its optimizer's moments, and the gradient accumulated so far."""

    adapter: Adapter
    optimizer: AdamW
    gradients: list[torch.Tensor] | None = None


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
    parameters = state.adapter.parameters()
    gradients = [torch.zeros_like(parameter) for parameter in parameters]
    outputs: list[dict[str, tinker.TensorData]] = [{} for _ in examples]
    loss_sum, tokens, trained = 0.0, 0, 0
    ratios = RatioStats()

    for pack in micro_batches(examples, MICRO_BATCH_TOKENS):
        with torch.set_grad_enabled(backward):
            logprobs, inputs = _pack_logprobs(model, state.adapter, [examples[i] for i in pack], temperature)
            elementwise = loss.compute(logprobs, inputs, config)
            pack_loss = elementwise.sum()
        if backward:
            # A loss may be constant in the parameters (all weights zero): the gradient is zero, not an error.
            for total, part in zip(
                gradients, torch.autograd.grad(pack_loss, parameters, allow_unused=True), strict=True
            ):
                if part is not None:
                    total += part
        with torch.no_grad():
            loss_sum += float(elementwise.double().sum())
            tokens += sum(len(examples[i].tokens) for i in pack)
            signal = inputs["advantages"] if loss.is_policy_loss else inputs["weights"]
            trained += int((signal != 0).sum())
            if loss.is_policy_loss:
                ratios.add(logprobs, inputs, config)
        detached = logprobs.detach().cpu()
        start = 0
        for i in pack:
            array = examples[i].inputs["target_tokens"]
            end = start + len(array)
            rows = detached[start:end, : 1 if array.ndim == 1 else array.shape[1]]
            outputs[i] = {"logprobs": tinker.TensorData.from_numpy(rows.reshape(array.shape).numpy().copy())}
            start = end

    if not np.isfinite(loss_sum):
        raise RequestError(
            f"the loss of this call is {loss_sum}: check the sampled logprobs (a probability ratio overflowed) and the "
            "learning rate; no gradient was kept"
        )
    if backward:
        if state.gradients is None:
            state.gradients = gradients
        else:
            for total, part in zip(state.gradients, gradients, strict=True):
                total += part
    metrics = {
        "loss:sum": loss_sum,
        "tokens:sum": float(tokens),
        "trained_tokens:sum": float(trained),
        **ratios.metrics(config),
    }
    return tinker.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord",
        loss_fn_outputs=outputs,
        metrics=metrics,
    )


def _pack_logprobs(
    model: BaseModel, adapter: Adapter, examples: Sequence[Example], temperature: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logprobs (T, K) of all target tokens of a pack, and the pack's other loss inputs in the same shape.

    Examples with one target per position become K = 1; narrower ones are padded with weight 0 up to the pack's widest.
    """
    device = model.device
    tokens_T = torch.tensor([token for example in examples for token in example.tokens], device=device)
    positions_T = torch.cat([torch.arange(len(example.tokens)) for example in examples]).to(device)
    bounds = [0, *np.cumsum([len(example.tokens) for example in examples]).tolist()]
    hidden_TH = model.hidden_states(tokens_T, positions_T, PackedPlan(bounds), adapter)
    inputs = {key: _stack([example.inputs[key] for example in examples], device) for key in examples[0].inputs}
    logprobs_TK = target_logprobs(model, hidden_TH, inputs["target_tokens"], adapter, temperature)
    return logprobs_TK, {key: value for key, value in inputs.items() if key != "target_tokens"}


def _stack(arrays: list[np.ndarray], device: torch.device) -> torch.Tensor:
    matrices = [array if array.ndim == 2 else array[:, None] for array in arrays]
    width = max(matrix.shape[1] for matrix in matrices)
    padded = [np.pad(matrix, ((0, 0), (0, width - matrix.shape[1]))) for matrix in matrices]
    return torch.from_numpy(np.concatenate(padded)).to(device)


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
