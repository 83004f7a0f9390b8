"""Debate RS->GRPO: two copies of the policy argue, a judge picks winners, winners are trained on the task's reward.

Each batch takes num_groups questions with num_rollouts / num_groups rollouts each. Rollouts 2i and 2i + 1 of a question
debate: both answer (round 1, which fixes the answer), then each sees the other's turn and argues twice. The judge decides,
losers are dropped, and the winners of each question are trained with GRPO on the reward of their round-1 answer.

    python -m recipes.debate_rs_grpo
    python -m recipes.debate_rs_grpo task=summary reward_fn=compression:0.5,rouge:0.3 judge=mock
    python -m recipes.debate_rs_grpo model_name=Qwen/Qwen3-4B-Instruct-2507 task=qa dataset=my_questions.jsonl
"""

import chz

from recipes.common import (
    TaskConfig,
    check_groups,
    max_tokens,
    resolve_model,
    run_folder,
    train_config,
    train_questions_evaluator,
)
from tinker_cookbook import model_info
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.debate.dataset import ADVANTAGES, DebateDatasetBuilder, DebateTrain
from tinker_cookbook.debate.judge_config import JUDGE_NAMES, JudgeConfig
from tinker_cookbook.debate.prompts import CONFIDENCE_REQUEST
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl import train
from tinker_cookbook.runs.outcome import print_rl_changes
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


def build_config(cli: CLIConfig) -> train.Config:
    """The run's full config. Raises ConfigurationError for whatever can be wrong before a model is loaded."""
    group_size = check_groups(cli.num_rollouts, cli.num_groups, multiple=2)
    if cli.debate_train == "rejection" and (cli.preset is not None or cli.baseline is not None):
        raise ConfigurationError(
            "debate_train=rejection trains each winner with the same weight, whatever its reward; leave preset and baseline out, "
            "or use debate_train=rs_grpo"
        )
    folder = run_folder(cli, f"debate-{cli.debate_train}")
    model, renderer_name = resolve_model(cli)
    dataset_builder = DebateDatasetBuilder(
        task=cli.task,
        dataset=cli.dataset,
        test_dataset=cli.test_dataset,
        reward_fn=cli.reward_fn,
        model_name=model,
        renderer_name=renderer_name,
        judge=JudgeConfig(
            name=cli.judge,
            weights=WeightsConfig(
                base_model=model,
                load_checkpoint_path=cli.judge_model_path,
                renderer_name=renderer_name,
                backend=cli.backend,
                base_url=cli.base_url,
            ),
            max_tokens=cli.judge_max_tokens,
            temperature=cli.judge_temperature,
            seed=cli.seed,
        ),
        num_groups=cli.num_groups,
        group_size=group_size,
        num_batches=cli.max_steps,
        seed=cli.seed,
        max_test_items=cli.max_eval_items,
        max_tokens=max_tokens(cli),
        context_window=model_info.get_context_length(model),
    )
    dataset_builder.check()
    evaluator = train_questions_evaluator(cli, model, renderer_name, CONFIDENCE_REQUEST)
    return train_config(cli, RECIPE, model, dataset_builder, folder, ADVANTAGES[cli.debate_train], [evaluator])


async def main(cli: CLIConfig) -> None:
    config = build_config(cli)
    await train.main(config)
    print_rl_changes(config.log_path, ["correct", "task_reward"])


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
