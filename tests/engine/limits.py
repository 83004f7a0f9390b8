"""Rows of probabilities with limits of every kind, and what must stay of them, counted token by token with exact fractions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from tests.engine.devices import here


@dataclass(frozen=True)
class LimitsCase:
    probs: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        return self.probs, self.top_k, self.top_p, self.min_p

    def expected(self) -> torch.Tensor:
        """(R, V) float32 on the CPU."""
        kept = torch.zeros(self.probs.shape)
        for row, probs in enumerate(self.probs.tolist()):
            k, p, m = int(self.top_k[row]), float(self.top_p[row]), float(self.min_p[row])
            floor = float(torch.tensor(m, dtype=torch.float32) * max(probs))
            order = sorted(range(len(probs)), key=lambda token, probs=probs: (-probs[token], token))
            left = [token for token in order[: k if k > 0 else None] if probs[token] >= floor]
            wanted = Fraction(p) * sum(Fraction(probs[token]) for token in left)
            before = Fraction(0)
            for rank, token in enumerate(left):
                if rank == 0 or p >= 1 or before < wanted:
                    kept[row, token] = probs[token]
                before += Fraction(probs[token])
        return kept


LIMITS = [
    (0, 1.0, 0.0),
    (5, 1.0, 0.0),
    (0, 0.8, 0.0),
    (0, 0.999, 0.0),
    (0, 1.0, 0.02),
    (40, 0.5, 0.0),
    (3, 0.99, 0.3),
    (0, 0.7, 0.01),
    (-1, 0.0, 0.0),
    (1, 1.0, 1.0),
    (10**6, 0.9, 0.0),
]
"""top_k, top_p and min_p, as requests have them."""


def limits_case(vocabulary: int, spread: float, step: float = 0.0, limits: Sequence[tuple] = LIMITS) -> LimitsCase:
    """Logits with this standard deviation; multiples of `step`, so that many tokens are equally likely, if that is not 0.

    Every other row is far from the rest, so that tokens without any mass are among them.
    """
    logits = torch.randn(len(limits), vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * spread
    if step:
        logits = (logits / step).round() * step
    logits[1::2, ::3] -= 200.0
    top_k, top_p, min_p = zip(*limits, strict=True)
    return LimitsCase(
        logits.softmax(-1).to(here().device),
        torch.tensor(top_k, dtype=torch.int64, device=here().device),
        torch.tensor(top_p, dtype=torch.float32, device=here().device),
        torch.tensor(min_p, dtype=torch.float32, device=here().device),
    )
