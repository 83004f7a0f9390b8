"""Any task without debate: several replies per question, advantages within the question, one step per batch.

python -m recipes.single_turn
python -m recipes.single_turn task=summary reward_fn=compression:0.5,rouge:0.3
python -m recipes.single_turn task=summary dataset=cnn_dailymail model_name=Qwen/Qwen3-4B-Instruct-2507
"""

from __future__ import annotations

from typing import Literal

import chz

from recipes.common import (
    CommonConfig,
    SamplingKeys,
    check_groups,
    dataset_label,
    loss_config,
    open_log_path,
    resolve_model,
)
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.rl import train
from tinker_cookbook.rl.data_processing import AdvantageConfig
from tinker_cookbook.runs.outcome import print_rl_changes
from tinker_cookbook.tasks.registry import get_task
from tinker_cookbook.tasks.single_turn import SingleTurnDatasetBuilder, TaskEvaluatorBuilder

RECIPE = "single_turn"


@chz.chz(typecheck=True)
class CLIConfig(CommonConfig, SamplingKeys):
    """Keys of `python -m recipes.single_turn`."""

    task: str = chz.field(default="qa", doc="qa or summary")
    dataset: str | None = chz.field(
        default=None, doc="shipped name (qa: arithmetic, test; summary: articles), a .jsonl file, or a hub dataset id"
    )
    test_dataset: str | None = chz.field(default=None, doc="held-out items, if the dataset has no test split")
    reward_fn: str | None = chz.field(
        default=None, doc="reward spec, e.g. compression:0.5,rouge:0.3; default: the task's own"
    )
    num_rollouts: int = chz.field(default=64, doc="rollouts per batch", validator=chz.validators.gt(0))
    num_groups: int = chz.field(default=8, doc="questions per batch", validator=chz.validators.gt(0))
    baseline: Literal["mean", "zscore", "constant"] = chz.field(
        default="zscore",
        doc="advantage: reward minus mean, z-score, or 1 for every accepted reply (rejection sampling)",
    )
    accept_min_reward: float | None = chz.field(default=None, doc="train only on replies with at least this reward")
    accept_require_parse: bool = chz.field(default=False, doc="train only on replies whose answer could be read")
    loss_fn: str = chz.field(default="importance_sampling", doc="importance_sampling or ppo")
    num_substeps: int = chz.field(default=1, doc="optimizer steps per batch", validator=chz.validators.gt(0))
    on_zero_advantages: train.ZeroAdvantages = chz.field(default="raise", doc="raise, or skip the step and count it")
    max_eval_items: int = chz.field(default=100, doc="questions per evaluation", validator=chz.validators.gt(0))
    learning_rate: float = chz.field(default=2e-3, doc="Adam's learning rate (real models: 1e-5 to 1e-4)")
    max_steps: int = chz.field(default=20, doc="number of batches", validator=chz.validators.gt(0))
    eval_every: int = chz.field(default=10, doc="evaluate every n steps and at the end; 0: never")


def build_config(cli: CLIConfig) -> train.Config:
    """The run's full config. Raises ConfigurationError for whatever can be wrong before a model is loaded."""
    group_size = check_groups(cli.num_rollouts, cli.num_groups, multiple=1)
    task = get_task(cli.task, cli.reward_fn)
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
    )
    dataset_builder.check()
    train_questions = TaskEvaluatorBuilder(
        name="train_questions",
        task=cli.task,
        dataset=cli.dataset,
        reward_fn=cli.reward_fn,
        model_name=model,
        renderer_name=renderer_name,
        max_items=cli.max_eval_items,
        max_tokens=cli.max_tokens,
        temperature=cli.temperature,
        seed=cli.seed,
    )
    config = train.Config(
        learning_rate=cli.learning_rate,
        dataset_builder=dataset_builder,
        model_name=model,
        recipe_name=RECIPE,
        max_tokens=cli.max_tokens,
        log_path="",
        backend=cli.backend,
        base_url=cli.base_url,
        lora_rank=cli.lora_rank,
        temperature=cli.temperature,
        loss_fn=cli.loss_fn,
        loss_fn_config=loss_config(cli, cli.temperature),
        advantage=AdvantageConfig(baseline=cli.baseline, per_token=True),
        on_zero_advantages=cli.on_zero_advantages,
        num_substeps=cli.num_substeps,
        seed=cli.seed,
        eval_every=cli.eval_every,
        save_every=cli.save_every,
        evaluator_builders=[train_questions],
        load_checkpoint_path=cli.load_checkpoint_path,
        wandb_project=cli.wandb_project,
        wandb_name=cli.wandb_name,
    )
    train.check_config(config)
    label = dataset_label(cli.dataset, task.default_dataset)
    parts = (f"n{cli.num_rollouts}", f"g{cli.num_groups}", "single-turn", cli.task, label)
    return chz.replace(config, log_path=open_log_path(cli, RECIPE, *parts))


async def main(cli: CLIConfig) -> None:
    config = build_config(cli)
    await train.main(config)
    print_rl_changes(config.log_path, ["task_reward", "correct"])


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
