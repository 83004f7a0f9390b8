"""The head: hidden states to logits, to logprobs of given tokens, and back to gradients, through one buffer of logits.

The (tokens x vocabulary) matrix is never materialised: one reused buffer holds the logits of a chunk of positions, which become
probabilities in place and then, if needed, the gradient of the logits. Autograd would save or recompute several such matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from tinker_local_backend.engine.model.lora import Adapter
from tinker_local_backend.engine.model.memory import cuda_memory
from tinker_local_backend.engine.model.products import float32_product, for_onednn, linear

CHUNK_ELEMENTS = 1 << 24
"""Logits in memory at a time on a CPU: 64 MB in float32."""

CHUNK_ELEMENTS_CUDA = 1 << 27
"""The same on a large GPU, 512 MiB: a pass of 16k tokens and 152k ids has 19 chunks, not 149."""

CHUNK_SHARE = 64
"""Logits may take 1 / CHUNK_SHARE of a GPU's memory."""

BYTES_OF_LOGIT = 10
"""Bytes per logit of a chunk: the buffer, a second one if some rows have no slope, and a copy in 16 bits."""

LOG2_E = math.log2(math.e)

SlopeFn = Callable[[int, int, torch.Tensor], torch.Tensor]
"""(start, end, logprobs (end - start, K)) -> dL/d logprobs of those rows."""


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
        # Cohere multiplies its logits, Granite and Inkling divide them.
        divisors = (getattr(config, name, None) or 1.0 for name in ("logits_scaling", "logits_mup_width_multiplier"))
        multiplier = (getattr(config, "logit_scale", None) or 1.0) / math.prod(divisors)
        return cls(weight, bias, multiplier, getattr(config, "final_logit_softcapping", None))

    def with_adapter(self, adapter: Adapter, name: str) -> HeadWeights:
        """Add the adapter's matrices for the head of this name, if it has any."""
        if name not in adapter.a:
            return self
        return replace(self, a=adapter.a[name].detach(), b=adapter.b[name].detach(), scale=adapter.spec.scale)

    def finish_(
        self, logits: torch.Tensor, temperature: float = 1.0, inner: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Turn hidden @ weight.T into logits / temperature, in place: adapter, bias, multiplier, soft cap.

        `inner`: hidden @ a.T (N, rank) float32, of a head with an adapter. Constant factors are folded into an operation that
        passes over the logits anyway.

        Returns the derivative of the soft cap by its input, of the same shape; None without a soft cap.
        """
        factor = self.multiplier / (temperature if self.softcap is None else self.softcap)
        if inner is not None and self.b is not None:
            beta = factor if self.bias is None else 1.0
            logits.addmm_(inner, self.b.t(), beta=beta, alpha=self.scale * beta)
            factor /= beta
        if self.bias is not None:
            logits += self.bias
        if factor != 1.0:
            logits.mul_(factor)
        if self.softcap is None:
            return None
        logits.tanh_()
        slope = 1 - logits.square()
        logits.mul_(self.softcap / temperature)
        return slope

    @property
    def chunk_rows(self) -> int:
        """Positions whose logits are in memory at a time."""
        device = self.weight.device
        elements = chunk_elements(cuda_memory(device)) if device.type == "cuda" else CHUNK_ELEMENTS
        return max(1, elements // len(self.weight))


def chunk_elements(card: int) -> int:
    """Logits in memory at a time, on a GPU with `card` bytes."""
    return min(CHUNK_ELEMENTS_CUDA, card // CHUNK_SHARE // BYTES_OF_LOGIT)


@dataclass
class ScoreGradient:
    """Gradients of the hidden states (S, H), and of the adapter's A and B at the head (empty if it has none)."""

    hidden: torch.Tensor
    head: list[torch.Tensor]
    is_zero: bool = True
    """no row has a slope"""


@dataclass(frozen=True, eq=False)
class SlopedRows:
    """The rows whose slope may be non-zero, in order, if the host knows them before scoring.

    This avoids a synchronisation with the GPU per chunk. Slopes of these rows may still be 0.
    """

    rows: npt.NDArray[np.int64]
    on_device: torch.Tensor

    def within(self, start: int, end: int) -> torch.Tensor:
        """The rows in start, ..., end - 1, relative to `start`."""
        first, last = np.searchsorted(self.rows, (start, end)).tolist()
        return self.on_device[first:last] - start


class Scorer:
    """Scores target ids under softmax(logits / temperature) of a head and its adapter.

    Every method takes hidden (S, H) and targets (S, K) int64; logprobs are (S, K) float32. Autograd records nothing.
    """

    def __init__(self, head: HeadWeights, temperature: float = 1.0):
        self._head = head
        self._rows = head.chunk_rows
        self._temperature = temperature
        self._buffer: torch.Tensor | None = None
        self._second: torch.Tensor | None = None

    @torch.no_grad()
    def logprobs(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Logprobs only."""
        return torch.cat([self._score(hidden[s:e], targets[s:e])[0] for s, e in self._chunks(len(hidden))])

    @torch.no_grad()
    def logprobs_and_entropies(self, hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprobs, and the entropy of each row's whole distribution in nats, float32 (S, 1)."""
        logprobs: list[torch.Tensor] = []
        entropies: list[torch.Tensor] = []
        for start, end in self._chunks(len(hidden)):
            chunk, total, _ = self._score(hidden[start:end], targets[start:end])
            weights = self._logits(end - start, hidden.device)  # exp(logit - largest), whose sum is `total`
            logprobs.append(chunk)
            entropies.append(total.log() + torch.special.entr(weights).sum(dim=-1, keepdim=True) / total)
        return torch.cat(logprobs), torch.cat(entropies)

    @torch.no_grad()
    def logprobs_and_gradient(
        self, hidden: torch.Tensor, targets: torch.Tensor, slope_fn: SlopeFn, sloped: SlopedRows | None = None
    ) -> tuple[torch.Tensor, ScoreGradient]:
        """Both in one pass, for a loss whose slope at a row depends on that row alone.

        Without `sloped` the slopes are searched for non-zero rows, which on a GPU synchronises for every chunk.
        """
        logprobs, gradient = [], self._zeros(hidden)
        for start, end in self._chunks(len(hidden)):
            chunk, total, cap_slope = self._score(hidden[start:end], targets[start:end])
            logprobs.append(chunk)
            slopes = slope_fn(start, end, chunk)
            index = _rows_with_slope(slopes) if sloped is None else sloped.within(start, end)
            gradient.is_zero &= not len(index)
            if len(index) == end - start:
                gradient.hidden[start:end] = self._backward(
                    hidden[start:end], targets[start:end], slopes, total, cap_slope, gradient.head
                )
            elif len(index):  # rows without a slope, such as prompts, cost no matrix product
                rows = start + index
                cap_slope = None if cap_slope is None else cap_slope[index]
                gradient.hidden[rows] = self._backward(
                    hidden[rows], targets[rows], slopes[index], total[index], cap_slope, gradient.head, rows=index
                )
        return torch.cat(logprobs), gradient

    @torch.no_grad()
    def gradient(
        self, hidden: torch.Tensor, targets: torch.Tensor, slopes: torch.Tensor, sloped: SlopedRows | None = None
    ) -> ScoreGradient:
        """The gradient for known dL/d logprobs (S, K). Recomputes the scores of the rows with a slope."""
        gradient = self._zeros(hidden)
        for index in (_rows_with_slope(slopes) if sloped is None else sloped.on_device).split(self._rows):
            if len(index):
                gradient.is_zero = False
                chunk, chunk_targets = hidden[index], targets[index]
                _, total, cap_slope = self._score(chunk, chunk_targets)
                gradient.hidden[index] = self._backward(
                    chunk, chunk_targets, slopes[index], total, cap_slope, gradient.head
                )
        return gradient

    def _chunks(self, count: int) -> list[tuple[int, int]]:
        return [(start, min(start + self._rows, count)) for start in range(0, count, self._rows)]

    def _zeros(self, hidden: torch.Tensor) -> ScoreGradient:
        head = self._head
        return ScoreGradient(torch.zeros_like(hidden), [torch.zeros_like(m) for m in (head.a, head.b) if m is not None])

    def _logits(self, rows: int, device: torch.device) -> torch.Tensor:
        if self._buffer is None or len(self._buffer) < rows:
            self._buffer = torch.empty(rows, len(self._head.weight), dtype=torch.float32, device=device)
        return self._buffer[:rows]

    def _picked(self, rows: torch.Tensor) -> torch.Tensor:
        """Copy these rows of the buffer to a second reused one."""
        assert self._buffer is not None
        if self._second is None or len(self._second) < len(self._buffer):
            self._second = torch.empty_like(self._buffer)
        return torch.index_select(self._buffer, 0, rows, out=self._second[: len(rows)])

    def _products(self, hidden: torch.Tensor) -> torch.Tensor:
        """Write hidden @ weight.T to the buffer."""
        if for_onednn(hidden, self._head.weight):  # oneDNN allocates its result
            self._buffer = None
            self._buffer = float32_product(hidden, self._head.weight)
            return self._buffer
        return float32_product(hidden, self._head.weight, out=self._logits(len(hidden), hidden.device))

    def _score(
        self, hidden: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Logprobs (C, K), row sums (C, 1) of exp(logits - max), which stays in the buffer, and the derivative of the soft cap by
        its input, if the model has one.
        """
        head = self._head
        logits = self._products(hidden)
        inner = None if head.a is None else linear(hidden.float(), head.a)
        cap_slope = head.finish_(logits, self._temperature, inner)
        chosen = logits.gather(1, targets)
        largest = logits.amax(dim=-1, keepdim=True)
        total = _exp_(logits.sub_(largest)).sum(dim=-1, keepdim=True)
        return chosen - largest - total.log(), total, cap_slope

    def _backward(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        slopes: torch.Tensor,
        total: torch.Tensor,
        cap_slope: torch.Tensor | None,
        head_gradients: list[torch.Tensor],
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """dL/d hidden of the rows just scored, from the buffer of `_score`. `rows` (C,): only for these of them."""
        head = self._head
        # d lp_k / d logits = onehot(target_k) - p, summed over k with the slopes as weights.
        slopes = slopes * (head.multiplier / self._temperature)
        grad_logits = self._logits(len(hidden), hidden.device) if rows is None else self._picked(rows)
        grad_logits.mul_(-slopes.sum(dim=1, keepdim=True) / total)
        grad_logits.scatter_add_(1, targets, slopes)
        if cap_slope is not None:
            grad_logits.mul_(cap_slope)
        grad_hidden = linear(grad_logits.to(hidden.dtype), head.weight.t())
        if head.a is not None and head.b is not None:
            grad_inner = linear(grad_logits, head.b.t()).mul_(head.scale)
            grad_a, grad_b = head_gradients
            grad_a.add_(linear(grad_inner.t(), hidden.float().t()))
            inner = linear(hidden.float(), head.a)
            grad_b.add_(linear(inner.t(), grad_logits.t()).t(), alpha=head.scale)
            grad_hidden += (grad_inner @ head.a).to(hidden.dtype)
        return grad_hidden


def _exp_(x: torch.Tensor) -> torch.Tensor:
    # On a CPU, `exp2_` takes a third of the time of `exp_`; on a GPU the additional pass over memory costs more.
    return x.mul_(LOG2_E).exp2_() if x.device.type == "cpu" else x.exp_()


def _rows_with_slope(slopes: torch.Tensor) -> torch.Tensor:
    return slopes.ne(0).any(dim=1).nonzero()[:, 0]
