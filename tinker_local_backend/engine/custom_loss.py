"""forward_backward_custom: any differentiable function of the logprobs as a loss.

The function C gets the logprobs and is differentiated on its own; its gradient dC/dlp then goes through the model as a
cross-entropy with weights -dC/dlp, whose gradient is that of C. This is what the SDK does across the network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tinker
import torch

from tinker_local_backend.engine import trainer
from tinker_local_backend.engine.base_model import BaseModel
from tinker_local_backend.errors import RequestError

CustomLossFn = Callable[[list[tinker.Datum], list[torch.Tensor]], tuple[torch.Tensor, dict[str, float]]]
"""(data, logprobs of each datum's targets, float32) -> (scalar loss, metrics)."""


def forward_backward_custom(
    model: BaseModel, state: trainer.TrainState, data: Sequence[tinker.Datum], loss_fn: CustomLossFn
) -> tinker.ForwardBackwardOutput:
    """Metrics: those of the function, loss:sum (its value) and surrogate_loss:sum (that of the linear stand-in).

    Raises:
        RequestError: a datum is not as it must be, or the function's result is no scalar that depends on every logprob array.
    """
    datums = list(data)
    scored = trainer.forward_backward(
        model, state, [_linear(datum, i, None) for i, datum in enumerate(datums)], "cross_entropy", None, backward=False
    )
    logprobs = [outputs["logprobs"].to_torch().clone().requires_grad_() for outputs in scored.loss_fn_outputs]
    with torch.enable_grad():
        loss, metrics = loss_fn(datums, logprobs)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise RequestError(
                f"the custom loss must return (scalar tensor that depends on the logprobs, metrics), got {loss!r}"
            )
        loss.backward()
    weighted = []
    for i, (datum, array) in enumerate(zip(datums, logprobs, strict=True)):
        if array.grad is None:
            raise RequestError(f"the custom loss does not depend on the logprobs of data[{i}]; leave that datum out")
        weighted.append(_linear(datum, i, -array.grad))
    output = trainer.forward_backward(model, state, weighted, "cross_entropy", None, backward=True)
    output.metrics["surrogate_loss:sum"] = output.metrics.pop("loss:sum")
    output.metrics.update(metrics)
    output.metrics["loss:sum"] = float(loss.detach())
    return output


def _linear(datum: tinker.Datum, index: int, weights: torch.Tensor | None) -> tinker.Datum:
    """The datum with its target tokens and these weights (None: zeros) as its only loss inputs."""
    targets = datum.loss_fn_inputs.get("target_tokens")
    if targets is None:
        raise RequestError(
            f"data[{index}].loss_fn_inputs lacks ['target_tokens']; a custom loss is a function of their logprobs"
        )
    values = np.zeros(targets.to_numpy().shape, dtype=np.float32) if weights is None else weights.numpy()
    inputs = {"target_tokens": targets, "weights": tinker.TensorData.from_numpy(values)}
    return tinker.Datum(model_input=datum.model_input, loss_fn_inputs=inputs)
