"""Recovery from running out of memory: a sampler halves its bounds, and doubles them again after steps without a failure."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

PATIENCE = 64
"""Steps without a failure after which the bounds are doubled."""

MAX_PATIENCE = 4096
"""Upper bound of the back-off, which doubles per failed retry."""


class MemoryBackoff:
    """Bounds on running sequences, on the tokens of a prefill pass, and on the pages of the prefix cache."""

    def __init__(self, running: int, prefill_tokens: int, pages: int):
        self._max = (running, prefill_tokens, pages)
        self.running, self.prefill_tokens, self.pages = self._max
        self._patience = PATIENCE
        self._successes = 0
        self._has_grown = True
        """since the last failure"""

    @property
    def reduced(self) -> bool:
        return (self.running, self.prefill_tokens, self.pages) != self._max

    def reduce(self, rows: int, pages: int) -> None:
        """Halve the bounds after running out of memory with `rows` sequences and `pages` pages."""
        if rows > 1:  # with fewer, the prompts alone were too much
            self.running = max(1, rows // 2)
        self.prefill_tokens = max(1, self.prefill_tokens // 2)
        self.pages = max(1, pages // 2)
        if self._has_grown:  # else nothing has been retried since the last failure
            self._patience = min(2 * self._patience, MAX_PATIENCE)
        self._successes, self._has_grown = 0, False
        logger.warning(
            "out of memory with %d sequences; continuing with at most %d, and %d prompt tokens in a pass",
            rows,
            self.running,
            self.prefill_tokens,
        )

    def succeeded(self) -> None:
        self._successes += 1
        # After a successful increase, try the next one sooner.
        if self._successes < (PATIENCE if self._has_grown and self.reduced else self._patience):
            return
        self._successes = 0
        if not self.reduced:
            self._patience = PATIENCE
            return
        bounds = zip((self.running, self.prefill_tokens, self.pages), self._max, strict=True)
        self.running, self.prefill_tokens, self.pages = (min(2 * bound, most) for bound, most in bounds)
        self._has_grown = True
