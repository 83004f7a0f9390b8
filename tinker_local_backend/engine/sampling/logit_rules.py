"""Penalties, logit bias and min_tokens: changes of single logits that depend on what a sample has so far.

The order is vLLM's: bias and min_tokens, then the repetition penalty, then frequency and presence. All are applied to
logits / temperature, divided alike. The reported logprobs ignore them, as they ignore top-k.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch

from tinker_local_backend.engine.model.prompts import check_vocabulary
from tinker_local_backend.errors import RequestError
from tinker_local_backend.sampling_params import SamplingParams

MAX_PENALTY = 2.0
MAX_BIAS = 100.0


@dataclass(frozen=True)
class LogitRules:
    """What a request changes in its logits (see SamplingParams)."""

    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: tuple[tuple[int, float], ...] = ()
    """token id and what is added to its logit; ids differ"""
    min_tokens: int = 0

    @classmethod
    def of(cls, params: Any, vocabulary: int) -> LogitRules | None:
        """Those of SamplingParams; None if they change nothing. Raises RequestError naming field, value and fix."""
        if not isinstance(params, SamplingParams):
            return None
        penalties = params.presence_penalty, params.frequency_penalty
        for name, value in zip(("presence_penalty", "frequency_penalty"), penalties, strict=True):
            if not (_is_finite(value) and abs(value) <= MAX_PENALTY):
                raise RequestError(f"{name} must be in [-2, 2], got {value!r:.80}")
        repetition = params.repetition_penalty
        if not (_is_finite(repetition) and repetition > 0):
            raise RequestError(f"repetition_penalty must be a finite number above 0 (1: none), got {repetition!r:.80}")
        if not isinstance(params.min_tokens, Integral) or params.min_tokens < 0:
            raise RequestError(f"min_tokens must be an integer of at least 0, got {params.min_tokens!r:.80}")
        rules = cls(*penalties, repetition, _bias(params.logit_bias, vocabulary), params.min_tokens)
        return None if rules == cls() else rules


def _is_finite(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def _bias(logit_bias: object, vocabulary: int) -> tuple[tuple[int, float], ...]:
    if not isinstance(logit_bias, Mapping):
        raise RequestError(f"logit_bias is {logit_bias!r:.80}; it must map token ids to numbers")
    bias: dict[int, float] = {}
    for key, value in logit_bias.items():
        try:
            token = int(key)  # the keys of JSON objects are strings
        except (TypeError, ValueError):
            raise RequestError(f"logit_bias has the key {key!r:.80}; keys must be token ids") from None
        if not (_is_finite(value) and abs(value) <= MAX_BIAS):
            raise RequestError(f"logit_bias of token {token} must be in [-100, 100], got {value!r:.80}")
        bias[token] = float(value)
    check_vocabulary(list(bias), vocabulary, "logit_bias")
    return tuple(sorted(bias.items()))


class LogitState:
    """The logits that change for one sample, with what it has so far.

    Args:
        ends: its stop tokens, which `min_tokens` puts off.
        prompt: counts for the repetition penalty.
    """

    def __init__(self, rules: LogitRules, prompt: Sequence[int], ends: Collection[int]):
        self._rules = rules
        self._counts: Counter[int] = Counter()
        """of the drawn tokens"""
        self._ends = np.array(sorted(ends) if rules.min_tokens else [], dtype=np.int64)
        ids = {*(token for token, _ in rules.bias), *self._ends.tolist()}
        seen = set(prompt) if rules.repetition != 1 else set[int]()
        self.tokens = np.array(sorted(ids | seen), dtype=np.int64)
        """ids of the logits that change; distinct"""
        self._index = {token: i for i, token in enumerate(self.tokens.tolist())}
        bias, count = dict(rules.bias), len(self.tokens)
        self.bias = np.array([bias.get(token, 0.0) for token in self._index], dtype=np.float32)
        self.scale = np.array([rules.repetition if token in seen else 1.0 for token in self._index], dtype=np.float32)
        self.minus = np.zeros(count, dtype=np.float32)
        if self._ends.size:
            self.bias[[self._index[token] for token in self._ends.tolist()]] = -np.inf

    def consume(self, token: int) -> None:
        """Go on with a drawn token."""
        rules = self._rules
        self._counts[token] += 1
        if self._ends.size and self._counts.total() == rules.min_tokens:
            bias = dict(rules.bias)
            self.bias[[self._index[end] for end in self._ends.tolist()]] = [
                bias.get(e, 0.0) for e in self._ends.tolist()
            ]
            self._ends = self._ends[:0]
        if rules.presence == rules.frequency == 0 and rules.repetition == 1:
            return
        i = self._index.setdefault(token, len(self.tokens))
        if i == len(self.tokens):
            self.tokens, self.bias = np.append(self.tokens, token), np.append(self.bias, np.float32(0))
            self.scale, self.minus = np.append(self.scale, np.float32(1)), np.append(self.minus, np.float32(0))
        self.scale[i] = rules.repetition
        self.minus[i] = rules.presence + rules.frequency * self._counts[token]


def changed_logits(
    tempered_RV: torch.Tensor, divisors_R: torch.Tensor, states: Sequence[LogitState | None]
) -> torch.Tensor:
    """A copy of the tempered logits with the changes of these rows' states. None: a row without any."""
    rows = [(i, state) for i, state in enumerate(states) if state is not None]
    device = tempered_RV.device

    def joined(name: str) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([getattr(state, name) for _, state in rows])).to(device)

    counts = [len(state.tokens) for _, state in rows]
    row_N = torch.from_numpy(np.repeat(np.array([i for i, _ in rows], dtype=np.int64), counts)).to(device)
    token_N, scale_N, divisor_N = joined("tokens"), joined("scale"), divisors_R[row_N]
    values_N = tempered_RV[row_N, token_N] + joined("bias") / divisor_N
    values_N = torch.where(values_N > 0, values_N / scale_N, values_N * scale_N) - joined("minus") / divisor_N
    return tempered_RV.index_put((row_N, token_N), values_N)
