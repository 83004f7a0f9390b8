"""Datasets of conversations as datums: rows in memory, in a Hugging Face dataset or stream, or in a JSONL file.

`conversations` reads single files, `mixture` combines datasets, `hub` loads from the hub.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast

import chz

from tinker_cookbook.data import hub
from tinker_cookbook.data.epochs import HoldOut, ShuffledItems, hold_out, usual_test_size
from tinker_cookbook.data.hub import TrainSplit
from tinker_cookbook.data.rows import BadRows, located
from tinker_cookbook.exceptions import ConfigurationError, DataError, DataFormatError, DataValidationError
from tinker_cookbook.renderers import Message, Renderer, TrainOnWhat
from tinker_cookbook.supervised.common import Reduction, check_context, datum_from_model_input_weights
from tinker_cookbook.supervised.conversations import MESSAGES, conversation, read_conversations, shared_system_prompt
from tinker_cookbook.supervised.types import (
    ChatDatasetBuilder,
    ChatDatasetBuilderCommonConfig,
    RowDataset,
    SupervisedDataset,
    rows_to_datums,
)
from tinker_cookbook.utils.lazy import np, tinker

if TYPE_CHECKING:
    import datasets

logger = logging.getLogger(__name__)

Row = TypeVar("Row")

WhenExhausted = Literal["raise", "restart"]

CHECKED_CONVERSATIONS = 1000
"""How many conversations of a large dataset are checked for content that the renderer changes."""

_MERGED_HISTORY = (TrainOnWhat.LAST_ASSISTANT_TURN, TrainOnWhat.ALL_ASSISTANT_MESSAGES)
"""Selections of several replies; a renderer without the extension property rewrites all but the last."""


def conversation_to_datum(
    conversation: list[Message],
    renderer: Renderer,
    max_length: int | None,
    train_on_what: TrainOnWhat = TrainOnWhat.ALL_ASSISTANT_MESSAGES,
    reduction: Reduction = "mean",
) -> tinker.Datum:
    """One conversation as a cross_entropy datum of at most `max_length` - 1 positions.

    Raises RendererError when it cannot be rendered or nothing is selected, and DataValidationError when truncation
    leaves nothing to train on (reduction="mean").
    """
    model_input, weights = renderer.build_supervised_example(conversation, train_on_what)
    return datum_from_model_input_weights(model_input, weights, max_length, reduction)


def conversation_to_datums(
    conversation: list[Message],
    renderer: Renderer,
    max_length: int | None,
    train_on_what: TrainOnWhat = TrainOnWhat.ALL_ASSISTANT_MESSAGES,
    reduction: Reduction = "mean",
) -> list[tinker.Datum]:
    """One conversation as the fewest datums that train every selected reply on the tokens that the model would have
    written.

    With reduction="mean" each datum has the same weight, so a conversation split into n datums counts n times.
    Raises as in conversation_to_datum.
    """
    if renderer.has_extension_property or train_on_what not in _MERGED_HISTORY:
        return [conversation_to_datum(conversation, renderer, max_length, train_on_what, reduction)]
    examples = renderer.build_supervised_examples(conversation, train_on_what)
    return [datum_from_model_input_weights(*example, max_length, reduction) for example in examples]


class SupervisedDatasetFromList(RowDataset, Generic[Row]):
    """Rows in memory, converted to datums when their batch is requested. They keep their order until set_epoch.

    Pass `to_datum`, or `flatmap_fn` for rows that become several datums each; batch_size counts rows. Errors of these
    functions name the row's `place`, if it has one; `bad` decides how to handle such rows.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        batch_size: int,
        to_datum: Callable[[Row], tinker.Datum] | None = None,
        flatmap_fn: Callable[[Row], list[tinker.Datum]] | None = None,
        bad: BadRows | None = None,
    ) -> None:
        super().__init__(len(rows), batch_size, bad)
        self._rows, self._to_datums = rows, rows_to_datums(to_datum, flatmap_fn)
        self._order = ShuffledItems(range(len(rows)))

    def get_row(self, position: int) -> list[tinker.Datum]:
        index = self._order.get_row(position)
        row = self._rows[index]
        return self.convert(self._place(index, row), self._to_datums, row)

    def _place(self, index: int, row: Row) -> str:
        return getattr(row, "place", "")

    def set_epoch(self, seed: int = 0) -> None:
        self._order.set_epoch(seed)


def train_and_test(
    train: Sequence[Row],
    test: Sequence[Row] | None,
    config: ChatDatasetBuilderCommonConfig,
    flatmap_fn: Callable[[Row], list[tinker.Datum]],
    bad: BadRows,
) -> tuple[SupervisedDataset, SupervisedDataset | None]:
    """The return value of a builder for rows in memory; without test rows there is no test set.

    `bad` has counted unreadable rows, and also counts those that cannot be used.
    """

    def make(rows: Sequence[Row]) -> SupervisedDataset:
        return SupervisedDatasetFromList(rows, config.batch_size, None, flatmap_fn, bad)

    return make(train), make(test) if test else None


class SupervisedDatasetFromHFDataset(SupervisedDatasetFromList[dict[str, Any]]):
    """Rows of a map-style Hugging Face dataset, converted to datums when their batch is requested.

    Args:
        hf_dataset: the rows; set_epoch shuffles them without changing the dataset or its cache files.
        batch_size: rows per batch; the last batch may be smaller.
        map_fn: row -> datum.
        flatmap_fn: row -> one or more datums. Pass exactly one of the two.

    Errors of these functions name the row's index; `bad` decides how to handle such rows.
    """

    def __init__(
        self,
        hf_dataset: datasets.Dataset,
        batch_size: int,
        map_fn: Callable[[dict[str, Any]], tinker.Datum] | None = None,
        flatmap_fn: Callable[[dict[str, Any]], list[tinker.Datum]] | None = None,
        bad: BadRows | None = None,
    ) -> None:
        super().__init__(cast(Sequence[dict[str, Any]], hf_dataset), batch_size, map_fn, flatmap_fn, bad)

    def _place(self, index: int, row: dict[str, Any]) -> str:
        return f"row {index}"


class StreamingSupervisedDatasetFromHFDataset(RowDataset):
    """Rows of a streamed Hugging Face dataset (`load_dataset(..., streaming=True)`).

    Within an epoch, request batches in increasing order. If a resumed run requests a later one, the rows in between
    are read and skipped, so the rows equal those of an uninterrupted run. `set_epoch` restarts the stream, shuffled by
    the seed within a buffer (and by shards).

    Args:
        hf_dataset: the stream.
        batch_size: rows per batch; the last batch of an epoch may be smaller.
        length: rows per epoch, exact or estimated. If the stream is longer, the rest is left for other epochs'
            shuffles.
        map_fn: row -> datum.
        flatmap_fn: row -> one or more datums. Pass exactly one of the two.
        buffer_size: size of the shuffle buffer in rows.
        when_exhausted: what to do when the stream is shorter than `length`: "raise", or "restart" it in another order
            to fill the epoch.
        bad: how to handle rows that cannot be used.

    Raises:
        ConfigurationError: length, batch_size or buffer_size is below 1, or not exactly one function is passed.
    """

    def __init__(
        self,
        hf_dataset: datasets.IterableDataset,
        batch_size: int,
        length: int,
        map_fn: Callable[[dict[str, Any]], tinker.Datum] | None = None,
        flatmap_fn: Callable[[dict[str, Any]], list[tinker.Datum]] | None = None,
        buffer_size: int = 10_000,
        when_exhausted: WhenExhausted = "raise",
        bad: BadRows | None = None,
    ) -> None:
        for name, value in (("length", length), ("buffer_size", buffer_size)):
            if value < 1:
                raise ConfigurationError(f"{name}={value}: must be at least 1")
        if when_exhausted not in ("raise", "restart"):
            raise ConfigurationError(f"when_exhausted={when_exhausted!r}: must be raise or restart")
        super().__init__(length, batch_size, bad)
        self._hf_dataset, self._buffer_size, self._when_exhausted = hf_dataset, buffer_size, when_exhausted
        self._to_datums = rows_to_datums(map_fn, flatmap_fn)
        self._seed: int | None = None
        self._position, self._rounds, self._stream = 0, 0, self._open(0)

    def set_epoch(self, seed: int = 0) -> None:
        self._seed = seed
        self._position, self._rounds, self._stream = 0, 0, self._open(0)

    def _open(self, rounds: int) -> Iterator[dict[str, Any]]:
        stream = self._hf_dataset
        if self._seed is not None:
            # One more per round: seeds of adjacent epochs are far apart, so no other epoch has the same order.
            stream = stream.shuffle(seed=self._seed + rounds, buffer_size=self._buffer_size)
        return iter(stream)

    def get_row(self, position: int) -> list[tinker.Datum]:
        if position < self._position:
            raise DataError(
                f"row {position} of a stream that has been read up to row {self._position}: it goes forward only; request "
                "batches in increasing order, or call set_epoch to start again"
            )
        if not position < self.num_rows:
            raise IndexError(f"row {position} of a stream with {self.num_rows} rows per epoch")
        while self._position < position:
            self._read()
        place = f"row {position} of the stream (shuffled with seed {self._seed})"
        return self.convert(place, self._to_datums, self._read())

    def _read(self) -> dict[str, Any]:
        row = next(self._stream, None)
        if row is None and self._position:
            if self._when_exhausted == "raise":
                raise DataValidationError(
                    f"the stream ended after {self._position} rows, and length={self.num_rows}: set length to its size, or "
                    "when_exhausted='restart' to fill the epoch with rows from its beginning"
                )
            self._rounds += 1
            self._stream = self._open(self._rounds)
            row = next(self._stream, None)
        if row is None:
            raise DataValidationError("the stream has no row at all; check the dataset, its split and its filters")
        self._position += 1
        return row


def conversation_mapper(builder: ChatDatasetBuilder) -> Callable[[list[Message]], list[tinker.Datum]]:
    """The function from a conversation to datums for a builder's config; no datum is longer than the model's context."""
    config, context = builder.common_config, builder.context_length
    settings = (builder.renderer, config.max_length, config.train_on_what or TrainOnWhat.ALL_ASSISTANT_MESSAGES)

    def to_datums(conversation: list[Message]) -> list[tinker.Datum]:
        if config.split_rewritten:
            return check_context(conversation_to_datums(conversation, *settings), context)
        return check_context([conversation_to_datum(conversation, *settings)], context)

    return to_datums


@chz.chz(typecheck=True)
class FromConversationFileBuilder(HoldOut, ChatDatasetBuilder):
    """Conversations from a file. All assistant messages are trained unless common_config says otherwise."""

    file_path: str = chz.field(doc=".jsonl, .csv or .parquet file, one conversation per row (see `conversations`).")

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        bad = BadRows(self.common_config.on_bad_row)
        rows = read_conversations(self.file_path, bad)
        train, test = hold_out(rows, self.test_size, self.shuffle_seed, self.file_path)
        warn_about_changes([row.messages for row in rows], self)
        convert = conversation_mapper(self)
        training, held_out = train_and_test(train, test, self.common_config, lambda row: convert(row.messages), bad)
        training.shared_system_prompt = shared_system_prompt(row.messages for row in train)
        return training, held_out


@chz.chz(typecheck=True)
class HFDatasetSource(TrainSplit):
    """One of the datasets of an InterleavedChatDatasetBuilder."""

    path: str = chz.field(doc="Dataset id on the hub (owner/name), or a folder with its files.")
    name: str | None = chz.field(default=None, doc="Configuration of the dataset, where it has several.")
    weight: float | None = chz.field(
        default=None, doc="Share of the rows; 0: excluded; None (for all sources): proportional to their sizes."
    )
    message_field: str = chz.field(default=MESSAGES, doc="Column with the list of messages.")

    def rows(self) -> datasets.Dataset:
        """The split, with its conversations in the column MESSAGES only. Raises ConfigurationError if it cannot be
        loaded.
        """
        rows = hub.load(self.path, self.split, self.name)
        if self.message_field not in rows.column_names:
            raise ConfigurationError(
                f"message_field={self.message_field!r}: {self.path}[{self.split}] has the columns {rows.column_names}"
            )
        chosen = rows.select_columns([self.message_field])
        return chosen if self.message_field == MESSAGES else chosen.rename_column(self.message_field, MESSAGES)


@chz.chz(typecheck=True)
class InterleavedChatDatasetBuilder(HoldOut, ChatDatasetBuilder):
    """Conversations of several datasets in one shuffled order, sampled by weight (`datasets.interleave_datasets`).

    The test set is taken from the sources before they are interleaved, because that may repeat rows: no row is in
    both. Its rows are drawn by weight, one source after another, as long as a source keeps at least one training row.
    """

    sources: list[HFDatasetSource] = chz.field(doc="The datasets.")
    stopping_strategy: Literal["first_exhausted", "all_exhausted", "all_exhausted_without_replacement"] = chz.field(
        default="all_exhausted", doc="When an epoch ends, and whether shorter sources repeat until then."
    )

    @chz.validate
    def _check_weights(self) -> None:
        given = [source.weight for source in self.sources if source.weight is not None]
        if not self.sources or len(given) not in (0, len(self.sources)):
            raise ConfigurationError(
                f"sources: {len(given)} of {len(self.sources)} have a weight; give at least one source, and a weight to all "
                "or to none"
            )
        if self.shuffle_seed is None:
            raise ConfigurationError("shuffle_seed=None: the order of a mixture is drawn; give a seed")
        if given and not (all(0 <= weight < math.inf for weight in given) and sum(given) > 0):
            raise ConfigurationError(f"weights {given}: must be finite and not negative, and one of them above 0")

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        import datasets

        by_rows = self.sources[0].weight is None
        used = [source for source in self.sources if source.weight != 0]
        rows, test = [source.rows() for source in used], None
        size = usual_test_size(sum(map(len, rows))) if self.test_size is None else self.test_size
        if size:
            rows, test = self._hold_out(rows, [source.weight for source in used], size)
        weights = [
            float(len(source_rows)) if by_rows else float(source.weight or 0)
            for source_rows, source in zip(rows, used, strict=True)
        ]
        shares = [weight / sum(weights) for weight in weights]
        mixed = datasets.interleave_datasets(
            rows, probabilities=shares, seed=self.shuffle_seed, stopping_strategy=self.stopping_strategy
        )
        sample = (mixed[i] for i in range(min(CHECKED_CONVERSATIONS, len(mixed))))
        warn_about_changes(readable_conversations(sample, self.common_config), self)
        return conversation_table(mixed, self), None if test is None else conversation_table(test, self)

    def _hold_out(
        self, rows: list[datasets.Dataset], weights: Sequence[float | None], size: int
    ) -> tuple[list[datasets.Dataset], datasets.Dataset]:
        import datasets

        spare = [len(source_rows) - 1 for source_rows in rows]
        if size > sum(spare):
            raise ConfigurationError(
                f"test_size={size}: {sum(spare)} rows can be held out so that each source keeps one to train on"
            )
        rng, counts = np.random.default_rng(self.shuffle_seed), [0] * len(rows)
        for _ in range(size):
            left = [len(source_rows) - count for source_rows, count in zip(rows, counts, strict=True)]
            chances = [(n if w is None else w) if n > 1 else 0 for n, w in zip(left, weights, strict=True)]
            chances = np.array(chances) / sum(chances)
            counts[int(rng.choice(len(rows), p=chances))] += 1
        shuffled = [source_rows.shuffle(seed=int(rng.integers(0, 2**32))) for source_rows in rows]
        held_out = datasets.concatenate_datasets(
            [source_rows.take(count) for source_rows, count in zip(shuffled, counts, strict=True) if count]
        )
        training = [source_rows.skip(count) for source_rows, count in zip(shuffled, counts, strict=True)]
        return training, held_out.shuffle(seed=self.shuffle_seed)


def conversation_table(
    rows: datasets.Dataset, builder: ChatDatasetBuilder, column: str = MESSAGES
) -> SupervisedDatasetFromHFDataset:
    """The conversations in a column of a table, converted according to a builder's config."""
    convert, config = conversation_mapper(builder), builder.common_config
    bad = BadRows(config.on_bad_row)
    return SupervisedDatasetFromHFDataset(
        rows, config.batch_size, flatmap_fn=lambda row: convert(conversation(row, column)), bad=bad
    )


def readable_conversations(
    rows: Iterable[Mapping[str, Any]], config: ChatDatasetBuilderCommonConfig, column: str = MESSAGES
) -> Iterator[list[Message]]:
    """The conversations of rows; unusable rows are skipped or raise, as the config says."""
    for number, row in enumerate(rows):
        with suppress(DataFormatError) if config.on_bad_row == "skip" else located(f"row {number}"):
            yield conversation(row, column)


def warn_about_changes(sample: Iterable[list[Message]], builder: ChatDatasetBuilder) -> None:
    """Warn about data that the renderer changes before training."""
    conversations = list(sample)
    replies = [message for messages in conversations for message in messages if message["role"] == "assistant"]
    stripped = sum(builder.renderer.without_reasoning(message) != message for message in replies)
    if stripped:
        logger.warning(
            "reasoning stripped from %d messages of %d: %s trains none; use the renderer of a reasoning model to train it",
            stripped,
            len(replies),
            type(builder.renderer).__name__,
        )
    _warn_of_rewritten_history(conversations, builder)


def _warn_of_rewritten_history(conversations: Sequence[list[Message]], builder: ChatDatasetBuilder) -> None:
    """Warn when replies would be trained in a form that the model never writes."""
    config, renderer = builder.common_config, builder.renderer
    train_on_what = config.train_on_what or TrainOnWhat.ALL_ASSISTANT_MESSAGES
    if config.split_rewritten or renderer.has_extension_property:
        return
    if train_on_what is not TrainOnWhat.ALL_ASSISTANT_MESSAGES:
        return
    several = sum(sum(m["role"] == "assistant" for m in messages) > 1 for messages in conversations)
    if several:
        logger.warning(
            "%d of %d conversations have several assistant messages, and %s renders earlier ones differently from how "
            "the model writes them (without thinking): split_rewritten=True, or train_on_what=last_assistant_turn, trains "
            "exactly what it writes",
            several,
            len(conversations),
            type(renderer).__name__,
        )
