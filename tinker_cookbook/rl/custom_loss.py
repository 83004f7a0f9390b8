"""Custom losses: functions of tensors, differentiated here and handed to either engine by `forward_backward_custom`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.own_parts import Kind, describe, parameter_problem
from tinker_cookbook.utils.lazy import tinker, torch

CustomLossFn: TypeAlias = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor", "torch.Tensor"], Any]
"""(logprobs, sampling_logprobs, advantages, mask) of one datum, float32 (N,) each -> scalar tensor, or (it, metrics).

Only `logprobs`, those of the model that trains, carry a gradient. `mask` is 1 where a token was sampled; elsewhere
sampling_logprobs and advantages are 0. The losses of a batch's datums are added up.
"""

LOSS_KIND = Kind(
    key="loss_fn",
    wanted="def loss(logprobs, sampling_logprobs, advantages, mask) -> scalar tensor, of one datum, float32 (N,) each; it may "
    "also return (loss, metrics)",
    example='''
def loss(logprobs, sampling_logprobs, advantages, mask):
    """Importance sampling with ratios of at most 2."""
    ratio = (logprobs - sampling_logprobs).exp().clamp(max=2.0)
    return -(ratio * advantages * mask).sum()
''',
    problem=partial(parameter_problem, names=("logprobs", "sampling_logprobs", "advantages", "mask")),
)


def sum_over_datums(loss: CustomLossFn) -> Callable[[list[tinker.Datum], list[torch.Tensor]], Any]:
    """What `forward_backward_custom` takes: the losses of the datums added up, and as `<metric>:mean` each metric's mean
    over them.

    Raises (when it is called) DataValidationError for a loss that is no scalar.
    """

    def total(data_D: list[tinker.Datum], logprobs_D: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        losses: list[torch.Tensor] = []
        sums: dict[str, float] = {}
        for datum, logprobs in zip(data_D, logprobs_D, strict=True):
            given = (datum.loss_fn_inputs[key].to_torch() for key in ("logprobs", "advantages", "mask"))
            returned = loss(logprobs, *(values.to(logprobs) for values in given))
            value, metrics = returned if isinstance(returned, tuple) else (returned, {})
            if not isinstance(value, torch.Tensor) or value.shape != ():
                raise DataValidationError(
                    f"loss_fn {describe(loss)} returned {type(value).__name__} of shape "
                    f"{tuple(getattr(value, 'shape', ()))}; a loss is a scalar tensor: sum it"
                )
            losses.append(value)
            for key, number in metrics.items():
                plain = float(number.detach() if isinstance(number, torch.Tensor) else number)
                sums[key] = sums.get(key, 0.0) + plain
        return torch.stack(losses).sum(), {f"{key}:mean": number / len(losses) for key, number in sums.items()}

    return total
