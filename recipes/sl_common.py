"""What the recipes for supervised fine-tuning share: their keys, and the training loop's config made of them."""

from typing import Literal

import chz

from recipes.common import (
    SL_LEARNING_RATE,
    TINY_LEARNING_RATE,
    CommonConfig,
    learning_rate,
    open_log_path,
    resolve_model,
    run_settings,
)
from tinker_cookbook.renderers import TrainOnWhat
from tinker_cookbook.runs.outcome import print_changes
from tinker_cookbook.supervised import train
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig, SupervisedDatasetBuilder


@chz.chz(typecheck=True)
class SLConfig(CommonConfig):
    """Keys of every recipe for supervised fine-tuning."""

    test_size: int = chz.field(default=32, doc="conversations held out of each dataset", validator=chz.validators.ge(0))
    batch_size: int = chz.field(default=16, doc="conversations per step", validator=chz.validators.gt(0))
    num_epochs: int = chz.field(default=4, doc="passes over the data", validator=chz.validators.gt(0))
    max_length: int = chz.field(
        default=512, doc="longest conversation in tokens; the rest is cut", validator=chz.validators.gt(1)
    )
    train_on_what: TrainOnWhat = chz.field(
        default=TrainOnWhat.ALL_ASSISTANT_MESSAGES, doc="which tokens train: " + ", ".join(TrainOnWhat)
    )
    split_rewritten: bool = chz.field(
        default=True,
        doc="train each reply on the tokens the model writes: several examples per conversation where the renderer drops "
        "the thinking of earlier replies",
    )
    lr_schedule: Literal["linear", "cosine", "constant"] = chz.field(default="linear", doc="linear, cosine or constant")
    learning_rate: float | None = chz.field(
        default=None,
        doc=f"peak learning rate; default: {TINY_LEARNING_RATE:g} for tiny_chat, {SL_LEARNING_RATE:g} for other models",
    )
    eval_every: int = chz.field(
        default=6, doc="evaluate every n steps and at the end; 0: never", validator=chz.validators.ge(0)
    )
    submit_ahead: int = chz.field(
        default=1, doc="batches submitted before the oldest is awaited", validator=chz.validators.ge(0)
    )


def dataset_settings(cli: SLConfig) -> ChatDatasetBuilderCommonConfig:
    """What the recipe's datasets need to know. Raises ConfigurationError for a model or a renderer that cannot be had."""
    model, renderer_name = resolve_model(cli)
    return ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=model,
        renderer_name=renderer_name,
        max_length=cli.max_length,
        batch_size=cli.batch_size,
        train_on_what=cli.train_on_what,
        split_rewritten=cli.split_rewritten,
    )


def train_config(
    cli: SLConfig,
    recipe: str,
    settings: ChatDatasetBuilderCommonConfig,
    dataset_builder: SupervisedDatasetBuilder,
    label: str,
) -> train.Config:
    """The training loop's config from a recipe's keys, checked; the run's folder (named after `label`) is settled last."""
    config = train.Config(
        **run_settings(cli, recipe, settings.model_name_for_tokenizer),
        dataset_builder=dataset_builder,
        learning_rate=learning_rate(cli, cli.learning_rate, SL_LEARNING_RATE),
        lr_schedule=cli.lr_schedule,
        num_epochs=cli.num_epochs,
        submit_ahead=cli.submit_ahead,
    )
    train.check_config(config)
    return chz.replace(config, log_path=open_log_path(cli, recipe, label))


async def train_and_show(config: train.Config) -> None:
    """The run, and then what it changed."""
    await train.main(config)
    print_changes(
        config.log_path, {"test/nll": "held out", "test/bpb": "held out"}, {"train_mean_nll": "training batches"}
    )
