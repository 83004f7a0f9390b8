"""A judge that is rewarded for the right verdict on labelled debates, shown in both orders of the seats; it is right more often.

    python -m recipes.debate_judge.rl
    python -m recipes.debate_judge.rl load_checkpoint_path=tinker://<run>/weights/<name> debates=runs/my_debates
    python -m recipes.debate_judge.rl model_name=Qwen/Qwen3-4B-Instruct-2507 debates=debates.jsonl group_size=16

Labels come from questions with known answers; then use the judge on others (`judge=lm
judge.weights.load_checkpoint_path=`).
"""

import chz

from recipes.common import GroupKeys, dataset_label, for_model, tiny_debate
from recipes.debate_judge.data import SHIPPED, JudgeKeys, debates_path
from recipes.rl_common import RLConfig, dataset_of, train_and_show, train_config
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.debate.judge_training import JudgeTraining
from tinker_cookbook.rl import train
from tinker_cookbook.runs.outcome import RunSummary

RECIPE = "debate_judge_rl"


@chz.chz(typecheck=True)
class CLIConfig(JudgeKeys, GroupKeys, RLConfig, model_name=tiny_debate, groups_per_batch=16, num_test=1000):
    """Keys of `python -m recipes.debate_judge.rl`."""


def build_config(cli: CLIConfig) -> train.Config:
    """The run's full config. Raises ConfigurationError for every problem that can be found before a model is loaded."""
    cli = for_model(cli)
    builder = dataset_of(cli, cli.fill(JudgeTraining, debates=debates_path(cli)))
    return train_config(cli, RECIPE, builder, [dataset_label(cli.debates, SHIPPED)])


async def main(cli: CLIConfig) -> RunSummary:
    return await train_and_show(build_config(cli), ["correct", "parsed", "first_seat"])


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
