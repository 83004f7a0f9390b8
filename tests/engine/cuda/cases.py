"""Inputs for the operations of the CUDA path, and what they must give, computed row by row in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tests.engine.devices import here


@dataclass(frozen=True)
class Shape:
    """Of a model's attention."""

    heads: int = 8
    kv_heads: int = 2
    dim: int = 32
    page: int = 32
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False


@dataclass(frozen=True)
class PagedCase:
    """Rows of several lengths whose pages lie scattered over a pool; what no row may see is NaN."""

    shape: Shape
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    tables: torch.Tensor
    lengths: torch.Tensor

    @property
    def arguments(self) -> tuple:
        shape = self.shape
        tensors = (self.query, self.keys, self.values, self.tables, self.lengths)
        return (*tensors, shape.dim**-0.5, shape.window, shape.softcap, self.sinks)

    @property
    def sinks(self) -> torch.Tensor | None:
        """(H,), some of them larger than any score and some smaller."""
        if not self.shape.sinks:
            return None
        return torch.linspace(-4, 6, self.shape.heads, device=self.query.device).to(self.query.dtype)

    def of_rows(self, rows: Sequence[int]) -> PagedCase:
        index = torch.tensor(rows, device=self.query.device)
        return PagedCase(self.shape, self.query[index], self.keys, self.values, self.tables[index], self.lengths[index])

    def expected(self) -> torch.Tensor:
        """(R, H, D) in float64."""
        return torch.stack([self._row(r) for r in range(len(self.lengths))])

    def _row(self, r: int) -> torch.Tensor:
        shape, length = self.shape, int(self.lengths[r])
        first = max(0, length - shape.window) if shape.window else 0
        if length == 0:
            return torch.zeros(shape.heads, shape.dim, dtype=torch.float64, device=self.query.device)

        def tokens(pool: torch.Tensor) -> torch.Tensor:
            found = [pool[self.tables[r, t // shape.page], :, t % shape.page] for t in range(first, length)]
            return torch.stack(found).double().repeat_interleave(shape.heads // shape.kv_heads, dim=1)

        scores = torch.einsum("hd,thd->ht", self.query[r].double(), tokens(self.keys)) * shape.dim**-0.5
        if shape.softcap:
            scores = torch.tanh(scores / shape.softcap) * shape.softcap
        if self.sinks is not None:
            scores = torch.cat([scores, self.sinks.double()[:, None]], dim=1)
        return torch.einsum("ht,thd->hd", scores.softmax(-1)[:, : length - first], tokens(self.values))


def paged_case(shape: Shape, lengths: Sequence[int], dtype: torch.dtype, seed: int = 0) -> PagedCase:
    generator, device = torch.Generator().manual_seed(seed), here().device
    width = -(-max(lengths) // shape.page)
    pages = len(lengths) * width + 3
    size = (2, pages, shape.kv_heads, shape.page, shape.dim)
    pool = torch.randn(size, generator=generator)
    tables = torch.randperm(pages, generator=generator)[: len(lengths) * width].view(len(lengths), width)
    hidden = torch.ones(pages, shape.page, dtype=torch.bool)
    for row, length in enumerate(lengths):
        for token in range(max(0, length - shape.window) if shape.window else 0, length):
            hidden[tables[row, token // shape.page], token % shape.page] = False
    pool[:, hidden[:, None].expand(-1, shape.kv_heads, -1)] = torch.nan
    query = torch.randn(len(lengths), shape.heads, shape.dim, generator=generator)
    keys, values = pool.to(device, dtype).unbind()
    return PagedCase(
        shape, query.to(device, dtype), keys, values, tables.int().to(device), torch.tensor(lengths).int().to(device)
    )


@dataclass(frozen=True)
class LoraCase:
    """Rows of several adapters and of the base model (slot -1); what lies beyond a slot's rank is zero."""

    y: torch.Tensor
    x: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    slots: Sequence[int]
    scales: torch.Tensor
    ends: list[int]

    def expected(self) -> torch.Tensor:
        """(R, out) in float64."""
        result, rank = self.y.double(), self.b.shape[2]
        for row, slot in enumerate(self.slots):
            if slot < 0:
                continue
            inner = self.a[slot].double() @ self.x[row].double()
            for part, (start, end) in enumerate(zip([0, *self.ends], self.ends, strict=False)):
                delta = self.b[slot, start:end].double() @ inner[part * rank : (part + 1) * rank]
                result[row, start:end] += self.scales[slot].double() * delta
        return result


def lora_case(
    slots: Sequence[int],
    dtype: torch.dtype,
    features: tuple[int, int] = (300, 260),
    rank: int = 16,
    ends: Sequence[int] = (),
) -> LoraCase:
    """`ends`: where the parts of a fused linear end, except the last."""
    generator, device = torch.Generator().manual_seed(len(slots)), here().device
    count = max(slots) + 1

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    a = random(count, (len(ends) + 1) * rank, features[0]) / features[0] ** 0.5
    b = random(count, features[1], rank)
    a[0].unflatten(0, (-1, rank))[:, rank // 2 :], b[0, :, rank // 2 :] = 0.0, 0.0
    y, x = random(len(slots), features[1]), random(len(slots), features[0])
    y, x, a, b = (tensor.to(device, dtype) for tensor in (y, x, a, b))
    return LoraCase(y, x, a, b, slots, torch.linspace(0.5, 2.0, count, device=device), [*ends, features[1]])


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference as a share of the largest number."""
    return float((found.double() - expected.double()).abs().max() / expected.abs().max().clamp(min=1e-30))


BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""For results that are rounded to the dtype once or twice."""


@dataclass(frozen=True)
class HeadsCase:
    """The fused projection of queries, keys and values; rotary factors of all columns differ, so that halves cannot be
    mistaken.
    """

    qkv: torch.Tensor
    norm: torch.Tensor | None
    cos: torch.Tensor
    sin: torch.Tensor
    kv_heads: int
    eps: float = 1e-5

    @property
    def arguments(self) -> tuple:
        return self.qkv, self.norm, self.cos, self.sin, self.kv_heads, self.eps

    def expected(self) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Queries, keys and values (T, heads, D) in float64, and the product that they are functions of."""
        qkv, dim = self.qkv.double().requires_grad_(), self.cos.shape[1]
        cos, sin = self.cos.double()[:, None], self.sin.double()[:, None]
        heads = qkv.unflatten(1, (-1, dim))
        query, key, value = heads.split([heads.shape[1] - 2 * self.kv_heads, self.kv_heads, self.kv_heads], dim=1)
        turned = []
        for part, first in ((query, 0), (key, query.shape[1])):
            if self.norm is not None:
                part = part / (part.square().mean(-1, keepdim=True) + self.eps).sqrt()
                part = part * self.norm.double()[first : first + part.shape[1]]
            left, right = part.chunk(2, dim=-1)
            turned.append(part * cos + torch.cat((right, left), dim=-1) * sin)
        return [*turned, value], qkv


def heads_case(heads: int, kv_heads: int, dim: int, normed: bool, dtype: torch.dtype, tokens: int = 5) -> HeadsCase:
    generator, device = torch.Generator().manual_seed(heads + dim), here().device

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(device, dtype)

    norm = random(heads + kv_heads, dim) if normed else None
    return HeadsCase(
        random(tokens, (heads + 2 * kv_heads) * dim), norm, random(tokens, dim), random(tokens, dim), kv_heads
    )
