"""Debate RS->GRPO: two copies of the policy argue, a judge picks winners, winners are trained on the task's reward.

Each batch takes num_groups questions with num_rollouts / num_groups rollouts each. Rollouts 2i and 2i + 1 of a question
debate: both answer (round 1, which fixes the answer), then each sees the other's turn and argues twice. The judge decides,
losers are dropped, and the winners of each question are trained with GRPO on the reward of their round-1 answer.

    python -m recipes.debate_rs_grpo
    python -m recipes.debate_rs_grpo task=summary reward_fn=compression:0.5,rouge:0.3 judge=mock
    python -m recipes.debate_rs_grpo model_name=Qwen/Qwen3-4B-Instruct-2507 task=qa dataset=my_questions.jsonl
"""

import chz

from recipes.common import settle
from recipes.rl_common import (
    TaskConfig,
    check_groups,
    run_folder,
    train_and_show,
    train_config,
    train_questions_evaluator,
)
from tinker_cookbook import model_info
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.config_tree import with_default
from tinker_cookbook.debate.dataset import ADVANTAGES, DebateDatasetBuilder, DebateTrain
from tinker_cookbook.debate.judges import JUDGE_NAMES, JudgeConfig
from tinker_cookbook.debate.prompts import CONFIDENCE_REQUEST
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl import train
from tinker_cookbook.rl.advantages import AdvantageConfig
from tinker_cookbook.weights_config import WeightsConfig

RECIPE = "debate_rs_grpo"


@chz.chz(typecheck=True)
class CLIConfig(TaskConfig):
    """Keys of `python -m recipes.debate_rs_grpo`."""

    judge: str = chz.field(default="mock", doc=JUDGE_NAMES)
    judge_model_path: str | None = chz.field(
        default=None, doc="judge=lm: weights of the judge; default: the base model"
    )
    judge_max_tokens: int = chz.field(default=96, doc="judge=lm: longest verdict", validator=chz.validators.gt(0))
    judge_temperature: float = chz.field(
        default=0.3, doc="judge=lm: sampling temperature", validator=chz.validators.ge(0)
    )
    debate_train: DebateTrain = chz.field(default="rs_grpo", doc="rs_grpo, or rejection (winners only, no reward)")
    advantage: AdvantageConfig = with_default(TaskConfig, "advantage", ADVANTAGES["rs_grpo"])


def build_config(cli: CLIConfig) -> train.Config:
    """The run's full config. Raises ConfigurationError for whatever can be wrong before a model is loaded."""
    group_size = check_groups(cli.num_rollouts, cli.num_groups, multiple=2)
    if cli.debate_train == "rejection":
        if cli.preset is not None or cli.advantage != ADVANTAGES["rs_grpo"]:
            raise ConfigurationError(
                "debate_train=rejection trains each winner with the same weight, whatever its reward; leave preset and "
                "advantage out, or use debate_train=rs_grpo"
            )
        cli = chz.replace(cli, advantage=ADVANTAGES["rejection"])
    folder = run_folder(cli, f"debate-{cli.debate_train}")
    cli = settle(cli)
    dataset_builder = cli.fill(
        DebateDatasetBuilder,
        judge=cli.fill(
            JudgeConfig,
            name=cli.judge,
            weights=cli.fill(WeightsConfig, base_model=cli.model_name, load_checkpoint_path=cli.judge_model_path),
            max_tokens=cli.judge_max_tokens,
            temperature=cli.judge_temperature,
        ),
        group_size=group_size,
        num_batches=cli.max_steps,
        max_test_items=cli.max_eval_items,
        context_window=model_info.get_context_length(cli.model_name),
    )
    dataset_builder.check()
    return train_config(cli, RECIPE, dataset_builder, folder, [train_questions_evaluator(cli, CONFIDENCE_REQUEST)])


async def main(cli: CLIConfig) -> None:
    await train_and_show(build_config(cli), ["correct", "task_reward"])


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
