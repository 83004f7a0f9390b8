"""The head, which turns hidden states into logits, for code that does not call the module."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tinker_local_backend.engine.model.lora import Adapter


@dataclass(frozen=True)
class HeadWeights:
    """logits = soft_cap(multiplier * (hidden @ weight.T + bias + scale * (hidden @ a.T) @ b.T)).

    a (rank, H) and b (V, rank) are float32.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    multiplier: float = 1.0
    softcap: float | None = None
    a: torch.Tensor | None = None
    b: torch.Tensor | None = None
    scale: float = 1.0

    @classmethod
    def of(cls, head: nn.Module, config: Any) -> HeadWeights:
        """The weights of a model's head, without an adapter."""
        weight, bias = head.weight, getattr(head, "bias", None)
        assert isinstance(weight, torch.Tensor)
        # Cohere multiplies its logits, Granite divides them.
        multiplier = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
        return cls(weight, bias, multiplier, getattr(config, "final_logit_softcapping", None))

    def under(self, adapter: Adapter, name: str) -> HeadWeights:
        """Add the adapter's matrices for the head of this name, if it has any."""
        if name not in adapter.a:
            return self
        return replace(self, a=adapter.a[name].detach(), b=adapter.b[name].detach(), scale=adapter.spec.scale)

    def finish_(self, logits: torch.Tensor) -> torch.Tensor | None:
        """Turn products with the weights into logits in place: bias, multiplier, soft cap.

        Returns the derivative of the soft cap by its input, of the same shape; None without one.
        """
        if self.bias is not None:
            logits += self.bias
        if self.multiplier != 1.0:
            logits.mul_(self.multiplier)
        if self.softcap is None:
            return None
        logits.div_(self.softcap).tanh_()
        slope = 1 - logits.square()
        logits.mul_(self.softcap)
        return slope
