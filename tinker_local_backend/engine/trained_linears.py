"""The linears of the joined training pass: products with frozen weights, what an adapter adds to them, and their gradient.

An adapter's own products are small and many. Where a weight is small too, it is cheaper to add scale * B @ A to a copy of the
weight once in a pass: the forward pass and dL/dx are then one product each, and the gradients of A and B come from that of
the weight.

The weight of a norm in front of a linear is its part: the copy takes that in as well.
"""

from __future__ import annotations

from typing import Protocol

import torch

from tinker_local_backend.engine.joined_linear import JoinedLinear
from tinker_local_backend.engine.lora import Adapter
from tinker_local_backend.engine.products import chosen, linear

LARGEST_MERGED = 1 << 18
"""Elements of a weight up to which it is copied for a pass: it stays in the caches;"""

MERGED_SHARE = 2.5
"""and this takes at most so many times the multiplications of the adapter's own products, which are slower each."""

GradientsByName = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""path of a linear -> dL/d A and dL/d B"""


class TrainedLinear(Protocol):
    """A joined linear under an adapter, in one pass."""

    names: list[str]
    """of the parts that the adapter has matrices for"""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x (T, in), which lacks the norm's weight -> (T, out), and what the gradient needs beside x."""
        ...

    def backward(
        self,
        by_y: torch.Tensor,
        x: torch.Tensor,
        inner: torch.Tensor | None,
        gradients: GradientsByName,
        wants_x: bool = True,
    ) -> torch.Tensor:
        """dL/dx (without `wants_x`: something else); puts those of the matrices into `gradients`."""
        ...


def trained_linear(
    joined: JoinedLinear, adapter: Adapter, tokens: int, norm: torch.Tensor | None = None
) -> TrainedLinear:
    """By the cheaper of the two ways for a pass of so many tokens, which depends on sizes alone.

    norm: (in,), the weight of the norm in front; None: there is none.
    """
    size_out, size_in = joined.weight.shape
    ranks = [
        (len(adapter.a[name]), size) for name, size in zip(joined.names, joined.sizes, strict=True) if name in adapter.a
    ]
    apart = tokens * _PASSES * sum(rank * (size_in + size) for rank, size in ranks)
    merged = tokens * size_out * size_in + _PASSES * sum(rank * size * size_in for rank, size in ranks)
    is_small = joined.weight.numel() <= LARGEST_MERGED
    return (_Merged if is_small and merged <= MERGED_SHARE * apart else _Apart)(joined, adapter, tokens, norm)


_PASSES = 3
"""An adapter's products are those of the forward pass, of dL/dx, and of its own gradients. Merged, that is the product for the
weight's gradient, and without the tokens once the adapter into the weight, and twice the gradients out of the weight's."""


class _Parts:
    """The weight, and the adapter's matrices of each part that it has some for."""

    def __init__(self, joined: JoinedLinear, adapter: Adapter, tokens: int, norm: torch.Tensor | None):
        self._weight, self._bias, self._scale, self._norm = joined.weight, joined.bias, adapter.spec.scale, norm
        self._linear = chosen(tokens, joined.weight)
        self.names: list[str] = []
        self._columns: list[tuple[int, int]] = []
        """first and number of each one's outputs"""
        first = 0
        for name, size in zip(joined.names, joined.sizes, strict=True):
            if name in adapter.a:
                self.names.append(name)
                self._columns.append((first, size))
            first += size
        self._a = [adapter.a[name].detach() for name in self.names]
        self._b = [adapter.b[name].detach() for name in self.names]


class _Merged(_Parts):
    """With a copy of the weight to which the adapter is added."""

    def __init__(self, joined: JoinedLinear, adapter: Adapter, tokens: int, norm: torch.Tensor | None):
        super().__init__(joined, adapter, tokens, norm)
        self._merged = self._weight.clone()
        for (first, size), a, b in zip(self._columns, self._a, self._b, strict=True):
            self._merged.narrow(0, first, size).addmm_(b, a, alpha=self._scale)
        if norm is not None:
            self._merged.mul_(norm)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._linear(x, self._merged, self._bias), None

    def backward(
        self,
        by_y: torch.Tensor,
        x: torch.Tensor,
        inner: torch.Tensor | None,
        gradients: GradientsByName,
        wants_x: bool = True,
    ) -> torch.Tensor:
        size_out, size_in = self._weight.shape
        # The product is faster with the fewer rows.
        by_weight = self._linear(by_y.t(), x.t()) if size_out <= size_in else self._linear(x.t(), by_y.t()).t()
        by_weight.mul_(self._scale if self._norm is None else self._norm * self._scale)
        for name, (first, size), a, b in zip(self.names, self._columns, self._a, self._b, strict=True):
            own = by_weight.narrow(0, first, size)
            gradients[name] = b.t() @ own, own @ a.t()
        return self._linear(by_y, self._merged.t()) if wants_x else by_y


class _Apart(_Parts):
    """With the adapter's products beside that of the weight: scale * (x @ a.T) @ b.T."""

    def __init__(self, joined: JoinedLinear, adapter: Adapter, tokens: int, norm: torch.Tensor | None):
        super().__init__(joined, adapter, tokens, norm)
        self._ranks = [len(a) for a in self._a]
        self._joined_a = torch.cat(self._a) if len(self._a) > 1 else self._a[0] if self._a else None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        x = self._weighted(x)
        y = self._linear(x, self._weight, self._bias)
        if self._joined_a is None:
            return y, None
        inner = linear(x, self._joined_a).mul_(self._scale)
        for (first, size), part, b in zip(self._columns, inner.split(self._ranks, dim=1), self._b, strict=True):
            y.narrow(1, first, size).addmm_(part, b.t())
        return y, inner

    def _weighted(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._norm is None else x * self._norm

    def backward(
        self,
        by_y: torch.Tensor,
        x: torch.Tensor,
        inner: torch.Tensor | None,
        gradients: GradientsByName,
        wants_x: bool = True,
    ) -> torch.Tensor:
        by_x = self._linear(by_y, self._weight.t()) if wants_x else by_y
        if self._joined_a is not None and inner is not None:
            by_inner = self._adapter_gradient(by_y, x, inner, gradients)
            if wants_x:
                by_x.addmm_(by_inner, self._joined_a)
        return by_x.mul_(self._norm) if wants_x and self._norm is not None else by_x

    def _adapter_gradient(
        self, by_y: torch.Tensor, x: torch.Tensor, inner: torch.Tensor, gradients: GradientsByName
    ) -> torch.Tensor:
        """dL/d (x @ a.T) of all parts beside each other."""
        by_parts = [by_y.narrow(1, first, size) for first, size in self._columns]
        products = [by_part @ b for by_part, b in zip(by_parts, self._b, strict=True)]
        by_inner = (torch.cat(products, dim=1) if len(products) > 1 else products[0]).mul_(self._scale)
        by_a = linear(by_inner.t(), self._weighted(x).t()).split(self._ranks)
        for name, by_part, part, by_own in zip(
            self.names, by_parts, inner.split(self._ranks, dim=1), by_a, strict=True
        ):
            gradients[name] = by_own, by_part.t() @ part
        return by_inner
