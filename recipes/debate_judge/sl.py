"""A judge that imitates the right verdict on labelled debates, shown in both orders of the seats; held-out loss goes down.

    python -m recipes.debate_judge.sl
    python -m recipes.debate_judge.sl debates=runs/my_debates model_name=Qwen/Qwen3-4B-Instruct-2507

Use its checkpoint with judge=lm judge.weights.load_checkpoint_path=tinker://...; recipes.debate_judge.rl can continue
from it.
"""

import chz

from recipes.common import dataset_label, for_model, tiny_debate
from recipes.debate_judge.data import SHIPPED, JudgeKeys, debates_path
from recipes.sl_common import SLConfig, chat_settings, train_and_show, train_config
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.debate.judge_training import JudgeChatBuilder
from tinker_cookbook.runs.outcome import RunSummary
from tinker_cookbook.supervised import train

RECIPE = "debate_judge_sl"


@chz.chz(typecheck=True)
class CLIConfig(JudgeKeys, SLConfig, model_name=tiny_debate, max_length=1024):
    """Keys of `python -m recipes.debate_judge.sl`."""


def build_config(cli: CLIConfig) -> train.Config:
    """The run's full config. Raises ConfigurationError for every problem that can be found before a model is loaded."""
    cli = for_model(cli)
    builder = cli.fill(JudgeChatBuilder, debates=debates_path(cli), common_config=chat_settings(cli))
    return train_config(cli, RECIPE, builder, dataset_label(cli.debates, SHIPPED))


async def main(cli: CLIConfig) -> RunSummary:
    return await train_and_show(build_config(cli))


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
