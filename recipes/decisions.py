"""Probabilities of given choices as a policy, trained by a proper scoring rule until they are those of the outcomes.

    python -m recipes.decisions                                      # draws from bags of marbles, whose probabilities are known
    python -m recipes.decisions rule=brier seed=1
    python -m recipes.decisions dataset=mine.jsonl model_name=Qwen/Qwen3-4B-Instruct-2507

A line of the file is {"question": "...", "choices": ["...", "..."], "outcome": "..."}, with "messages" in place of the question
where there is more to say, and with "probabilities", a list, in place of the outcome where they are known. A choice's score is
the sum of its tokens' logprobs; the softmax over the choices is the decision. docs/decisions.md has results.
"""

import chz

from recipes.common import TINY_LEARNING_RATE, CommonConfig, Rates, dataset_label, for_model, run_config
from recipes.sl_common import HeldOutKeys, chat_settings
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.decisions import train
from tinker_cookbook.decisions.data import DecisionDatasetBuilder, DecisionRows
from tinker_cookbook.decisions.rules import METRICS
from tinker_cookbook.runs.outcome import RunSummary, print_changes
from tinker_cookbook.supervised.types import ExampleKeys
from tinker_cookbook.utils.fields import docs

RECIPE = "decisions"
RATES = Rates(TINY_LEARNING_RATE, 1e-4)
"""Lower than in supervised learning for models that are not tiny, because the loss only orders a few choices."""
SHIPPED = "marbles"


@chz.chz(typecheck=True)
class DecisionKeys(train.DecisionOptions, ExampleKeys, CommonConfig, rates=RATES, max_length=1024):
    """Keys of the recipes that train decisions."""

    DOCS = docs(
        batch_size="decisions per step",
        max_length="longest question with a choice, in tokens; nothing is cut off; None: no limit",
    )


@chz.chz(typecheck=True)
class CLIConfig(HeldOutKeys, DecisionRows, DecisionKeys, dataset=SHIPPED, num_epochs=2, batch_size=64, eval_every=20):
    """Keys of `python -m recipes.decisions`."""


def build_config(cli: CLIConfig) -> train.Config:
    """The run's full config. Raises ConfigurationError for every problem that can be found before a model is loaded."""
    cli = for_model(cli)
    builder = cli.fill(DecisionDatasetBuilder, common_config=chat_settings(cli), shuffle_seed=cli.seed)
    label = dataset_label(cli.dataset, SHIPPED) if isinstance(cli.dataset, str) else "own"
    return run_config(cli, train.Config, train.check_config, RECIPE, [cli.rule, label], dataset_builder=builder)


async def train_and_show(config: train.Config) -> RunSummary:
    """Run the training, then print what it changed."""
    summary = await train.main(config)
    show_changes(config.log_path)
    return summary


def show_changes(log_path: str) -> None:
    """Print the scores before and after."""
    print_changes(
        log_path, {f"test/{key}": "held out" for key in METRICS}, dict.fromkeys(METRICS[:3], "training batches")
    )


async def main(cli: CLIConfig) -> RunSummary:
    return await train_and_show(build_config(cli))


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
