"""The comparisons of the preference recipes: the keys, and the dataset that they name."""

from pathlib import Path

import chz

from recipes.common import CommonConfig
from tinker_cookbook.data.rows import OnBadRow, is_data_file
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.preference.preference_datasets import (
    ComparisonBuilderFromHF,
    ComparisonBuilderFromJsonl,
    ComparisonDatasetBuilder,
    check_comparison_file,
)

SHIPPED = "comparisons"
SHIPPED_TEST_SIZE = 32


@chz.chz(typecheck=True)
class ComparisonConfig(CommonConfig):
    """Keys of every recipe that learns from comparisons."""

    dataset: str = chz.field(
        default=SHIPPED,
        doc="comparisons (shipped), a .jsonl/.csv/.parquet file, a hub id (owner/name) or a saved dataset's folder",
    )
    test_dataset: str | None = chz.field(default=None, doc="with a file as dataset: a file of held-out comparisons")
    test_split: str | None = chz.field(default=None, doc="with a hub dataset: its split of held-out comparisons")
    train_split: str = chz.field(default="train", doc="with a hub dataset: its split to train on")
    prompt_column: str | None = chz.field(
        default="prompt", doc="with a hub dataset; None: the prompt is what chosen and rejected begin with"
    )
    test_size: int | None = chz.field(
        default=None,
        doc=f"comparisons held out of the training ones; default: {SHIPPED_TEST_SIZE} of the shipped, else 0",
    )
    on_bad_row: OnBadRow = chz.field(
        default="raise", doc="a malformed row, or one that cannot be trained on: raise, or skip and count it"
    )
    batch_size: int = chz.field(default=16, doc="comparisons per step", validator=chz.validators.gt(0))
    max_length: int = chz.field(default=1024, doc="longest sequence in tokens", validator=chz.validators.gt(1))


def comparison_source(cli: ComparisonConfig) -> ComparisonDatasetBuilder:
    """The source of the comparisons. Raises ConfigurationError for a key that the source does not support."""
    is_file = cli.dataset == SHIPPED or is_data_file(cli.dataset)
    if not is_file and cli.test_dataset is not None:
        raise ConfigurationError(
            f"test_dataset={cli.test_dataset!r} goes with a file as dataset; set test_split instead"
        )
    if is_file and cli.test_split is not None:
        raise ConfigurationError(f"test_split={cli.test_split!r} goes with a hub dataset; set test_dataset instead")
    if is_file and (cli.train_split, cli.prompt_column) != ("train", "prompt"):
        raise ConfigurationError("train_split and prompt_column go with a hub dataset; leave them out with a file")
    if not is_file:
        return cli.fill(
            ComparisonBuilderFromHF,
            split=cli.train_split,
            test_size=cli.test_size or 0,
            shuffle_seed=cli.seed,
        )
    default_size = SHIPPED_TEST_SIZE if cli.dataset == SHIPPED and cli.test_dataset is None else 0
    path = EXAMPLE_DATA / "comparisons.jsonl" if cli.dataset == SHIPPED else Path(cli.dataset)
    check_comparison_file(str(path), "dataset")
    if cli.test_dataset is not None:
        check_comparison_file(cli.test_dataset, "test_dataset")
    return ComparisonBuilderFromJsonl(
        train_path=str(path),
        test_path=cli.test_dataset,
        test_size=default_size if cli.test_size is None else cli.test_size,
        shuffle_seed=cli.seed,
    )
