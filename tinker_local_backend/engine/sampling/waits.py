"""How long requests wait for their first token, and other numbers of a sampler, in memory that does not grow."""

from __future__ import annotations

import math
from typing import NamedTuple

STEP = 1.1
"""Ratio of the bounds of neighbouring bins: a quantile is at most so much too large."""

LEAST_SECONDS = 1e-4
BINS = 200


class SamplerStats(NamedTuple):
    """What a sampler is doing. Waits are from submission to the first token (or score), in seconds, since the engine began."""

    waiting: int
    running: int
    pages: int
    """of the KV cache that exist"""
    pages_read: int
    """that running sequences hold"""
    pages_idle: int
    """that ended sequences left, for prompts that begin like them"""
    restarts: int
    """sequences that began again because the KV cache was full"""
    out_of_memory: int
    longest_wait: float
    wait_p50: float
    wait_p99: float


class WaitTimes:
    """A histogram with bins of growing width."""

    def __init__(self) -> None:
        self._counts = [0] * BINS
        self._total = 0
        self.longest = 0.0

    def add(self, seconds: float) -> None:
        place = math.ceil(math.log(seconds / LEAST_SECONDS, STEP)) if seconds > LEAST_SECONDS else 0
        self._counts[min(place, BINS - 1)] += 1
        self._total += 1
        self.longest = max(self.longest, seconds)

    def quantile(self, share: float) -> float:
        """Seconds within which this share of all waits was over; 0 without any."""
        seen = 0
        for place, count in enumerate(self._counts):
            seen += count
            if count and seen >= share * self._total:
                return min(LEAST_SECONDS * STEP**place, self.longest)
        return 0.0
