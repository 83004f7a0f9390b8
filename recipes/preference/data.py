"""The comparisons of the preference recipes: the keys, and the dataset that they name."""

from pathlib import Path

import chz

from recipes.common import CommonConfig
from recipes.sl_common import DatasetKeys
from tinker_cookbook.data.hub import TestSplit
from tinker_cookbook.data.rows import is_data_file
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.field_groups import TestDataset
from tinker_cookbook.preference.preference_datasets import (
    ComparisonBuilderFromHF,
    ComparisonBuilderFromJsonl,
    ComparisonDatasetBuilder,
    PromptColumn,
    check_comparison_file,
)
from tinker_cookbook.supervised.types import ExampleKeys
from tinker_cookbook.utils.fields import docs

SHIPPED = "comparisons"
SHIPPED_TEST_SIZE = 32


@chz.chz(typecheck=True)
class ComparisonConfig(
    DatasetKeys, TestDataset, TestSplit, PromptColumn, ExampleKeys, CommonConfig, dataset=SHIPPED, max_length=1024
):
    """Keys of every recipe that learns from comparisons."""

    DOCS = docs(
        batch_size="comparisons per step",
        test_dataset="with a file as dataset: a file of held-out comparisons",
        test_split="with a hub dataset: its split of held-out comparisons",
        prompt_column="with a hub dataset; None: the prompt is the common prefix of chosen and rejected",
    )

    train_split: str = chz.field(default="train", doc="with a hub dataset: its split to train on")


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
