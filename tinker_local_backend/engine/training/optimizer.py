"""AdamW over one adapter's matrices, with hyperparameters per step and state that can be saved.

The update is torch's (Loshchilov and Hutter 2019, decoupled weight decay): the kernel of torch.optim.AdamW(fused=True),
without its Python overhead per matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tinker
import torch

from tinker_local_backend.errors import NonFiniteError, RequestError

_MOMENTS = ("exp_avg", "exp_avg_sq")

MAX_JOINED = 1 << 18
"""Most elements of all gradients that are concatenated for their norm on a CPU: for small ones, overhead per matrix exceeds the
computation."""


class AdamW:
    """Moments of a fixed list of parameters, in that order. Every step gets the learning rate and other hyperparameters."""

    def __init__(self, parameters: list[torch.Tensor]):
        self._parameters = parameters
        self._moments: dict[str, list[torch.Tensor]] = {}
        """keys are `_MOMENTS`; one tensor per parameter; empty before the first step"""
        self._steps = torch.zeros((), device=parameters[0].device)
        """steps taken so far, the same for all parameters; float32, as the kernel needs"""

    def step(self, gradients: list[torch.Tensor], params: tinker.AdamParams, norm: float | None = None) -> float:
        """Update the parameters in place. Returns the global gradient norm before clipping (`norm` if given).

        Raises NonFiniteError if it is not finite.
        """
        norm = global_norm(gradients) if norm is None else norm
        if not math.isfinite(norm):
            raise NonFiniteError("the accumulated gradient is not finite; it was discarded and no weight was changed")
        if 0 < params.grad_clip_norm < norm:
            torch._foreach_mul_(gradients, params.grad_clip_norm / norm)  # pyright: ignore[reportPrivateImportUsage]
        if not self._moments:
            self._moments = {
                key: [torch.zeros_like(parameter, requires_grad=False) for parameter in self._parameters]
                for key in _MOMENTS
            }
        with torch.no_grad():
            self._steps += 1
            # One pass over memory per matrix instead of about ten.
            torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
                self._parameters,
                gradients,
                self._moments["exp_avg"],
                self._moments["exp_avg_sq"],
                [],
                [self._steps] * len(self._parameters),
                lr=params.learning_rate,
                beta1=params.beta1,
                beta2=params.beta2,
                weight_decay=params.weight_decay,
                eps=params.eps,
                amsgrad=False,
                maximize=False,
            )
        return norm

    @property
    def steps(self) -> int:
        """Optimizer steps taken so far."""
        return int(self._steps)

    def state_tensors(self, names: list[str]) -> dict[str, torch.Tensor]:
        """Moments and step counts for saving, as `<parameter name>.<exp_avg|exp_avg_sq|step>`. Empty before the first step."""
        if not self._moments:
            return {}
        state = self._moments | {"step": [self._steps.clone() for _ in names]}
        return {
            f"{name}.{key}": values[index].contiguous()
            for index, name in enumerate(names)
            for key, values in state.items()
        }

    def load_state_tensors(self, names: list[str], tensors: dict[str, torch.Tensor]) -> None:
        """The inverse of `state_tensors`. Raises ValueError, and changes nothing, unless the state is complete or empty."""
        shapes = {
            f"{name}.{key}": () if key == "step" else tuple(parameter.shape)
            for name, parameter in zip(names, self._parameters, strict=True)
            for key in (*_MOMENTS, "step")
        }
        if tensors and (different := sorted(shapes.keys() ^ tensors.keys())):
            raise ValueError(f"optimizer state does not match the adapter's matrices: {different[:4]}")
        for name, tensor in tensors.items():
            if tuple(tensor.shape) != shapes[name]:
                raise ValueError(f"optimizer state {name} has shape {tuple(tensor.shape)}, expected {shapes[name]}")
        steps = {float(tensors[f"{name}.step"]) for name in names} if tensors else {0.0}
        if len(steps) > 1:
            raise ValueError(f"optimizer state counts {sorted(steps)} steps; all matrices take each step together")
        self._steps.fill_(steps.pop())
        self._moments = {
            key: [
                tensors[f"{name}.{key}"].to(parameter.device, torch.float32, copy=True)
                for name, parameter in zip(names, self._parameters, strict=True)
            ]
            for key in (_MOMENTS if tensors else ())
        }


def global_norm(gradients: Sequence[torch.Tensor]) -> float:
    """Euclidean norm of all entries of all matrices, read from the device once.

    Finite if all gradients are: squares of float32 never overflow in float64.
    """
    if gradients[0].device.type == "cpu" and sum(gradient.numel() for gradient in gradients) <= MAX_JOINED:
        joined = torch.cat([gradient.flatten() for gradient in gradients])
        return float(torch.linalg.vector_norm(joined, dtype=torch.float64))
    norms = torch._foreach_norm(list(gradients), 2, dtype=torch.float64)  # pyright: ignore[reportPrivateImportUsage]
    return float(torch.linalg.vector_norm(torch.stack(norms)))


def check_adam_params(params: tinker.AdamParams) -> None:
    """Raise RequestError for a hyperparameter outside its range."""
    for name in ("learning_rate", "eps", "weight_decay", "grad_clip_norm"):
        value = getattr(params, name)
        if not (math.isfinite(value) and value >= 0):
            raise RequestError(f"adam_params.{name} must be a finite number >= 0, got {value}")
    if params.eps == 0:
        raise RequestError("adam_params.eps must be above 0: a matrix whose gradient is still zero would become NaN")
    for name in ("beta1", "beta2"):
        value = getattr(params, name)
        if not 0 <= value < 1:
            raise RequestError(f"adam_params.{name} must be in [0, 1), got {value}")
