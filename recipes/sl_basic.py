"""Supervised fine-tuning on one dataset of conversations, with held-out NLL before, during and after.

    python -m recipes.sl_basic
    python -m recipes.sl_basic dataset=my_chats.jsonl train_on_what=last_assistant_turn model_name=Qwen/Qwen3-4B-Base
    python -m recipes.sl_basic dataset=HuggingFaceH4/no_robots model_name=Qwen/Qwen3-4B-Base num_epochs=1 batch_size=128
    python -m recipes.sl_basic dataset=owner/name hub.split=train_sft hub.messages_column=chat model_name=Qwen/Qwen3-4B-Base

The shipped datasets are conversations (the default) and library. A line of a file is {"messages": [{"role": "user",
"content": "Hi"}, {"role": "assistant", "content": "Hello"}]}; a hub dataset has a column of the same form.
`recipes.sl_loop` does the same without the library's loop.
"""

import chz

from recipes.common import dataset_label, for_model
from recipes.sl_common import DatasetKeys, SLConfig, chat_settings, train_and_show, train_config
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.runs.outcome import RunSummary
from tinker_cookbook.supervised import train
from tinker_cookbook.supervised.hub import chat_dataset_builder

RECIPE = "sl_basic"
SHIPPED = "conversations"


@chz.chz(typecheck=True)
class CLIConfig(DatasetKeys, SLConfig):
    """Keys of `python -m recipes.sl_basic`."""


def build_config(cli: CLIConfig) -> train.Config:
    """The run's full config. Raises ConfigurationError for every problem that can be found before a model is loaded."""
    cli = for_model(cli)
    builder = chat_dataset_builder(cli.dataset, chat_settings(cli), cli.test_size, cli.seed, cli.hub)
    return train_config(cli, RECIPE, builder, dataset_label(cli.dataset, SHIPPED))


async def main(cli: CLIConfig) -> RunSummary:
    return await train_and_show(build_config(cli))


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
