"""A judge whose probabilities of the verdicts are trained on labelled debates, by a proper scoring rule.

    python -m recipes.debate_judge.decisions
    python -m recipes.debate_judge.decisions debates=runs/my_debates rule=brier model_name=Qwen/Qwen3-4B-Instruct-2507

Use its checkpoint with judge=decision judge.weights.load_checkpoint_path=tinker://...; with debate_train=soft_judge a seat's
reward is its probability to win.
"""

import chz

from recipes.common import dataset_label, for_model, run_config, tiny_debate
from recipes.debate_judge.data import SHIPPED, JudgeKeys, debates_path
from recipes.decisions import DecisionKeys, train_and_show
from recipes.sl_common import chat_settings
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.debate.judge_training import JudgeDecisionBuilder
from tinker_cookbook.decisions import train
from tinker_cookbook.runs.outcome import RunSummary

RECIPE = "debate_judge_decisions"


@chz.chz(typecheck=True)
class CLIConfig(JudgeKeys, DecisionKeys, model_name=tiny_debate, num_epochs=4, batch_size=16, eval_every=10):
    """Keys of `python -m recipes.debate_judge.decisions`."""


def build_config(cli: CLIConfig) -> train.Config:
    """The run's full config. Raises ConfigurationError for every problem that can be found before a model is loaded."""
    cli = for_model(cli)
    builder = cli.fill(JudgeDecisionBuilder, debates=debates_path(cli), common_config=chat_settings(cli))
    folder = [cli.rule, dataset_label(cli.debates, SHIPPED)]
    return run_config(cli, train.Config, train.check_config, RECIPE, folder, dataset_builder=builder)


async def main(cli: CLIConfig) -> RunSummary:
    return await train_and_show(build_config(cli))


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
