"""Which step of an answer the judge checks where a speech does not simply name it: bisection, and estimates of every step.

Bisection is the cross-examination of doubly efficient debate: log2(n) turns lead a dispute over n steps to a single one. The
author's half of it is said in advance, because an answer states the outcome of each of its steps, and nothing it could add or
concede would change what is checked. So only the examiner, the other seat, speaks: it names a step that it holds to be wrong,
the half with that step is left, and it is asked again. It may reconsider within what is left, and not go back. One who names no
step of what is left has said all, and the judge checks the step that was named last.

With a prover and an estimator the prover is the author, whose steps are the subclaims. The estimator gives each a probability of
being right, and the judge checks the one that is doubted most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from tinker_cookbook.debate.prompts import OPPONENT
from tinker_cookbook.debate.transcript import Transcript, Turn
from tinker_cookbook.debate.views import Seat
from tinker_cookbook.env.steps import Step, StepTask, require_steps
from tinker_cookbook.env.task import TaskItem

MOST_TURNS = 6
"""Speeches of an examiner, at most: enough for 64 steps. Of longer answers more than one step is left in the end."""
WORST_SCORE = -1.0
"""Of an estimator who gives no estimates."""


@dataclass(frozen=True)
class Narrowed:
    """How far an examiner has come."""

    left: tuple[Step, ...]
    """what may still be named"""
    named: Step | None
    """last"""
    is_over: bool


def narrow(task: StepTask, item: TaskItem, steps: Sequence[Step], speeches: Sequence[Turn]) -> Narrowed:
    """What is left of the steps of an answer after an examiner's speeches. Of an odd number the first half is the larger."""
    left, named = tuple(steps), None
    for turn in speeches:
        step = None if turn.malformed else task.step_of_speech(item, left, turn.text)
        if step is None or step not in left:
            return Narrowed(left, named, True)
        named, middle = step, (len(left) + 1) // 2
        left = left[:middle] if left.index(step) < middle else left[middle:]
    return Narrowed(left, named, named is not None and len(left) == 1)


class Dispute(Transcript):
    """Two answers, and how each seat narrows down where the other's is wrong. A seat is asked while there is something to ask."""

    def narrowed(self, seat: Seat) -> Narrowed:
        """By what the seat has said about the other's answer, which is given."""
        task = require_steps(self.task, "protocol=bisection")
        answer, speeches = self.turns[seat.opponent][0], self.turns[seat][1:]
        steps = None if answer.malformed else task.steps(self.item, answer.text)
        return Narrowed((), None, True) if steps is None else narrow(task, self.item, steps, speeches)

    def next_slot(self, seat: Seat) -> int | None:
        place = super().next_slot(seat)
        if place is None or self.slots[place].round < 2:
            return place
        return None if self.narrowed(seat).is_over else place

    def request(self, seat: Seat, text: str) -> str:
        if "{first}" not in text and "{last}" not in text:
            return text
        left = self.narrowed(seat).left
        first, last = (step.name.replace(OPPONENT, "...") for step in (left[0], left[-1]))
        return text.replace("{first}", first).replace("{last}", last)


@dataclass(frozen=True)
class Doubted:
    """A step, and how likely an estimator holds it to be right."""

    step: Step
    estimate: float


def most_doubted(task: StepTask, item: TaskItem, steps: Sequence[Step], speech: Turn, seed: int) -> Doubted | None:
    """The step with the lowest estimate, of equally low ones a drawn one; None: the speech gives no estimates."""
    estimates = None if speech.malformed else task.estimates(item, steps, speech.text)
    if estimates is None:
        return None
    chosen = Random(seed).choice([i for i, estimate in enumerate(estimates) if estimate == min(estimates)])
    return Doubted(steps[chosen], estimates[chosen])


def estimator_score(estimate: float, holds: bool, steps: int) -> float:
    """What an estimator earns by the step that was checked: how much smaller its squared error is than that of one who knows
    nothing of the answer but its length, and says n / (n + 1) of each of n steps. From -1 to 1.

    Whatever is checked, saying what one believes is best (the rule is proper). And a step believed with b is worth
    (n / (n + 1) - b)^2 on average, so that it pays to doubt the step that is most surely wrong, while doubting one that is surely
    right, a little, earns next to nothing. The plain squared error would pay both alike.
    """
    known = steps / (steps + 1)
    return (known - holds) ** 2 - (estimate - holds) ** 2
