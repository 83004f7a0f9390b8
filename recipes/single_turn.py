"""Any task without debate: several replies per question, advantages within the question, one step per batch.

python -m recipes.single_turn
python -m recipes.single_turn task=summary reward_fn=compression:0.5,rouge:0.3
python -m recipes.single_turn task=summary dataset=cnn_dailymail model_name=Qwen/Qwen3-4B-Instruct-2507
"""

import chz

from recipes import flags
from recipes.common import for_model
from recipes.rl_common import (
    TaskConfig,
    check_groups,
    question_evaluators,
    questions_of,
    run_folder,
    train_and_show,
    train_config,
)
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.env.single_turn import AcceptanceKeys, SingleTurn
from tinker_cookbook.rl import train
from tinker_cookbook.rl.advantages import AdvantageConfig
from tinker_cookbook.runs.outcome import RunSummary

RECIPE = "single_turn"
OF_ALL, OF_ACCEPTED = (AdvantageConfig(baseline=name, scale="sequence") for name in ("zscore", "constant"))
"""Replies that a threshold has accepted all train with the same weight: with rewards of 0 and 1 they do not differ."""


@chz.chz(typecheck=True)
class CLIConfig(AcceptanceKeys, TaskConfig):
    """Keys of `python -m recipes.single_turn`."""


def build_config(cli: CLIConfig) -> train.Config:
    """The run's full config. Raises ConfigurationError for every problem that can be found before a model is loaded."""
    group_size = check_groups(cli.num_rollouts, cli.num_groups, multiple=1)
    folder = run_folder(cli, "single-turn")
    cli = for_model(cli)
    dataset_builder = questions_of(cli, cli.fill(SingleTurn), group_size)
    advantage = OF_ALL if cli.accept_min_reward is None else OF_ACCEPTED
    return train_config(cli, RECIPE, dataset_builder, folder, question_evaluators(cli), advantage)


async def main(cli: CLIConfig) -> RunSummary:
    return await train_and_show(build_config(cli), ["task_reward", "correct"])


if __name__ == "__main__":
    run_recipe(CLIConfig, main, prepare=flags.read_by("single_turn"))
