"""Environments in a few lines: prompts and rewards, from a function or a class, for any model.

    single_turn_env(rows, reward)            questions, and a function that scores the replies
    tool_env(rows, reward, tools=[add])      the same, with typed functions that the policy may call
    multi_turn_env(Guess)                    a class that takes each reply and returns what is new

Each returns an Environment; its `dataset_builder(model_name)` goes into `rl.train.Config`. `get_env` and `load` look
environments up by name, and also accept what a package's `load_environment(**args)` returns (`contract`). `shipped`
has the library's own.
"""

from typing import TYPE_CHECKING

from tinker_cookbook.utils.lazy import exports

if TYPE_CHECKING:
    from tinker_cookbook.env.dataset import DatasetSettings, Environment
    from tinker_cookbook.env.episodes import TurnResult, multi_turn_env
    from tinker_cookbook.env.questions import single_turn_env, tool_env
    from tinker_cookbook.env.registry import get_env, known_envs, load, register_env, unregister_env
    from tinker_cookbook.env.scoring import Rubric

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

__getattr__, __dir__ = exports(
    __name__,
    {
        "dataset": "DatasetSettings Environment",
        "episodes": "TurnResult multi_turn_env",
        "questions": "single_turn_env tool_env",
        "registry": "get_env known_envs load register_env unregister_env",
        "scoring": "Rubric",
    },
)
