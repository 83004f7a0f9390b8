"""Objects that mix two forms of the contract: rows scored by `step`, or an observation scored by a rubric."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

from tinker_cookbook.env.contract_groups import copy_for_member, read_step
from tinker_cookbook.env.scoring import Rubric
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.plugin_errors import plugin_errors
from tinker_cookbook.utils.misc_utils import resolved


def as_questions(found: Any, owner: str) -> Any:
    """An equivalent object with dataset and rubric. An object that has both is returned unchanged.

    Raises ConfigurationError: an async initial_observation, because its result is not known before the run.
    """
    if hasattr(found, "dataset") and hasattr(found, "rubric"):
        return found
    parts = {name: getattr(found, name, None) for name in ("eval_dataset", "system_prompt", "few_shot")}
    parts["needs"] = getattr(found, "needs", ())
    if hasattr(found, "dataset"):
        return SimpleNamespace(dataset=found.dataset, rubric=Rubric([StepReward(found, owner)]), **parts)
    if inspect.iscoroutinefunction(found.initial_observation):
        raise ConfigurationError(
            f"{owner}: beside a rubric initial_observation must be a plain `def`, or give a dataset"
        )
    return SimpleNamespace(dataset=[{"prompt": found.initial_observation()}], rubric=found.rubric, **parts)


class StepReward:
    """The reward that `step` gives one reply, on a copy of the object's initial state."""

    __name__ = "step"

    def __init__(self, env: Any, owner: str):
        self._env, self._owner = env, owner

    async def __call__(self, completion: str, info: dict[str, Any]) -> tuple[float, dict[str, float]]:
        own = copy_for_member(self._env, self._owner)
        given = {"info": info} if "info" in inspect.signature(own.step).parameters else {}
        with plugin_errors(f"step of {self._owner}", own.step, {"action_text": completion}):
            found = await resolved(own.step(completion, **given))
        result = read_step(found, f"{self._owner}: step")
        if not result.done:
            raise DataValidationError(
                f"{self._owner}: step goes on after a reply to a row of dataset, which is one turn; give initial_observation "
                "instead of dataset for episodes of several"
            )
        return result.reward, dict(result.metrics)
