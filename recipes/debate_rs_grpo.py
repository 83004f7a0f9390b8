"""Debate RS->GRPO: two copies of the policy argue, a judge picks winners, winners are trained on the task's reward.

Each batch takes num_groups questions with num_rollouts / num_groups rollouts each. Rollouts 2i and 2i + 1 of a question
debate: both answer (round 1, which fixes the answer), then each sees the other's turn and argues twice. The judge decides,
losers are dropped, and the winners of each question are trained with GRPO on the reward of their round-1 answer. Other modes
train both sides, by the verdict, or both (`debate_train=`, docs/debate.md).

    python -m recipes.debate_rs_grpo
    python -m recipes.debate_rs_grpo debate_train=judge judge=scripted:truth
    python -m recipes.debate_rs_grpo debate_train=mixed debate_reward=judge:0.5,task:0.5,concession:0.2
    python -m recipes.debate_rs_grpo task=summary reward_fn=compression:0.5,rouge:0.3 judge=confidence
    python -m recipes.debate_rs_grpo judge=lm judge.temperature=0 judge.max_retries=3
    python -m recipes.debate_rs_grpo model_name=Qwen/Qwen3-4B-Instruct-2507 task=qa dataset=my_questions.jsonl
"""

import chz

from recipes import flags, rl_common
from recipes.common import for_model
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.debate.dataset import DebateKeys, Debates
from tinker_cookbook.debate.modes import get_mode
from tinker_cookbook.models import info as model_info
from tinker_cookbook.rl import train
from tinker_cookbook.runs.outcome import RunSummary
from tinker_cookbook.weights_config import WeightsConfig

RECIPE = "debate_rs_grpo"


@chz.chz(typecheck=True)
class CLIConfig(DebateKeys, rl_common.TaskConfig):
    """Keys of `python -m recipes.debate_rs_grpo`."""


def build_config(cli: CLIConfig) -> train.Config:
    """The run's full config. Raises ConfigurationError for every problem that can be found before a model is loaded."""
    group_size = rl_common.check_groups(cli.num_rollouts, cli.num_groups, multiple=cli.protocol.num_speakers)
    mode = get_mode(cli.debate_train)
    mode.check_advantage(rl_common.chosen_advantage(cli, mode.advantage))
    folder = rl_common.run_folder(cli, f"debate-{cli.debate_train}")
    cli = for_model(cli)
    policy = cli.fill(WeightsConfig, base_model=cli.model_name, load_checkpoint_path=None)
    env = cli.fill(
        Debates,
        judge=cli.judge.judging(policy),
        held_out_judge=cli.held_out_judge and cli.held_out_judge.judging(policy),
        context_window=model_info.get_context_length(cli.model_name),
    )
    questions = rl_common.questions_of(cli, env, group_size)
    evaluators = rl_common.question_evaluators(cli, env.added_request)
    return rl_common.train_config(cli, RECIPE, questions, folder, evaluators, mode.advantage)


async def main(cli: CLIConfig) -> RunSummary:
    return await rl_common.train_and_show(build_config(cli), ["correct", "task_reward"])


if __name__ == "__main__":
    run_recipe(CLIConfig, main, prepare=flags.read_by("debate"))
