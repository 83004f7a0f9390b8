"""Direct preference optimization (DPO) on pairs of replies, with held-out accuracy and margin before, during and after.

    python -m recipes.preference.train
    python -m recipes.preference.train dataset=my_pairs.jsonl dpo_beta=0.1 model_name=Qwen/Qwen3-4B-Instruct-2507
    python -m recipes.preference.train dataset=trl-lib/ultrafeedback_binarized prompt_column=None test_split=test

A line of the file is {"comparison": {"prompt_conversation": [{"role": "user", "content": "Hi"}], "completion_A":
[{"role": "assistant", "content": "Hello"}], "completion_B": [...]}, "label": "A"}. A Hugging Face dataset has columns prompt,
chosen and rejected.
"""

import chz

from recipes.common import TINY_LEARNING_RATE, Rates, dataset_label, for_model, run_config
from recipes.preference.data import SHIPPED, ComparisonConfig, comparison_source
from recipes.sl_common import chat_settings
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
from tinker_cookbook.runs.outcome import RunSummary, print_changes

RECIPE = "preference_dpo"
RATES = Rates(TINY_LEARNING_RATE, 1e-5)
"""Far below the rate of supervised learning, whatever the model: the loss only asks for a difference, and is soon flat."""
METRICS = ("dpo_loss", "accuracy", "margin")


@chz.chz(typecheck=True)
class CLIConfig(train_dpo.DPOOptions, ComparisonConfig, rates=RATES, num_epochs=3, eval_every=7):
    """Keys of `python -m recipes.preference.train`."""


def build_config(cli: CLIConfig) -> train_dpo.Config:
    """The run's full config. Raises ConfigurationError for every problem that can be found before a model is loaded."""
    cli = for_model(cli)
    pairs = DPODatasetBuilderFromComparisons(
        common_config=chat_settings(cli), comparison_builder=comparison_source(cli)
    )
    folder = [cli.loss_type, dataset_label(cli.dataset, SHIPPED)]
    return run_config(cli, train_dpo.Config, train_dpo.check_config, RECIPE, folder, dataset_builder=pairs)


async def main(cli: CLIConfig) -> RunSummary:
    config = build_config(cli)
    summary = await train_dpo.main_async(config)
    print_changes(
        config.log_path, {f"test/{key}": "held-out pairs" for key in METRICS}, dict.fromkeys(METRICS, "training pairs")
    )
    return summary


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
