"""How much a sampler takes on at once: less after it ran out of memory, and more again while all goes well."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

PATIENCE = 64
"""Steps without a failure after which twice as much is tried again;"""

MOST_PATIENCE = 4096
"""twice as many after each failure, up to so many."""


class Allowance:
    """Bounds on running sequences, on the tokens of a prefill pass, and on pages that are kept for later prompts."""

    def __init__(self, running: int, prefill_tokens: int, pages: int):
        self._most = (running, prefill_tokens, pages)
        self.running, self.prefill_tokens, self.pages = self._most
        self._patience = PATIENCE
        self._successes = 0

    @property
    def reduced(self) -> bool:
        return (self.running, self.prefill_tokens, self.pages) != self._most

    def reduce(self, rows: int, pages: int) -> None:
        """After running out of memory with so many sequences and pages."""
        if rows > 1:  # with fewer, the prompts alone were too much
            self.running = max(1, rows // 2)
        self.prefill_tokens = max(1, self.prefill_tokens // 2)
        self.pages = max(1, pages // 2)
        self._patience = min(2 * self._patience, MOST_PATIENCE)
        self._successes = 0
        logger.warning(
            "out of memory with %d sequences; going on with at most %d, and %d prompt tokens in a pass",
            rows,
            self.running,
            self.prefill_tokens,
        )

    def succeeded(self) -> None:
        """A step came to its end."""
        self._successes += 1
        if self._successes < self._patience:
            return
        self._successes = 0
        if not self.reduced:
            self._patience = PATIENCE
            return
        running, tokens, pages = self._most
        self.running = min(2 * self.running, running)
        self.prefill_tokens = min(2 * self.prefill_tokens, tokens)
        self.pages = min(2 * self.pages, pages)
