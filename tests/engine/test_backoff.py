"""What a sampler takes on: less at once where memory is short, and all of it again soon after there is enough."""

import pytest

from tinker_local_backend.engine.sampling.out_of_memory import MAX_PATIENCE, PATIENCE, MemoryBackoff

RUNNING, TOKENS, PAGES = 512, 2048, 1024


@pytest.fixture
def allowance() -> MemoryBackoff:
    return MemoryBackoff(RUNNING, TOKENS, PAGES)


def steps_until(allowance: MemoryBackoff, running: int, at_most: int) -> int:
    """Successful steps until so many sequences may run."""
    for steps in range(at_most + 1):
        if allowance.running >= running:
            return steps
        allowance.succeeded()
    raise AssertionError(f"only {allowance.running} sequences after {at_most} steps")


def test_after_many_failures_at_once_it_is_back_soon(allowance: MemoryBackoff) -> None:
    """Somebody else had the memory, and gives it back: one wait, then twice as much each time."""
    while allowance.running > 1:
        allowance.reduce(allowance.running, allowance.pages)
    doublings = RUNNING.bit_length() - 1
    steps_until(allowance, RUNNING, at_most=(doublings + 1) * PATIENCE)
    assert (allowance.prefill_tokens, allowance.pages) == (TOKENS, PAGES)


def test_what_fails_each_time_is_tried_ever_more_seldom_and_still_comes_back(allowance: MemoryBackoff) -> None:
    allowance.reduce(RUNNING, PAGES)
    waits = []
    for _ in range(10):
        waits.append(steps_until(allowance, RUNNING, at_most=MAX_PATIENCE))
        allowance.reduce(RUNNING, PAGES)
    assert waits[:4] == [2 * PATIENCE, 4 * PATIENCE, 8 * PATIENCE, 16 * PATIENCE]
    assert waits[-3:] == [MAX_PATIENCE] * 3
    allowance.reduce(allowance.running, PAGES)
    allowance.reduce(allowance.running, PAGES)
    steps_until(allowance, RUNNING, at_most=MAX_PATIENCE + 3 * PATIENCE)
