"""Runs contenders one at a time, interleaved, and records their numbers and other programs' CPU use.

The speed of shared machines drifts. So ratios are taken within a round, in which ours and the peer run seconds apart, and their
median over rounds; a repetition that other programs disturb is marked and repeated, as often as `reruns` allows.
"""

from __future__ import annotations

import gc
import statistics
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

import torch

from benchmarks.config import ComparisonConfig
from benchmarks.machine import CpuClock, wait_until_quiet

CLOCK_NOISE_SECONDS = 0.05
"""CPU time of other programs below which the counters, with ticks of 10 ms, are too coarse."""


@dataclass(frozen=True)
class Contender:
    """A program to measure. `run(round)` does the work once and returns the number of tokens; rounds differ by seed."""

    name: str
    run: Callable[[int], int]
    is_ours: bool = False


@dataclass(frozen=True)
class Repetition:
    """One timed run. Cores are averages over it: used by the contenders' processes, and by all other programs."""

    round: int
    seconds: float
    tokens: int
    own_cores: float
    foreign_cores: float
    disturbed: bool


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


@dataclass
class Measurement:
    """All repetitions of one contender. If there are none, `status` is the reason."""

    name: str
    is_ours: bool
    status: str = "measured"
    repetitions: list[Repetition] = field(default_factory=list)
    discarded: list[Repetition] = field(default_factory=list)
    """disturbed repetitions that were repeated"""

    @property
    def seconds(self) -> Spread:
        return Spread.of([r.seconds for r in self.repetitions])

    @property
    def tokens(self) -> Spread:
        return Spread.of([r.tokens for r in self.repetitions])

    @property
    def tokens_per_second(self) -> Spread:
        return Spread.of([r.tokens / r.seconds for r in self.repetitions])

    @property
    def disturbed(self) -> int:
        """Number of disturbed repetitions that count, because no rerun was left."""
        return sum(r.disturbed for r in self.repetitions)

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict) -> Measurement:
        """The inverse of `to_json`."""
        times = {key: [Repetition(**r) for r in value[key]] for key in ("repetitions", "discarded")}
        return cls(**{**value, **times})


def absent(name: str, status: str) -> Measurement:
    """A row for a contender that did not run."""
    return Measurement(name, is_ours=False, status=status)


def paired_ratio(ours: Measurement, other: Measurement, per_token: bool) -> Spread:
    """How many times faster ours is, round by round: in tokens per second, or in seconds per repetition.

    Raises ValueError if the two share no round.
    """
    theirs = {r.round: r for r in other.repetitions}
    ratios = []
    for mine in ours.repetitions:
        peer = theirs.get(mine.round)
        if peer is not None:
            ratio = peer.seconds / mine.seconds
            ratios.append(ratio * mine.tokens / peer.tokens if per_token else ratio)
    return Spread.of(ratios)


def measure(contenders: Sequence[Contender], config: ComparisonConfig) -> list[Measurement]:
    """One unmeasured run of each contender, then `config.repetitions` rounds of all, in rotating order.

    A peer that raises is reported as failed, with the traceback on stderr, and the others continue; errors of ours propagate.
    """
    results = {c.name: Measurement(c.name, c.is_ours) for c in contenders}
    running = [c for c in contenders if _attempt(c, results[c.name], lambda c=c: c.run(0)) is not None]
    for number in range(1, config.repetitions + 1):
        start = number % len(running) if running else 0
        for contender in [*running[start:], *running[:start]]:
            result = results[contender.name]
            if _attempt(contender, result, lambda c=contender, r=result, n=number: _repeat(c, r, n, config)) is None:
                running.remove(contender)
        _progress(number, config.repetitions, results)
    return list(results.values())


def _attempt(contender: Contender, result: Measurement, action: Callable[[], int]) -> int | None:
    """The action's result; None, with the status set, if a peer fails."""
    try:
        return action()
    except Exception as error:
        if contender.is_ours:
            raise
        result.status = f"failed: {describe(error)}"
        return None


def describe(error: Exception) -> str:
    """One short line for the table; the traceback goes to stderr."""
    traceback.print_exception(error)
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"


def _repeat(contender: Contender, result: Measurement, number: int, config: ComparisonConfig) -> int:
    """Run until a repetition is undisturbed or no rerun is left. Returns its tokens."""
    while True:
        if config.quiet_seconds > 0:
            wait_until_quiet(config.quiet_seconds, config.max_foreign_cores)
        repetition = time_once(contender, number, config.max_foreign_cores)
        if not repetition.disturbed or len(result.discarded) >= config.reruns:
            result.repetitions.append(repetition)
            return repetition.tokens
        result.discarded.append(repetition)


def time_once(contender: Contender, number: int, max_foreign_cores: float) -> Repetition:
    """Run a contender once, with garbage collected before, and the device synchronised before and after."""
    gc.collect()
    _synchronize()
    start = CpuClock.now()
    tokens = contender.run(number)
    _synchronize()
    end = CpuClock.now()
    own, foreign = end.usage_since(start)
    seconds = end.wall - start.wall
    disturbed = foreign > max_foreign_cores and foreign * seconds > CLOCK_NOISE_SECONDS
    return Repetition(number, seconds, tokens, own, foreign, disturbed)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _progress(number: int, total: int, results: dict[str, Measurement]) -> None:
    times = ", ".join(f"{r.name} {r.repetitions[-1].seconds:.2f} s" for r in results.values() if r.repetitions)
    print(f"round {number}/{total}: {times}", file=sys.stderr, flush=True)
