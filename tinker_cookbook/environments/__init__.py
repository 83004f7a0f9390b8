"""Environments in a few lines: what is asked and how it is rewarded, from a function or a class, for any model.

    single_turn_env(rows, reward)            questions, and a function that scores the replies
    tool_env(rows, reward, tools=[add])      the same, with typed functions that the policy may call
    multi_turn_env(Guess)                    a class that is told each reply and returns what is new

Each gives an Environment, whose `dataset_builder(model_name)` is what `rl.train.Config` takes. `get_env` and `load` find them by
name, and whatever a package's `load_environment(**args)` returns (`contract`).
"""

from tinker_cookbook.env.dataset import DatasetSettings, Environment
from tinker_cookbook.environments.multi_turn import TurnResult, multi_turn_env
from tinker_cookbook.environments.questions import single_turn_env, tool_env
from tinker_cookbook.environments.registry import get_env, known_envs, load, register_env, unregister_env
from tinker_cookbook.environments.scoring import Rubric

__all__ = [
    "DatasetSettings",
    "Environment",
    "Rubric",
    "TurnResult",
    "get_env",
    "known_envs",
    "load",
    "multi_turn_env",
    "register_env",
    "single_turn_env",
    "tool_env",
    "unregister_env",
]
