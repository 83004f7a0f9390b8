"""Labeled comparisons from files and datasets, and training examples for a preference model.

A row is `{"comparison": {"prompt_conversation": [...], "completion_A": [...], "completion_B": [...]}, "label": "A"}`,
with messages as in conversation files, or has columns for the prompt, the chosen and the rejected reply (text, or
lists of messages).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple, cast

import chz

from tinker_cookbook.data import hub
from tinker_cookbook.data.epochs import HoldOut, hold_out
from tinker_cookbook.data.rows import BadRows, Row, existing_file, read_file
from tinker_cookbook.exceptions import ConfigurationError, DataFormatError
from tinker_cookbook.preference.types import (
    Comparison,
    ComparisonRenderer,
    ComparisonRendererFromChatRenderer,
    LabeledComparison,
)
from tinker_cookbook.renderers import Message
from tinker_cookbook.supervised.common import datum_from_model_input_weights
from tinker_cookbook.supervised.conversations import messages_of_row, turn_of_row
from tinker_cookbook.supervised.data import train_and_test
from tinker_cookbook.supervised.types import ChatDatasetBuilder, SupervisedDataset
from tinker_cookbook.utils.fields import FieldGroup
from tinker_cookbook.utils.lazy import tinker
from tinker_cookbook.utils.narrowing import is_mapping
from tinker_cookbook.utils.seeds import derive_seed

logger = logging.getLogger(__name__)

_COMPARISON_KEYS = ("prompt_conversation", "completion_A", "completion_B")
_EXPECTED = (
    '{"comparison": {"prompt_conversation": [...], "completion_A": [...], "completion_B": [...]}, "label": "A"} or '
    '{"prompt": ..., "chosen": ..., "rejected": ...}'
)


class ComparisonRow(NamedTuple):
    """A labeled comparison and its location, for error messages."""

    place: str
    labeled: LabeledComparison


Rows = list[ComparisonRow]


@chz.chz(typecheck=True)
class ComparisonDatasetBuilder(HoldOut):
    """Config that reads labeled comparisons.

    A custom source defines `read`; or, for other kinds of rows, `get_train_and_test_datasets`, which then also splits
    and shuffles, and `example_to_labeled_comparison`.
    """

    def read(self, bad: BadRows) -> tuple[Rows, Rows | None]:
        """Training comparisons, and test comparisons if the source has its own.

        `bad` decides how to handle unreadable rows.
        """
        train, test = self.get_train_and_test_datasets()
        return self._labeled(train, "train"), None if test is None else self._labeled(test, "test")

    def get_train_and_test_datasets(self) -> tuple[Iterable[Any], Iterable[Any] | None]:
        """Rows to train on, and rows that are held out: datasets, or lists."""
        raise NotImplementedError(
            f"{type(self).__name__} must define read, or get_train_and_test_datasets and example_to_labeled_comparison"
        )

    def example_to_labeled_comparison(self, example: Any) -> LabeledComparison | None:
        """Convert a row to a comparison; None skips it."""
        raise NotImplementedError(f"{type(self).__name__} must define example_to_labeled_comparison")

    def _labeled(self, examples: Iterable[Any], split: str) -> Rows:
        converted = [(i, self.example_to_labeled_comparison(example)) for i, example in enumerate(examples)]
        rows = [ComparisonRow(f"{type(self).__name__}[{split}][{i}]", labeled) for i, labeled in converted if labeled]
        if len(rows) < len(converted):
            logger.info(
                "%s: %d of %d rows were skipped", type(self).__name__, len(converted) - len(rows), len(converted)
            )
        return rows

    def get_rows(self, bad: BadRows | None = None) -> tuple[Rows, Rows | None]:
        """Training and test comparisons after the split. Raises ConfigurationError when no training comparison is left.

        `bad` decides how to handle unreadable rows; None: they raise.
        """
        rows, test = self.read(bad or BadRows())
        if type(self).get_train_and_test_datasets is not ComparisonDatasetBuilder.get_train_and_test_datasets:
            return hold_out(rows, 0, None, "the source of comparisons")[0], test
        if self.test_size and test is not None:
            raise ConfigurationError(
                f"test_size={self.test_size}: the comparisons have their own test set; set test_size=0"
            )
        size = self.test_size if test is None else 0
        train, held_out = hold_out(rows, size, self.shuffle_seed, "the source of comparisons")
        return train, held_out or test

    def get_labeled_comparisons(self) -> tuple[list[LabeledComparison], list[LabeledComparison] | None]:
        """Like `get_rows`, without the locations."""
        train, test = self.get_rows()
        return [row.labeled for row in train], None if test is None else [row.labeled for row in test]


@chz.chz(typecheck=True)
class ComparisonBuilderFromJsonl(ComparisonDatasetBuilder):
    """Labeled comparisons from files."""

    train_path: str = chz.field(doc=".jsonl, .csv or .parquet file, one comparison per row")
    test_path: str | None = chz.field(default=None, doc="file of held-out comparisons")

    def read(self, bad: BadRows) -> tuple[Rows, Rows | None]:
        train = read_comparisons(self.train_path, "train_path", bad)
        return train, None if self.test_path is None else read_comparisons(self.test_path, "test_path", bad)


def check_comparison_file(file_path: str, field: str) -> None:
    """Raise ConfigurationError, which names the setting, when there is no such file."""
    existing_file(file_path, _EXPECTED, field)


def read_comparisons(file_path: str, field: str = "file_path", bad: BadRows | None = None) -> Rows:
    """Read and check all comparisons of a file. Blank lines and unknown keys are ignored.

    Raises ConfigurationError when there is no such file, and DataFormatError `path:line: what is wrong; expected form`
    for the first malformed row unless `bad` skips such rows.
    """
    return read_file(file_path, _parse, _EXPECTED, field, bad)


def _parse(row: Row) -> ComparisonRow:
    if "comparison" not in row.content and {"chosen", "rejected"} <= row.content.keys():
        columns = Columns("prompt" if "prompt" in row.content else None, "chosen", "rejected")
        return columns.read(row, "file")
    if "comparison" not in row.content:
        missing = sorted({"chosen", "rejected"} - row.content.keys())
        raise DataFormatError(f"the key {missing[0]!r} is missing; the row has {', '.join(row.content) or 'no key'}")
    comparison, label = row.content["comparison"], cast(Any, row.content.get("label"))
    if not is_mapping(comparison):
        raise DataFormatError(f"'comparison' is {comparison!r} and not an object")
    parts = [messages_of_row(comparison, key) for key in _COMPARISON_KEYS]
    return ComparisonRow(row.place, LabeledComparison(Comparison(*parts), label))


@chz.chz(typecheck=True)
class PromptColumn(FieldGroup):
    """The column of the prompt."""

    prompt_column: str | None = chz.field(default="prompt", doc="None: the common beginning of chosen and rejected")


@chz.chz(typecheck=True)
class ComparisonBuilderFromHF(hub.DatasetKey, PromptColumn, hub.HubSplits, ComparisonDatasetBuilder):
    """Chosen and rejected replies from a Hugging Face dataset.

    A column contains text (one message) or a list of messages. If chosen and rejected are whole conversations, the
    prompt is removed from both; with prompt_column=None the prompt is their common prefix. A seed decides whether the
    chosen reply becomes A or B, so that there is no position bias.
    """

    chosen_column: str = chz.field(default="chosen", doc="the better reply")
    rejected_column: str = chz.field(default="rejected", doc="the worse reply")

    def read(self, bad: BadRows) -> tuple[Rows, Rows | None]:
        train = self._rows(self.split, bad)
        return train, None if self.test_split is None else self._rows(self.test_split, bad)

    def _rows(self, split: str, bad: BadRows) -> Rows:
        columns = Columns(self.prompt_column, self.chosen_column, self.rejected_column)
        expected = f"columns {', '.join(name for name in columns if name is not None)}"
        rows = hub.load(self.dataset, split, self.config_name)
        return hub.read_rows(rows, f"{self.dataset}[{split}]", lambda row: columns.read(row, split), expected, bad)


class Columns(NamedTuple):
    """The columns of the prompt (None: the common prefix of chosen and rejected), the better reply and the worse one."""

    prompt: str | None
    chosen: str
    rejected: str

    def read(self, row: Row, split: str) -> ComparisonRow:
        """Convert a row; split and number decide whether the chosen reply becomes A or B. Raises ValueError."""
        labeled = LabeledComparison(self._comparison(row.content), "A")
        return ComparisonRow(row.place, labeled.swap() if derive_seed("side", split, row.number) & 1 else labeled)

    def _comparison(self, row: Mapping[str, Any]) -> Comparison:
        """The comparison with the chosen reply as A."""
        chosen, rejected = (turn_of_row(row, name, "assistant") for name in (self.chosen, self.rejected))
        if self.prompt is None:
            prompt = _common_prefix(chosen, rejected)
            if not prompt:
                raise ValueError(f"{self.chosen!r} and {self.rejected!r} have no common prefix; name prompt_column")
        else:
            prompt = turn_of_row(row, self.prompt, "user")
        replies = [
            messages[len(prompt) :] if messages[: len(prompt)] == prompt else messages
            for messages in (chosen, rejected)
        ]
        for name, reply in zip((self.chosen, self.rejected), replies, strict=True):
            if not reply:
                raise ValueError(f"{name!r} has nothing after the prompt")
            if reply[0]["role"] in ("system", "user"):
                other = "the other reply" if self.prompt is None else repr(self.prompt)
                raise ValueError(
                    f"{name!r} and {other} have different prompts: after their common prefix comes a {reply[0]['role']} message; "
                    "both replies must answer one prompt (prompt_column=None: the common prefix)"
                )
        return Comparison(prompt, *replies)


def _common_prefix(left: Sequence[Message], right: Sequence[Message]) -> list[Message]:
    """The common prefix of both, which ends before the last assistant turn at the latest."""
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(left[:-1], right[:-1], strict=False))
    return [message for message, _ in pairs]


@chz.chz(typecheck=True)
class FromComparisons(FieldGroup):
    """A source of comparisons."""

    comparison_builder: ComparisonDatasetBuilder = chz.field(doc="source of the comparisons")


@chz.chz(typecheck=True)
class ChatDatasetBuilderFromComparisons(FromComparisons, ChatDatasetBuilder):
    """Labeled comparisons as supervised examples of the label, which train a preference model.

    Only the label has weight; common_config.train_on_what does not apply.
    """

    swap: bool = chz.field(
        default=False,
        doc="also train on each comparison with A and B exchanged, against position bias: twice the data",
    )

    @chz.validate
    def _check_common_config(self) -> None:
        if self.common_config.train_on_what is not None:
            raise ConfigurationError(
                f"train_on_what={self.common_config.train_on_what.value!r}: a preference model trains on the label; "
                "leave train_on_what out"
            )
        if self.common_config.split_rewritten:
            raise ConfigurationError("split_rewritten=True: a comparison is one example; leave split_rewritten out")

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        renderer, config = ComparisonRendererFromChatRenderer(self.renderer), self.common_config
        bad = BadRows(config.on_bad_row)
        train, test = self.comparison_builder.get_rows(bad)
        to_datums = partial(_label_datums, renderer=renderer, max_length=config.max_length)
        return train_and_test(self._ordered(train), self._ordered(test or []), config, to_datums, bad)

    def _ordered(self, rows: Rows) -> Rows:
        if not self.swap:
            return rows
        return [order for row in rows for order in (row, row._replace(labeled=row.labeled.swap()))]


def _label_datums(row: ComparisonRow, renderer: ComparisonRenderer, max_length: int | None) -> list[tinker.Datum]:
    tokens, weights = renderer.to_model_input_weights(row.labeled)
    if max_length is not None and tokens.length > max_length:
        raise DataFormatError(
            f"the comparison has {tokens.length} tokens, max_length={max_length} would cut off its label; "
            "raise max_length or leave the comparison out"
        )
    return [datum_from_model_input_weights(tokens, weights, reduction="mean")]
