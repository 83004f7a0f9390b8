"""Shared parts of the supervised fine-tuning recipes: their keys, and the training loop's config."""

from typing import TypeVar

import chz

from recipes.common import (
    SL_LEARNING_RATE,
    TINY_LEARNING_RATE,
    CommonConfig,
    positive,
    rate_doc,
    run_config,
    with_defaults_of_model,
)
from tinker_cookbook.data.epochs import TEST_SIZE, not_negative
from tinker_cookbook.data.rows import OnBadRow
from tinker_cookbook.renderers import TrainOnWhat
from tinker_cookbook.runs.outcome import RunSummary, print_changes
from tinker_cookbook.supervised import train
from tinker_cookbook.supervised.hub import HubOptions
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig, SupervisedDatasetBuilder

C = TypeVar("C", bound="SLConfig")
HUB_DOC = "how a dataset of the hub is read, where that is not as usual"


@chz.chz(typecheck=True)
class SLConfig(train.SupervisedOptions, CommonConfig):
    """Keys of every recipe for supervised fine-tuning."""

    test_size: int | None = chz.field(
        default=None,
        doc=f"conversations held out of each dataset; default: {TEST_SIZE}, of fewer than {2 * TEST_SIZE} a tenth",
        validator=not_negative,
    )
    batch_size: int = chz.field(default=16, doc="conversations per step", validator=chz.validators.gt(0))
    max_length: int = chz.field(
        default=512, doc="longest conversation in tokens; the rest is cut", validator=chz.validators.gt(1)
    )
    train_on_what: TrainOnWhat = chz.field(
        default=TrainOnWhat.ALL_ASSISTANT_MESSAGES, doc="which tokens train: " + ", ".join(TrainOnWhat)
    )
    on_bad_row: OnBadRow = chz.field(
        default="raise", doc="a malformed row, or one that cannot be trained on: raise, or skip and count it"
    )
    hub: HubOptions | None = chz.field(default=None, doc=HUB_DOC)
    split_rewritten: bool = chz.field(
        default=True,
        doc="train each reply on the tokens the model writes: several examples per conversation where the renderer drops "
        "the thinking of earlier replies",
    )
    num_epochs: int = chz.field(default=4, doc="passes over the data", validator=chz.validators.gt(0))
    learning_rate: float | None = chz.field(
        default=None, doc=rate_doc("peak learning rate", TINY_LEARNING_RATE, SL_LEARNING_RATE, 1), validator=positive
    )
    eval_every: int = chz.field(
        default=6, doc="evaluate before every n-th batch and at the end; 0: never", validator=chz.validators.ge(0)
    )


def for_model(cli: C) -> C:
    """The keys with the model's path and renderer, checked, and with the model's default learning rate.

    Raises ConfigurationError as in `with_defaults_of_model`.
    """
    return with_defaults_of_model(cli, TINY_LEARNING_RATE, SL_LEARNING_RATE, share_of_get_lr=1)


def chat_settings(cli: CommonConfig) -> ChatDatasetBuilderCommonConfig:
    """The settings of a recipe's datasets, from the keys of `for_model`."""
    return cli.fill(ChatDatasetBuilderCommonConfig, model_name_for_tokenizer=cli.model_name)


def train_config(cli: SLConfig, recipe: str, dataset_builder: SupervisedDatasetBuilder, label: str) -> train.Config:
    """The training loop's config from the keys of `for_model`, checked; the run's folder (named after `label`) is
    opened last.
    """
    return run_config(cli, train.Config, train.check_config, recipe, [label], dataset_builder=dataset_builder)


async def train_and_show(config: train.Config) -> RunSummary:
    """Run the training, then print what it changed."""
    summary = await train.main(config)
    print_changes(
        config.log_path, {"test/nll": "held out", "test/bpb": "held out"}, {"train_mean_nll": "training batches"}
    )
    return summary
