"""Choose the step of an answer that the judge checks when a speech does not simply name it: by bisection, or by estimates.

Bisection is the cross-examination of doubly-efficient debate: log2(n) turns narrow a dispute over n steps down to one. The author
does not speak, because an answer already states the outcome of each step: nothing the author adds or concedes changes what is
checked. Only the examiner, the other seat, speaks: it names a step that it believes wrong, the half with that step remains, and
it is asked again. It may change its mind within that half, but not go back. If it names no remaining step, bisection ends and the
judge checks the step that was named last.

In prover-estimator debate the prover is the author, whose steps are the subclaims. The estimator gives the probability that each
is right, and the judge checks the one with the lowest estimate.
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
"""Maximum number of an examiner's speeches: enough for 64 steps. In a longer answer several steps remain at the end."""
WORST_SCORE = -1.0
"""Score of an estimator that gives no estimates."""


@dataclass(frozen=True)
class Narrowed:
    """State of a bisection."""

    left: tuple[Step, ...]
    """steps that may still be named"""
    named: Step | None
    """the step named last"""
    is_over: bool


def narrow(task: StepTask, item: TaskItem, steps: Sequence[Step], speeches: Sequence[Turn]) -> Narrowed:
    """Bisect an answer's steps by an examiner's speeches. The first half of an odd number is the larger one."""
    left, named = tuple(steps), None
    for turn in speeches:
        step = None if turn.malformed else task.step_of_speech(item, left, turn.text)
        if step is None or step not in left:
            return Narrowed(left, named, True)
        named, middle = step, (len(left) + 1) // 2
        left = left[:middle] if left.index(step) < middle else left[middle:]
    return Narrowed(left, named, named is not None and len(left) == 1)


class Dispute(Transcript):
    """Two answers, and each seat's bisection of the other's answer. A seat is asked until its bisection is over."""

    def narrowed(self, seat: Seat) -> Narrowed:
        """The seat's bisection so far. The other seat must have answered."""
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
    """A step, and the estimated probability that it is right."""

    step: Step
    estimate: float


def most_doubted(task: StepTask, item: TaskItem, steps: Sequence[Step], speech: Turn, seed: int) -> Doubted | None:
    """The step with the lowest estimate; `seed` breaks ties. None: the speech gives no estimates."""
    estimates = None if speech.malformed else task.estimates(item, steps, speech.text)
    if estimates is None:
        return None
    chosen = Random(seed).choice([i for i, estimate in enumerate(estimates) if estimate == min(estimates)])
    return Doubted(steps[chosen], estimates[chosen])


def estimator_score(estimate: float, holds: bool, steps: int) -> float:
    """The estimator's reward for the checked step: how much smaller its squared error is than that of a baseline which knows only
    the number of steps n and estimates n / (n + 1) for each. From -1 to 1.

    The rule is proper: honest estimates are best whichever step is checked. If the estimator believes that a step is right with
    probability b, the expected reward is (n / (n + 1) - b)^2: doubting the step that is most surely wrong pays, and slightly
    doubting one that is surely right earns almost nothing. Plain squared error would reward both alike.
    """
    known = steps / (steps + 1)
    return (known - holds) ** 2 - (estimate - holds) ** 2
