"""Tasks by name, ready-made from the strings that a command line gives."""

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.tasks.collatz import CollatzTask
from tinker_cookbook.tasks.qa import QATask
from tinker_cookbook.tasks.rewards import RewardSpec
from tinker_cookbook.tasks.summary import SummaryTask
from tinker_cookbook.tasks.types import Task

_TASKS: dict[str, type[Task]] = {task.name: task for task in (QATask, SummaryTask, CollatzTask)}


def register_task(task: type[Task]) -> None:
    """Make a task of one's own known under its `name`."""
    _TASKS[task.name] = task


def known_tasks() -> list[type[Task]]:
    """Every task that get_task makes, in the order of their registration."""
    return list(_TASKS.values())


def get_task(name: str, reward_fn: str | None = None) -> Task:
    """The task of this name with this reward spec (None: the task's own). Raises ConfigurationError naming the known ones."""
    if name not in _TASKS:
        raise ConfigurationError(f"task={name!r} is unknown; use {', '.join(sorted(_TASKS))}")
    task = _TASKS[name]
    return task(RewardSpec.parse(reward_fn or task.default_reward))
