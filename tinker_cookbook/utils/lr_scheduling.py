"""Learning rate schedules: a multiplier per step."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.plugins import Kind, Registry, parameter_problem

LRSchedule: TypeAlias = Literal["linear", "cosine", "constant"]
Schedule: TypeAlias = Callable[[int, int], float]
"""(step, total_steps) -> multiplier of the learning rate; step is 0-based, and neither counts warm-up steps."""

SCHEDULE_KIND = Kind(
    key="lr_schedule",
    wanted="def schedule(step: int, total_steps: int) -> float, what to multiply the learning rate by; step counts from 0",
    example='''
def schedule(step, total_steps):
    """Full speed, then a tenth of it in the last fifth of the run."""
    return 1.0 if step < 0.8 * total_steps else 0.1
''',
    problem=partial(parameter_problem, names=("step", "total_steps")),
)


class Scheduled(Protocol):
    """A config with a schedule."""

    @property
    def learning_rate(self) -> float: ...
    @property
    def lr_schedule(self) -> str | Callable[..., Any]: ...
    @property
    def lr_warmup_steps(self) -> int: ...


def compute_schedule_lr_multiplier(
    lr_schedule: str | Schedule, step: int, total_steps: int, warmup_steps: int = 0
) -> float:
    """The factor of the learning rate at `step` (0-based) of `total_steps`.

    The first `warmup_steps` rise linearly, starting from 1 / (warmup_steps + 1); the schedule covers the remaining t
    steps: linear: 1 - step/t. cosine: (1 + cos(pi step/t)) / 2. constant: 1. Or a custom function, see SCHEDULE_KIND.

    Raises:
        ConfigurationError: an unknown schedule, total_steps <= 0, a step outside [0, total_steps], or a function that
            returns anything but a finite number of at least 0.
    """
    if total_steps <= 0:
        raise ConfigurationError(f"total_steps={total_steps}: a schedule needs at least one step; check the dataset")
    if not 0 <= step <= total_steps:
        raise ConfigurationError(f"step={step} is outside the schedule of total_steps={total_steps}; raise total_steps")
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    return check_schedule(lr_schedule)(step - warmup_steps, max(1, total_steps - warmup_steps))


def check_schedule(lr_schedule: str | Schedule) -> Schedule:
    """The function of a schedule. Raises ConfigurationError for an unknown one."""
    schedule = _SCHEDULES.resolve(lr_schedule)

    def multiplier(step: int, total_steps: int) -> float:
        value: Any = schedule(step, total_steps)
        if not (isinstance(value, int | float) and 0 <= value < math.inf):
            raise ConfigurationError(
                f"lr_schedule={lr_schedule!r} gives {value!r} at step {step} of {total_steps}: must be a number of at least 0"
            )
        return float(value)

    return multiplier


def learning_rate_at(config: Scheduled, step: int, total_steps: int) -> float:
    """The learning rate at a step of a run."""
    return config.learning_rate * compute_schedule_lr_multiplier(
        config.lr_schedule, step, total_steps, config.lr_warmup_steps
    )


_SHIPPED: dict[LRSchedule, Schedule] = {
    "linear": lambda step, total_steps: 1 - step / total_steps,
    "cosine": lambda step, total_steps: 0.5 * (1 + math.cos(math.pi * step / total_steps)),
    "constant": lambda step, total_steps: 1.0,
}
_SCHEDULES: Registry[Schedule] = Registry(SCHEDULE_KIND, {**_SHIPPED})


def register_schedule(name: str, schedule: Schedule) -> None:
    """Register a custom schedule under a name. Raises ConfigurationError for a name that is taken."""
    _SCHEDULES.register(name, schedule)
