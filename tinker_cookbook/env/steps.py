"""Tasks whose answers consist of steps that can be checked one at a time, by a judge who cannot do the task."""

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
    """what it says, so that it can be checked without the rest"""
    holds: bool


class StepTask(Task):
    """A task with steps. `objection_request` asks for a wrong step in another's answer and contains {opponent},
    `support_request` asks for a step of the seat's answer that the judge may check.
    """

    objection_request: ClassVar[str]
    support_request: ClassVar[str]

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

        A task whose speakers may name what is not among them makes a step of it here.
        """
        named = self.named_step(speech)
        return next((step for step in steps if step.name == named), None)


def require_steps(task: Task, what: str) -> StepTask:
    """The task itself. Raises ConfigurationError when its answers have no steps."""
    if not isinstance(task, StepTask):
        raise ConfigurationError(
            f"{what} checks single steps, and the answers of task={task.name} have none; use task=collatz, "
            "task=sorting, task=code or task=code_lines"
        )
    return task
