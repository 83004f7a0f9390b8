"""How the learning rate changes over a run: a multiplier per step."""

import math
from typing import Literal, TypeAlias, get_args

from tinker_cookbook.exceptions import ConfigurationError

LRSchedule: TypeAlias = Literal["linear", "cosine", "constant"]


def compute_schedule_lr_multiplier(lr_schedule: LRSchedule, step: int, total_steps: int) -> float:
    """What to multiply the learning rate by at `step` (0-based) of `total_steps`.

    linear: 1 - step/total. cosine: (1 + cos(pi step/total)) / 2. constant: 1.
    Raises ConfigurationError for an unknown schedule, total_steps <= 0, or a step outside [0, total_steps].
    """
    if lr_schedule not in get_args(LRSchedule):
        raise ConfigurationError(f"lr_schedule={lr_schedule!r} is unknown; choose one of {get_args(LRSchedule)}")
    if total_steps <= 0:
        raise ConfigurationError(f"total_steps={total_steps}: a schedule needs at least one step; check the dataset")
    if not 0 <= step <= total_steps:
        raise ConfigurationError(f"step={step} is outside the schedule of total_steps={total_steps}; raise total_steps")
    if lr_schedule == "linear":
        return 1 - step / total_steps
    if lr_schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * step / total_steps))
    return 1.0
