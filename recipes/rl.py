"""Reinforcement learning on any environment: a shipped one by name, or a class or function in a file.

    python -m recipes.rl
    python -m recipes.rl env=twenty_questions env.num_things=3
    python -m recipes.rl env=my_envs.py:Guess env.highest=20 model_name=Qwen/Qwen3-4B-Instruct-2507
    python -m recipes.rl env=my_envs.py:Guess play=True
    python -m recipes.rl env=reasoning_gym:leg_counting,basic_arithmetic:2 env.curriculum=True

docs/environments.md shows how to write such a class or function, and how a package offers one. env.key=value is short
for env_args.key=value. A shipped environment takes the keys `env` of its recipe, but has no supervised stage;
warm_up_data=FILE provides conversations for one.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import chz

from recipes import anchors, code_rl, guess_number, tool_use, twenty_questions
from recipes.common import for_model, prompt_room
from recipes.rl_common import train_and_show, train_config
from recipes.warm_up import GameConfig, WarmUpDataConfig, given_conversations, warm_up_on
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.env import DatasetSettings, Environment, get_env, known_envs, multi_turn_env, register_env
from tinker_cookbook.env.arguments import fill_with_args
from tinker_cookbook.env.packages import TAKES_NAMES
from tinker_cookbook.env.shipped.code.code_env import CodeProblems
from tinker_cookbook.env.shipped.code.lines import CodeLines
from tinker_cookbook.env.shipped.terminal.terminal_env import Terminal
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl import train
from tinker_cookbook.rl.play_w_env import play_episode
from tinker_cookbook.rl.types import RLDatasetBuilder
from tinker_cookbook.runs.outcome import RunSummary
from tinker_cookbook.tokenizer_utils import get_tokenizer

RECIPE = "rl"


def _with_args(env: type[Environment], name: str, **args: Any) -> Environment:
    takes = chz.chz_fields(env)
    if unknown := [key for key in args if key not in takes]:
        known = ", ".join(f"env_args.{key}" for key in takes)
        raise ConfigurationError(f"env_args.{unknown[0]}: is unknown to {name}; it takes {known}")
    return fill_with_args(env, env(), args)


for _name, _env in (
    (guess_number.RECIPE, guess_number.GuessNumber),
    (twenty_questions.RECIPE, twenty_questions.TwentyQuestions),
    (tool_use.RECIPE, tool_use.ToolUse),
    (code_rl.RECIPE, CodeProblems),
    ("code_lines", CodeLines),
    ("terminal", Terminal),
):
    register_env(_name, partial(_with_args, _env, _name))
for _name, _episode in anchors.EPISODES.items():
    register_env(_name, partial(multi_turn_env, _episode))


@chz.chz(typecheck=True)
class CLIConfig(WarmUpDataConfig, GameConfig, max_steps=12, num_test=32):
    """Keys of `python -m recipes.rl`."""

    env: str | Callable[..., Any] | Environment = chz.field(
        default=guess_number.RECIPE,
        doc=f"{', '.join(known_envs())}; or a custom one: an installed package, a module, a folder, path/file.py:object",
    )
    env_args: dict[str, Any] = chz.field(default_factory=dict, doc="arguments of the environment, as env.name=value")


def make_dataset_builder(cli: CLIConfig) -> RLDatasetBuilder:
    """The environment of resolved keys, checked. Raises ConfigurationError for one that `get_env` does not accept."""
    settings = cli.fill(DatasetSettings, num_batches=cli.max_steps, max_prompt_tokens=prompt_room(cli))
    return get_env(cli.env, cli.env_args).build(settings)


def build_config(cli: CLIConfig) -> train.Config:
    """The run's full config from resolved keys."""
    name = _short(cli.env) if isinstance(cli.env, str) else "own"
    size = f"{cli.groups_per_batch}x{cli.group_size}"
    return train_config(cli, RECIPE, make_dataset_builder(cli), [name, size])


def _short(env: str) -> str:
    """An environment's part of its run's name."""
    first, _, names = env.partition(":")
    if first in TAKES_NAMES:
        return first if len(names) > 30 or not names else re.sub(r"[^a-z0-9_]+", "-", names)
    return re.split(r"[:/\\.]", env.removesuffix(".py").rstrip("/\\"))[-1]


async def main(cli: CLIConfig) -> RunSummary | None:
    cli = for_model(cli)
    if cli.play:
        await play_episode(make_dataset_builder(cli), get_tokenizer(cli.model_name))
        return None
    first = given_conversations(cli)
    return await train_and_show(await warm_up_on(cli, build_config(cli), first), ["reward/total", "turns_per_episode"])


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
