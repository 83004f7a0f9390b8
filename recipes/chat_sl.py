"""Chat fine-tuning on well-known datasets and mixtures of them, read whole or as a stream.

    python -m recipes.chat_sl
    python -m recipes.chat_sl mixture=mine.jsonl:0.7,no_robots:0.3 model_name=Qwen/Qwen3-4B-Base num_epochs=1
    python -m recipes.chat_sl mixture=tulu3 hub.streaming=true model_name=Qwen/Qwen3-4B-Base batch_size=128 num_epochs=1

A mixture is a list of datasets with shares of the rows: a shipped name, a file, tulu3, no_robots, or a Hugging Face
dataset id. An epoch has every row at least once, and rows of small datasets with a large share several times; without
shares every row comes once. The table at the end compares the held-out loss of all datasets.
"""

from collections.abc import Sequence

import chz

from recipes.common import dataset_label, for_model
from recipes.sl_common import HeldOutKeys, SLConfig, chat_settings, train_and_show, train_config
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.runs.outcome import RunSummary
from tinker_cookbook.supervised import train
from tinker_cookbook.supervised.hub import HUB_CHATS, SHIPPED, chat_dataset_builder, is_hub_dataset
from tinker_cookbook.supervised.mixture import InterleavedDatasetBuilder

RECIPE = "chat_sl"
DEFAULT_MIXTURE = "conversations:0.7,library:0.3"


@chz.chz(typecheck=True)
class CLIConfig(HeldOutKeys, SLConfig, test_size=16, num_epochs=3):
    """Keys of `python -m recipes.chat_sl`."""

    mixture: str = chz.field(
        default=DEFAULT_MIXTURE,
        doc=f"dataset:share,dataset:share,... of {', '.join([*SHIPPED, *HUB_CHATS])}, .jsonl files and hub ids; "
        "without shares every row once",
    )


def parse_mixture(mixture: str) -> tuple[list[str], list[float] | None]:
    """Names and shares of `a:0.7,b:0.3`; shares are None for `a,b`. Raises ConfigurationError for any other form."""
    names: list[str] = []
    shares: list[float] = []
    for entry in mixture.split(","):
        name, colon, share = entry.strip().rpartition(":")
        try:
            names.append(name if colon else share)
            shares += [float(share)] if colon else []
        except ValueError:
            raise ConfigurationError(f"mixture={mixture!r}: the share {share!r} of {name!r} is not a number") from None
    if "" in names:
        raise ConfigurationError(f"mixture={mixture!r}: a dataset has no name; write a.jsonl:0.7,b.jsonl:0.3")
    if len(set(names)) < len(names):
        raise ConfigurationError(f"mixture={mixture!r}: a dataset is named twice; add up its shares")
    if shares and len(shares) < len(names):
        raise ConfigurationError(f"mixture={mixture!r}: give every dataset a share, or none")
    return names, shares or None


def build_config(cli: CLIConfig) -> train.Config:
    """The run's full config. Raises ConfigurationError for every problem that can be found before a model is loaded."""
    names, shares = parse_mixture(cli.mixture)
    cli = for_model(cli)
    settings = chat_settings(cli)
    with_options = [name for name in names if is_hub_dataset(name)] or names  # rejected if no dataset is from the hub
    builder = InterleavedDatasetBuilder(
        sources=[
            chat_dataset_builder(name, settings, cli.test_size, cli.seed, cli.hub if name in with_options else None)
            for name in names
        ],
        weights=shares,
        batch_size=cli.batch_size,
    )
    return train_config(cli, RECIPE, builder, _label(names))


def _label(names: Sequence[str]) -> str:
    return "-".join(dataset_label(name, name) for name in names)


async def main(cli: CLIConfig) -> RunSummary:
    return await train_and_show(build_config(cli))


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
