"""Debate RS->GRPO: two copies of the policy argue, a judge picks winners, winners are trained on the task's reward.

Each batch takes num_groups questions with num_rollouts / num_groups rollouts each. Rollouts 2i and 2i + 1 of a question
debate: both answer (round 1, which fixes the answer), then each sees the other's turn and argues twice. The judge decides,
losers are dropped, and the winners of each question are trained with GRPO on the reward of their round-1 answer.

    python -m recipes.debate_rs_grpo
    python -m recipes.debate_rs_grpo task=summary reward_fn=compression:0.5,rouge:0.3 judge=mock
    python -m recipes.debate_rs_grpo model_name=Qwen/Qwen3-4B-Instruct-2507 task=qa dataset=my_questions.jsonl
"""

from __future__ import annotations

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
from tinker_cookbook.debate.dataset import ADVANTAGES, DebateDatasetBuilder, DebateTrain
from tinker_cookbook.debate.judge_config import JUDGE_NAMES, JudgeConfig, check_judge
from tinker_cookbook.debate.prompts import CONFIDENCE_REQUEST
from tinker_cookbook.rl import train
from tinker_cookbook.runs.outcome import print_rl_changes
from tinker_cookbook.tasks.registry import get_task
from tinker_cookbook.tasks.single_turn import TaskEvaluatorBuilder

RECIPE = "debate_rs_grpo"


@chz.chz(typecheck=True)
class CLIConfig(CommonConfig, SamplingKeys):
    """Keys of `python -m recipes.debate_rs_grpo`."""

    task: str = chz.field(default="qa", doc="qa or summary")
    dataset: str | None = chz.field(
        default=None, doc="shipped name (qa: arithmetic, test; summary: articles), a .jsonl file, or a hub dataset id"
    )
    test_dataset: str | None = chz.field(default=None, doc="held-out items, if the dataset has no test split")
    reward_fn: str | None = chz.field(
        default=None, doc="reward spec, e.g. compression:0.5,rouge:0.3; default: the task's own"
    )
    judge: str = chz.field(default="mock", doc=JUDGE_NAMES)
    judge_model_path: str | None = chz.field(
        default=None, doc="judge=lm: weights of the judge; default: the base model"
    )
    judge_max_tokens: int = chz.field(default=96, doc="judge=lm: longest verdict", validator=chz.validators.gt(0))
    judge_temperature: float = chz.field(
        default=0.3, doc="judge=lm: sampling temperature", validator=chz.validators.ge(0)
    )
    debate_train: DebateTrain = chz.field(default="rs_grpo", doc="rs_grpo, or rejection (winners only, no reward)")
    num_rollouts: int = chz.field(default=64, doc="rollouts per batch", validator=chz.validators.gt(0))
    num_groups: int = chz.field(default=8, doc="questions per batch", validator=chz.validators.gt(0))
    loss_fn: str = chz.field(default="importance_sampling", doc="importance_sampling or ppo")
    num_substeps: int = chz.field(default=1, doc="optimizer steps per batch", validator=chz.validators.gt(0))
    on_zero_advantages: train.ZeroAdvantages = chz.field(default="raise", doc="raise, or skip the step and count it")
    max_eval_items: int = chz.field(default=100, doc="questions per evaluation", validator=chz.validators.gt(0))
    learning_rate: float = chz.field(default=2e-3, doc="Adam's learning rate (real models: 1e-5 to 1e-4)")
    max_steps: int = chz.field(default=20, doc="number of batches", validator=chz.validators.gt(0))
    eval_every: int = chz.field(default=10, doc="evaluate every n steps and at the end; 0: never")


def build_config(cli: CLIConfig) -> train.Config:
    """The run's full config. Raises ConfigurationError for whatever can be wrong before a model is loaded."""
    group_size = check_groups(cli.num_rollouts, cli.num_groups, multiple=2)
    task = get_task(cli.task, cli.reward_fn)
    check_judge(cli.judge)
    model, renderer_name = resolve_model(cli)
    judge = JudgeConfig(
        name=cli.judge,
        model_name=model,
        model_path=cli.judge_model_path,
        renderer_name=renderer_name,
        backend=cli.backend,
        base_url=cli.base_url,
        max_tokens=cli.judge_max_tokens,
        temperature=cli.judge_temperature,
        seed=cli.seed,
    )
    dataset_builder = DebateDatasetBuilder(
        task=cli.task,
        dataset=cli.dataset,
        test_dataset=cli.test_dataset,
        reward_fn=cli.reward_fn,
        model_name=model,
        renderer_name=renderer_name,
        judge=judge,
        num_groups=cli.num_groups,
        group_size=group_size,
        num_batches=cli.max_steps,
        seed=cli.seed,
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
        extra_request=CONFIDENCE_REQUEST,
        max_items=cli.max_eval_items,
        max_tokens=cli.max_tokens,
        temperature=cli.temperature,
        seed=cli.seed,
    )
    label = dataset_label(cli.dataset, task.default_dataset)
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
        advantage=ADVANTAGES[cli.debate_train],
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
    parts = (f"n{cli.num_rollouts}", f"g{cli.num_groups}", f"debate-{cli.debate_train}", cli.task, label)
    return chz.replace(config, log_path=open_log_path(cli, RECIPE, *parts))


async def main(cli: CLIConfig) -> None:
    config = build_config(cli)
    await train.main(config)
    print_rl_changes(config.log_path, ["correct", "task_reward"])


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
