"""Any task without debate: several replies per question, advantages within the question, one step per batch.

python -m recipes.single_turn
python -m recipes.single_turn task=summary reward_fn=compression:0.5,rouge:0.3
python -m recipes.single_turn task=summary dataset=cnn_dailymail model_name=Qwen/Qwen3-4B-Instruct-2507
"""

import chz

from recipes.common import prompt_room, settle
from recipes.rl_common import (
    TaskConfig,
    check_groups,
    graded_evaluators,
    run_folder,
    train_and_show,
    train_config,
    train_questions_evaluator,
)
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.config_tree import with_default
from tinker_cookbook.rl import train
from tinker_cookbook.rl.advantages import AdvantageConfig
from tinker_cookbook.tasks.single_turn import SingleTurnDatasetBuilder

RECIPE = "single_turn"


@chz.chz(typecheck=True)
class CLIConfig(TaskConfig):
    """Keys of `python -m recipes.single_turn`."""

    accept_min_reward: float | None = chz.field(default=None, doc="train only on replies with at least this reward")
    accept_require_parse: bool = chz.field(default=False, doc="train only on replies whose answer could be read")
    advantage: AdvantageConfig = with_default(
        TaskConfig, "advantage", AdvantageConfig(baseline="zscore", scale="sequence")
    )


def build_config(cli: CLIConfig) -> train.Config:
    """The run's full config. Raises ConfigurationError for whatever can be wrong before a model is loaded."""
    group_size = check_groups(cli.num_rollouts, cli.num_groups, multiple=1)
    folder = run_folder(cli, "single-turn")
    cli = settle(cli)
    dataset_builder = cli.fill(
        SingleTurnDatasetBuilder,
        group_size=group_size,
        num_batches=cli.max_steps,
        max_test_items=cli.max_eval_items,
        max_prompt_tokens=prompt_room(cli),
    )
    dataset_builder.check()
    return train_config(cli, RECIPE, dataset_builder, folder, [train_questions_evaluator(cli), *graded_evaluators(cli)])


async def main(cli: CLIConfig) -> None:
    await train_and_show(build_config(cli), ["task_reward", "correct"])


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
