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


def as_questions(loaded: Any, owner: str) -> Any:
    """An equivalent object with dataset and rubric. An object that has both is returned unchanged.

    Raises ConfigurationError: an async initial_observation, because its result is not known before the run.
    """
    if hasattr(loaded, "dataset") and hasattr(loaded, "rubric"):
        return loaded
    parts = {name: getattr(loaded, name, None) for name in ("eval_dataset", "system_prompt", "few_shot")}
    parts["needs"] = getattr(loaded, "needs", ())
    if hasattr(loaded, "dataset"):
        return SimpleNamespace(dataset=loaded.dataset, rubric=Rubric([StepReward(loaded, owner)]), **parts)
    if inspect.iscoroutinefunction(loaded.initial_observation):
        raise ConfigurationError(
            f"{owner}: with a rubric, initial_observation must be a plain `def`; or give a dataset"
        )
    return SimpleNamespace(dataset=[{"prompt": loaded.initial_observation()}], rubric=loaded.rubric, **parts)


class StepReward:
    """The reward that `step` gives one reply, on a copy of the object's initial state."""

    __name__ = "step"

    def __init__(self, env: Any, owner: str):
        self._env, self._owner = env, owner

    async def __call__(self, completion: str, info: dict[str, Any]) -> tuple[float, dict[str, float]]:
        env = copy_for_member(self._env, self._owner)
        given = {"info": info} if "info" in inspect.signature(env.step).parameters else {}
        with plugin_errors(f"step of {self._owner}", env.step, {"action_text": completion}):
            returned = await resolved(env.step(completion, **given))
        result = read_step(returned, f"{self._owner}: step")
        if not result.done:
            raise DataValidationError(
                f"{self._owner}: step continues after a reply to a row of dataset, which is a single turn; give "
                "initial_observation instead of dataset for episodes of several"
            )
        return result.reward, dict(result.metrics)
