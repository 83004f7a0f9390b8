"""Any task without debate: several replies per question, advantages within the question, one step per batch.

python -m recipes.single_turn
python -m recipes.single_turn task=summary reward_fn=compression:0.5,rouge:0.3
python -m recipes.single_turn task=summary dataset=cnn_dailymail model_name=Qwen/Qwen3-4B-Instruct-2507
"""

import chz

from recipes.common import (
    TaskConfig,
    check_groups,
    prompt_room,
    resolve_model,
    run_folder,
    train_config,
    train_questions_evaluator,
)
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.rl import train
from tinker_cookbook.rl.advantages import AdvantageConfig, Baseline
from tinker_cookbook.runs.outcome import print_rl_changes
from tinker_cookbook.tasks.single_turn import SingleTurnDatasetBuilder

RECIPE = "single_turn"


@chz.chz(typecheck=True)
class CLIConfig(TaskConfig):
    """Keys of `python -m recipes.single_turn`."""

    baseline: Baseline | None = chz.field(
        default=None,
        doc="what a reward is compared with: mean, zscore (default), leave_one_out, role, or constant: 1 for every accepted "
        "reply (rejection sampling)",
    )
    accept_min_reward: float | None = chz.field(default=None, doc="train only on replies with at least this reward")
    accept_require_parse: bool = chz.field(default=False, doc="train only on replies whose answer could be read")


def build_config(cli: CLIConfig) -> train.Config:
    """The run's full config. Raises ConfigurationError for whatever can be wrong before a model is loaded."""
    group_size = check_groups(cli.num_rollouts, cli.num_groups, multiple=1)
    folder = run_folder(cli, "single-turn")
    model, renderer_name = resolve_model(cli)
    dataset_builder = SingleTurnDatasetBuilder(
        task=cli.task,
        dataset=cli.dataset,
        test_dataset=cli.test_dataset,
        reward_fn=cli.reward_fn,
        model_name=model,
        renderer_name=renderer_name,
        num_groups=cli.num_groups,
        group_size=group_size,
        num_batches=cli.max_steps,
        seed=cli.seed,
        accept_min_reward=cli.accept_min_reward,
        accept_require_parse=cli.accept_require_parse,
        max_test_items=cli.max_eval_items,
        max_prompt_tokens=prompt_room(cli, model),
    )
    dataset_builder.check()
    advantage = AdvantageConfig(baseline="zscore", scale="sequence")
    evaluator = train_questions_evaluator(cli, model, renderer_name)
    return train_config(cli, RECIPE, model, dataset_builder, folder, advantage, [evaluator])


async def main(cli: CLIConfig) -> None:
    config = build_config(cli)
    await train.main(config)
    print_rl_changes(config.log_path, ["task_reward", "correct"])


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
