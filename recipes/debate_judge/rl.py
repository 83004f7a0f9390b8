"""A judge that is rewarded for the right verdict on labelled debates, shown in both orders of the seats; it is right more often.

    python -m recipes.debate_judge.rl
    python -m recipes.debate_judge.rl load_checkpoint_path=tinker://<run>/weights/<name> debates=runs/my_debates
    python -m recipes.debate_judge.rl model_name=Qwen/Qwen3-4B-Instruct-2507 debates=debates.jsonl group_size=16

Labels come from questions with known answers; then use the judge on others (`judge=lm
judge.weights.load_checkpoint_path=`).
"""

import chz

from recipes.common import TINY_DEBATE, base_model, dataset_label
from recipes.debate_judge.data import SHIPPED, JudgeKeys, debates_path
from recipes.rl_common import RLConfig, dataset_of, for_model, train_and_show, train_config
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.debate.judge_training import JudgeTraining
from tinker_cookbook.rl import train
from tinker_cookbook.runs.outcome import RunSummary

RECIPE = "debate_judge_rl"


@chz.chz(typecheck=True)
class CLIConfig(JudgeKeys, RLConfig):
    """Keys of `python -m recipes.debate_judge.rl`."""

    model_name: str = base_model(TINY_DEBATE)
    groups_per_batch: int = chz.field(default=16, doc="debates per step", validator=chz.validators.gt(0))
    group_size: int = chz.field(default=8, doc="verdicts on each", validator=chz.validators.gt(1))


def build_config(cli: CLIConfig) -> train.Config:
    """The run's full config. Raises ConfigurationError for every problem that can be found before a model is loaded."""
    cli = for_model(cli)
    builder = dataset_of(cli, cli.fill(JudgeTraining, debates=debates_path(cli)), num_test=None)
    return train_config(cli, RECIPE, builder, [dataset_label(cli.debates, SHIPPED)])


async def main(cli: CLIConfig) -> RunSummary:
    return await train_and_show(build_config(cli), ["correct", "parsed", "first_seat"])


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
