"""AdamW over one adapter's matrices, with hyperparameters that come with each step and a state that can be saved.

The update is torch's (Loshchilov and Hutter 2019, decoupled weight decay); torch.optim.AdamW itself does the arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tinker
import torch

from tinker_local_backend.errors import NonFiniteError, RequestError

_STATE_KEYS = ("exp_avg", "exp_avg_sq", "step")


class AdamW:
    """Moments for a fixed list of parameters, in that order. The learning rate and the rest arrive with every step."""

    def __init__(self, parameters: list[torch.Tensor]):
        # One pass over memory for each matrix, not some ten.
        self._torch = torch.optim.AdamW(parameters, lr=0.0, fused=True)

    def step(self, parameters: list[torch.Tensor], gradients: list[torch.Tensor], params: tinker.AdamParams) -> float:
        """Update in place. Returns the global gradient norm before clipping. Raises NonFiniteError when that is not finite."""
        norm = float(global_norm(gradients))
        if not math.isfinite(norm):
            raise NonFiniteError("the accumulated gradient is not finite; it was discarded and no weight was changed")
        if 0 < params.grad_clip_norm < norm:
            for gradient in gradients:
                gradient *= params.grad_clip_norm / norm
        for group in self._torch.param_groups:
            group.update(
                lr=params.learning_rate,
                betas=(params.beta1, params.beta2),
                eps=params.eps,
                weight_decay=params.weight_decay,
            )
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        self._torch.step()
        self._torch.zero_grad(set_to_none=True)
        return norm

    @property
    def steps(self) -> int:
        """Optimizer steps taken so far."""
        return max((int(entry["step"]) for entry in self._torch.state.values()), default=0)

    def state_tensors(self, names: list[str]) -> dict[str, torch.Tensor]:
        """Moments and step counts for saving, as `<parameter name>.<exp_avg|exp_avg_sq|step>`. Empty before the first step."""
        state = self._torch.state_dict()["state"]
        return {
            f"{names[index]}.{key}": value.contiguous()
            for index, entry in state.items()
            for key, value in entry.items()
        }

    def load_state_tensors(self, names: list[str], tensors: dict[str, torch.Tensor]) -> None:
        """The reverse of `state_tensors`. Raises ValueError, with nothing changed, unless all or none have a whole state."""
        parameters = self._torch.param_groups[0]["params"]
        shapes = {
            f"{name}.{key}": () if key == "step" else tuple(parameter.shape)
            for name, parameter in zip(names, parameters, strict=True)
            for key in _STATE_KEYS
        }
        if tensors and (different := sorted(shapes.keys() ^ tensors.keys())):
            raise ValueError(f"optimizer state differs from the adapter's matrices in {different[:4]}")
        for name, tensor in tensors.items():
            if tuple(tensor.shape) != shapes[name]:
                raise ValueError(f"optimizer state {name} has shape {tuple(tensor.shape)}, expected {shapes[name]}")
        entries = {
            index: {key: tensors[f"{name}.{key}"] for key in _STATE_KEYS} for index, name in enumerate(names) if tensors
        }
        self._torch.load_state_dict({"state": entries, "param_groups": self._torch.state_dict()["param_groups"]})


def global_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Euclidean norm of all entries of all matrices, a float64 scalar on their device."""
    norms = torch._foreach_norm(list(gradients), 2, dtype=torch.float64)  # pyright: ignore[reportPrivateImportUsage]
    return torch.linalg.vector_norm(torch.stack(norms))


def check_adam_params(params: tinker.AdamParams) -> None:
    """Raise RequestError for a hyperparameter outside its range, before anything is changed."""
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
