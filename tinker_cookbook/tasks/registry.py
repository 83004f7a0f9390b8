"""Tasks by name, ready-made from the strings that a command line gives, or from what a script gives."""

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.own_parts import Kind, Registry, describe, parameter_problem
from tinker_cookbook.tasks.collatz import CollatzTask
from tinker_cookbook.tasks.math import MathTask
from tinker_cookbook.tasks.qa import QATask
from tinker_cookbook.tasks.rewards import OwnRewardFn, RewardSpec
from tinker_cookbook.tasks.summary import SummaryTask
from tinker_cookbook.tasks.types import Task

TaskBuilder: TypeAlias = Callable[[RewardSpec | None], Task]
"""What makes a task, given a reward (None: the task's own): a subclass of Task, or a function."""


def _problem(found: Any) -> str | None:
    if isinstance(found, type) and not issubclass(found, Task):
        return f"is a class that is no Task: {found.__name__}"
    if inspect.isabstract(found):
        return f"{found.__name__} lacks {', '.join(sorted(found.__abstractmethods__))}"
    return parameter_problem(found, ("reward",))


TASK_KIND = Kind(
    key="task",
    wanted="a subclass of tinker_cookbook.tasks.types.Task, or a function (reward: RewardSpec | None) -> Task",
    example="""
class Capitals(QATask):  # from tinker_cookbook.tasks.qa
    name = "capitals"
    system_prompt = "Name the capital. Put it between <SOLUTION> and </SOLUTION>."
    columns = (("country",), ("capital",))
    default_dataset = "capitals.jsonl"
""",
    problem=_problem,
)
_TASKS: Registry[TaskBuilder] = Registry(
    TASK_KIND, {task.name: task for task in (QATask, SummaryTask, MathTask, CollatzTask)}
)


def register_task(task: TaskBuilder, name: str | None = None) -> None:
    """Make a task of one's own known under `name`, by default its own. Raises ConfigurationError for a name that is taken."""
    _TASKS.register(name or getattr(task, "name", ""), task)


def unregister_task(name: str) -> None:
    """Forget a name, so that it can be registered anew."""
    _TASKS.unregister(name)


def known_tasks() -> list[str]:
    """The names that get_task takes, in the order of their registration."""
    return _TASKS.names()


def shipped_datasets() -> dict[str, list[str]]:
    """Name of each known task that has some -> the names of the datasets that are shipped for it."""
    shipped = {name: [*getattr(_TASKS.resolve(name), "shipped", ())] for name in known_tasks()}
    return {name: datasets for name, datasets in shipped.items() if datasets}


def get_task(task: str | TaskBuilder, reward_fn: str | OwnRewardFn | None = None) -> Task:
    """The task with this reward (None: the task's own).

    Args:
        task: a known name, `package.module:object`, `path/file.py:object`, or what makes a task.
        reward_fn: see `RewardSpec.parse`.

    Raises:
        ConfigurationError: neither of these, or something else than a task came of it; shows what is wanted.
    """
    made: Any = _TASKS.resolve(task)(None if reward_fn is None else RewardSpec.parse(reward_fn))
    if not isinstance(made, Task):
        raise ConfigurationError(f"task={describe(task)} made a {type(made).__name__}, no Task. {TASK_KIND.help()}")
    return made
