"""Direct preference optimization (DPO) on pairs of replies, with held-out accuracy and margin before, during and after.

    python -m recipes.preference.train
    python -m recipes.preference.train dataset=my_pairs.jsonl dpo_beta=0.1 model_name=Qwen/Qwen3-4B-Instruct-2507
    python -m recipes.preference.train dataset=trl-lib/ultrafeedback_binarized prompt_column=None test_split=test

A line of the file is {"comparison": {"prompt_conversation": [{"role": "user", "content": "Hi"}], "completion_A":
[{"role": "assistant", "content": "Hello"}], "completion_B": [...]}, "label": "A"}. A Hugging Face dataset has columns prompt,
chosen and rejected.
"""

import chz

from recipes.common import dataset_label, learning_rate, open_log_path, run_settings
from recipes.preference.data import SHIPPED, ComparisonConfig, chat_config, comparison_source
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
from tinker_cookbook.runs.outcome import print_changes
from tinker_cookbook.utils.lr_scheduling import LRSchedule

RECIPE = "preference_dpo"
DPO_LEARNING_RATE = 1e-5
METRICS = ("dpo_loss", "accuracy", "margin")


@chz.chz(typecheck=True)
class CLIConfig(ComparisonConfig):
    """Keys of `python -m recipes.preference.train`."""

    num_epochs: int = chz.field(default=3, doc="passes over the data", validator=chz.validators.gt(0))
    dpo_beta: float = chz.field(default=0.1, doc="how much a log-ratio counts", validator=chz.validators.gt(0))
    loss_type: train_dpo.LossType = chz.field(default="dpo", doc="dpo, ipo, or dpo_norm (log-ratios per token)")
    lr_schedule: LRSchedule = chz.field(default="linear", doc="linear, cosine or constant")
    learning_rate: float | None = chz.field(
        default=None, doc=f"peak learning rate; default: 0.001 for tiny_chat, {DPO_LEARNING_RATE:g} for other models"
    )
    eval_every: int = chz.field(
        default=7, doc="evaluate every n steps and at the end; 0: never", validator=chz.validators.ge(0)
    )


def build_config(cli: CLIConfig) -> train_dpo.Config:
    """The run's full config. Raises ConfigurationError for whatever can be wrong before a model is loaded."""
    source, common = comparison_source(cli), chat_config(cli)
    config = train_dpo.Config(
        **run_settings(cli, RECIPE, common.model_name_for_tokenizer),
        dataset_builder=DPODatasetBuilderFromComparisons(common_config=common, comparison_builder=source),
        dpo_beta=cli.dpo_beta,
        loss_type=cli.loss_type,
        learning_rate=learning_rate(cli, cli.learning_rate, DPO_LEARNING_RATE),
        lr_schedule=cli.lr_schedule,
        num_epochs=cli.num_epochs,
    )
    train_dpo.check_config(config)
    return chz.replace(config, log_path=open_log_path(cli, RECIPE, cli.loss_type, dataset_label(cli.dataset, SHIPPED)))


async def main(cli: CLIConfig) -> None:
    config = build_config(cli)
    await train_dpo.main_async(config)
    print_changes(
        config.log_path, {f"test/{key}": "held-out pairs" for key in METRICS}, dict.fromkeys(METRICS, "training pairs")
    )


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
