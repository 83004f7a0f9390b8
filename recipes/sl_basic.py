"""Supervised fine-tuning on a file of conversations, with held-out NLL before, during and after.

    python -m recipes.sl_basic
    python -m recipes.sl_basic dataset=my_chats.jsonl train_on_what=all_assistant_messages model_name=Qwen/Qwen3-4B-Base

A line of the file is {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}.
"""

from pathlib import Path
from typing import Literal

import chz

from recipes.common import (
    SL_LEARNING_RATE,
    TINY_LEARNING_RATE,
    CommonConfig,
    dataset_label,
    learning_rate,
    open_log_path,
    resolve_model,
)
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import TrainOnWhat
from tinker_cookbook.runs.outcome import print_changes
from tinker_cookbook.supervised import train
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig
from tinker_cookbook.tasks.datasets import EXAMPLE_DATA

RECIPE = "sl_basic"
SHIPPED = "conversations"


@chz.chz(typecheck=True)
class CLIConfig(CommonConfig):
    """Keys of `python -m recipes.sl_basic`."""

    dataset: str = chz.field(default=SHIPPED, doc="conversations (shipped) or a .jsonl file")
    test_size: int = chz.field(default=32, doc="conversations held out", validator=chz.validators.ge(0))
    batch_size: int = chz.field(default=16, doc="conversations per step", validator=chz.validators.gt(0))
    num_epochs: int = chz.field(default=4, doc="passes over the data", validator=chz.validators.gt(0))
    max_length: int = chz.field(
        default=512, doc="longest conversation in tokens; the rest is cut", validator=chz.validators.gt(1)
    )
    train_on_what: TrainOnWhat = chz.field(
        default=TrainOnWhat.ALL_ASSISTANT_MESSAGES, doc="which tokens train: " + ", ".join(TrainOnWhat)
    )
    lr_schedule: Literal["linear", "cosine", "constant"] = chz.field(default="linear", doc="linear, cosine or constant")
    learning_rate: float | None = chz.field(
        default=None,
        doc=f"peak learning rate; default: {TINY_LEARNING_RATE:g} for tiny_chat, {SL_LEARNING_RATE:g} for other models",
    )
    eval_every: int = chz.field(
        default=6, doc="evaluate every n steps and at the end; 0: never", validator=chz.validators.ge(0)
    )


def build_config(cli: CLIConfig) -> train.Config:
    """The run's full config. Raises ConfigurationError for whatever can be wrong before a model is loaded."""
    file = EXAMPLE_DATA / "conversations.jsonl" if cli.dataset == SHIPPED else Path(cli.dataset).expanduser()
    if not file.is_file():
        raise ConfigurationError(
            f"dataset={cli.dataset!r}: no such file; use {SHIPPED} or a .jsonl file of conversations"
        )
    model, renderer_name = resolve_model(cli)
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=model,
        renderer_name=renderer_name,
        max_length=cli.max_length,
        batch_size=cli.batch_size,
        train_on_what=cli.train_on_what,
    )
    builder = FromConversationFileBuilder(
        common_config=common, file_path=str(file), test_size=cli.test_size, shuffle_seed=cli.seed
    )
    config = train.Config(
        log_path="",
        model_name=model,
        recipe_name=RECIPE,
        dataset_builder=builder,
        backend=cli.backend,
        base_url=cli.base_url,
        load_checkpoint_path=cli.load_checkpoint_path,
        learning_rate=learning_rate(cli, cli.learning_rate, SL_LEARNING_RATE),
        lr_schedule=cli.lr_schedule,
        num_epochs=cli.num_epochs,
        max_steps=cli.max_steps,
        lora_rank=cli.lora_rank,
        seed=cli.seed,
        eval_every=cli.eval_every,
        save_every=cli.save_every,
        wandb_project=cli.wandb_project,
        wandb_name=cli.wandb_name,
    )
    train.check_config(config)
    return chz.replace(config, log_path=open_log_path(cli, RECIPE, dataset_label(cli.dataset, SHIPPED)))


async def main(cli: CLIConfig) -> None:
    config = build_config(cli)
    await train.main(config)
    print_changes(
        config.log_path, {"test/nll": "held out", "test/bpb": "held out"}, {"train_mean_nll": "training batches"}
    )


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
