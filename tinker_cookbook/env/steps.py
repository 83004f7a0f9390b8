"""Tasks whose answers consist of steps that can be checked one at a time, by a judge who cannot do the task."""

import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from tinker_cookbook.env.task import Task, TaskItem
from tinker_cookbook.exceptions import ConfigurationError


@dataclass(frozen=True)
class Step:
    """One step of an answer."""

    name: str
    """how speeches call it"""
    claim: str
    """its claim, which can be checked without the rest"""
    holds: bool


NARROWING_REQUEST = "The steps {first} to {last} are left. Which step is wrong there?"
ESTIMATE_REQUEST = (
    "Another agent wrote:\n{opponent}\nWhich of its steps do you doubt? Write the name of each with how likely it is right, "
    "such as: NAME 20%. Steps that you leave out count as certain."
)
_AFTER_NAME = r"[\s:=(]{0,3}(\d{1,3})\s?%"


class StepTask(Task):
    """A task with steps. `objection_request` asks for a wrong step in another's answer and contains {opponent},
    `support_request` asks for a step of the seat's answer that the judge may check. `narrowing_request` asks again once a part
    of the steps is left, and may contain the names of its {first} and {last}; `estimate_request` asks how likely the steps of
    another's answer are right and contains {opponent}.
    """

    objection_request: ClassVar[str]
    support_request: ClassVar[str]
    narrowing_request: ClassVar[str] = NARROWING_REQUEST
    estimate_request: ClassVar[str] = ESTIMATE_REQUEST

    @abstractmethod
    def steps(self, item: TaskItem, text: str) -> list[Step] | None:
        """The steps of an answer, at least one; None if it does not consist of the required steps."""

    async def check_step(self, item: TaskItem, text: str, step: Step) -> Step:
        """The step of an answer, with `holds` as acting on it shows, for tasks whose `steps` cannot tell; otherwise as it is."""
        return step

    @abstractmethod
    def named_step(self, speech: str) -> str | None:
        """The name of the step that a speech points at; None if there is none."""

    def step_of_speech(self, item: TaskItem, steps: Sequence[Step], speech: str) -> Step | None:
        """The step of an answer with these steps that a speech points at; None: it points at none.

        A task whose speakers may name something else makes a step of it here.
        """
        named = self.named_step(speech)
        return next((step for step in steps if step.name == named), None)

    def estimates(self, item: TaskItem, steps: Sequence[Step], speech: str) -> list[float] | None:
        """For each step of an answer the probability, from 0 to 1, that a speech gives it of being right; None: it gives none.

        Reads the names of steps with a percentage each (`c 20%`); steps without one have 1. Where a speech has no percentage
        and points at a step, that one has 0.
        """
        given: dict[str, float] = {}
        for step in steps:
            found = re.search(rf"(?<![\w-]){re.escape(step.name)}{_AFTER_NAME}", speech)
            if found is not None and int(found.group(1)) <= 100:
                given[step.name] = int(found.group(1)) / 100
        if not given:
            named = self.step_of_speech(item, steps, speech)
            if named is None or named not in steps:
                return None
            given[named.name] = 0.0
        return [given.get(step.name, 1.0) for step in steps]


def require_steps(task: Task, what: str) -> StepTask:
    """The task itself. Raises ConfigurationError when its answers have no steps."""
    if not isinstance(task, StepTask):
        raise ConfigurationError(
            f"{what} checks single steps, and the answers of task={task.name} have none; use task=collatz, "
            "task=sorting, task=code or task=code_lines"
        )
    return task
