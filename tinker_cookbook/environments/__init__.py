"""Environments in a few lines: what is asked and how it is rewarded, from a function or a class, for any model.

    single_turn_env(rows, reward)            questions, and a function that scores the replies
    tool_env(rows, reward, tools=[add])      the same, with typed functions that the policy may call
    multi_turn_env(Guess)                    a class that is told each reply and returns what is new

Each gives an Environment, whose `dataset_builder(model_name)` is what `rl.train.Config` takes. `get_env` finds them by name.
"""

from tinker_cookbook.environments.base import DatasetSettings, Environment
from tinker_cookbook.environments.multi_turn import TurnResult, multi_turn_env
from tinker_cookbook.environments.questions import single_turn_env, tool_env
from tinker_cookbook.environments.registry import get_env, known_envs, register_env, unregister_env

__all__ = [
    "DatasetSettings",
    "Environment",
    "TurnResult",
    "get_env",
    "known_envs",
    "multi_turn_env",
    "register_env",
    "single_turn_env",
    "tool_env",
    "unregister_env",
]
