"""Performance goals of this engine on one H100 or H200, compared with measurements."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.report import NOT_MEASURED, Table, number

STAND_IN = "stand-in, not a measurement"


@dataclass(frozen=True)
class Mark:
    """A goal: `bound` is a minimum, or with `is_limit` a maximum; `unit` is "" for a share."""

    key: str
    what: str
    bound: float
    unit: str = ""
    is_limit: bool = False

    def reached(self, value: float) -> bool:
        """Whether a value reaches the goal; NaN does not."""
        return value <= self.bound if self.is_limit else value >= self.bound

    def shown(self, value: float) -> str:
        return f"{number(value)} {self.unit}" if self.unit and not math.isnan(value) else percent(value)


def percent(share: float) -> str:
    """A share as a percentage. NaN means that its denominator was not measured."""
    return NOT_MEASURED if math.isnan(share) else f"{share:.0%}"


DECODE_MARKS = (
    Mark("decode 64", "decoding, batch 64, context 1,024, eight adapters: share of the copy's measured rate", 0.5),
    Mark("decode 256", "decoding, batch 256, context 1,024, eight adapters: share of the copy's measured rate", 0.7),
)
"""In the order of `Scale.mark_batches`."""

TRAINING_SHARE = Mark(
    "training share", "training, most tokens, every sequence with its own prompt: share of the product's measured rate",
    0.45,
)  # fmt: skip
TRAINING_TOKENS = Mark("training tokens", "the same in tokens per second, for the 4B shape", 22_000, "tokens/s")
AGREEMENT = Mark("KL", "sampler against trainer in bfloat16, at the worst depth", 1e-3, "nats/token", is_limit=True)

MARKS = (*DECODE_MARKS, TRAINING_SHARE, TRAINING_TOKENS, AGREEMENT)


def table(measured: Mapping[str, float], on_gpu: bool) -> Table:
    """Each mark with its measured value (by key), and whether it is reached."""
    rows = []
    for mark in MARKS:
        value = measured.get(mark.key, math.nan)
        wanted = f"{'at most' if mark.is_limit else 'at least'} {mark.shown(mark.bound)}"
        answer = "yes" if mark.reached(value) else "no"
        if math.isnan(value):
            answer = NOT_MEASURED
        elif not on_gpu:
            answer = STAND_IN
        rows.append([mark.what, wanted, mark.shown(value), answer])
    return Table("Marks", ["mark", "wanted", "measured", "reached"], rows)
