"""Chat datasets by name: a shipped file, a local file, or a Hugging Face dataset, whole or as a stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import chz

from tinker_cookbook.data import hub
from tinker_cookbook.data.epochs import HoldOut, hold_out, usual_test_size
from tinker_cookbook.data.rows import BadRows, is_data_file
from tinker_cookbook.data.shipped import EXAMPLE_DATA, shipped_path
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Message
from tinker_cookbook.supervised.conversations import MESSAGES, conversation, shared_system_prompt
from tinker_cookbook.supervised.data import (
    CHECKED_CONVERSATIONS,
    FromConversationFileBuilder,
    StreamingSupervisedDatasetFromHFDataset,
    conversation_mapper,
    conversation_table,
    readable_conversations,
    warn_about_changes,
)
from tinker_cookbook.supervised.types import ChatDatasetBuilder, ChatDatasetBuilderCommonConfig, SupervisedDataset
from tinker_cookbook.utils.fields import fill

if TYPE_CHECKING:
    import datasets

SHIPPED = {"conversations": "conversations.jsonl", "library": "library.jsonl"}
"""Name -> file of a shipped chat dataset."""


HUB_CHATS = ("tulu3", "no_robots")
"""Short names of chat datasets on the hub."""


@chz.chz(typecheck=True)
class HubOptions(hub.HubSplits):
    """How to read a dataset of conversations from the hub."""

    messages_column: str = chz.field(default=MESSAGES, doc="Column with the list of messages.")
    streaming: bool = chz.field(default=False, doc="Read as a stream: nothing is downloaded beforehand.")
    stream_length: int | None = chz.field(default=None, doc="Rows of a stream's epoch; None: as the dataset states.")
    stream_buffer: int = chz.field(default=10_000, doc="Rows that the shuffle of a stream draws from.")

    @chz.validate
    def _check(self) -> None:
        if self.stream_length is not None and not self.streaming:
            raise ConfigurationError(f"stream_length={self.stream_length} is for streams; set streaming=True with it")


@chz.chz(typecheck=True)
class FromHFConversationsBuilder(hub.DatasetKey, HubOptions, HoldOut, ChatDatasetBuilder):
    """Conversations from a Hugging Face dataset. All assistant messages are trained unless common_config says otherwise.

    With a test split or a stream, `test_size` bounds the rows of the test set.
    """

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        rows, test = self._load(self.split), None
        size = self.test_size
        if size is None:
            size = usual_test_size(None if self.streaming or self.test_split is not None else len(rows))
        held_out = size if self.test_split is None else 0
        if self.test_split is not None and size:
            test = self._first(self._load(self.test_split), size)
        if self.streaming:
            if held_out:
                test = self._first(rows, size)
            train = self._stream(rows, held_out)
        else:
            source = f"{self.dataset}[{self.split}]"
            training, testing = hold_out(range(len(rows)), held_out, self.shuffle_seed, source)
            if held_out:
                rows, test = rows.select(training), rows.select(testing)
            warn_about_changes(self._readable(rows.select(range(min(CHECKED_CONVERSATIONS, len(rows))))), self)
            train = conversation_table(rows, self, self.messages_column)
            train.shared_system_prompt = shared_system_prompt(self._readable(rows))
        return train, None if test is None else conversation_table(test, self, self.messages_column)

    def _readable(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[list[Message]]:
        return readable_conversations(rows, self.common_config, self.messages_column)

    def _stream(self, rows: datasets.IterableDataset, held_out: int) -> SupervisedDataset:
        convert, column = conversation_mapper(self), self.messages_column
        length = self.stream_length or self._known_length(rows) - held_out
        if length < 1:
            raise ConfigurationError(f"test_size={held_out} leaves nothing to train on; lower test_size")
        return StreamingSupervisedDatasetFromHFDataset(
            rows.skip(held_out) if held_out else rows,  # even skip(0) would disable shuffling of shards
            self.common_config.batch_size,
            length,
            flatmap_fn=lambda row: convert(conversation(row, column)),
            buffer_size=self.stream_buffer,
            bad=BadRows(self.common_config.on_bad_row),
        )

    def _first(self, rows: Any, size: int) -> datasets.Dataset:
        """The first rows; those of a stream are kept in memory."""
        import datasets

        if self.streaming:
            return datasets.Dataset.from_list(list(rows.take(size)))
        return rows.select(range(min(size, len(rows))))

    def _known_length(self, stream: datasets.IterableDataset) -> int:
        splits = stream.info.splits
        known = splits[self.split].num_examples if splits and self.split in splits else None
        if not known:
            raise ConfigurationError(
                f"stream_length: {self.dataset}[{self.split}] does not say how many rows it has; set stream_length to the "
                "number of rows per epoch"
            )
        return known

    def _load(self, split: str) -> Any:
        return hub.load(self.dataset, split, self.config_name, self.streaming)


def chat_dataset_builder(
    dataset: str,
    common_config: ChatDatasetBuilderCommonConfig,
    test_size: int | None = 0,
    seed: int = 0,
    options: HubOptions | None = None,
) -> ChatDatasetBuilder:
    """The builder of a chat dataset by name.

    Args:
        dataset: a name in SHIPPED, a .jsonl/.csv/.parquet file, a name in HUB_CHATS, a hub id (owner/name), or a
            folder of its files.
        test_size: conversations held out; the first ones of the test split, if the dataset has a known one. None: the
            default number (`data.epochs.usual_test_size`).
        seed: for the choice of held-out conversations.
        options: how to read a hub dataset; None: its defaults.

    Raises:
        ConfigurationError: the name is none of these, or there are options for a file.
    """
    if not is_hub_dataset(dataset):
        if options is not None:
            raise ConfigurationError(
                f"{dataset} is a file, which is read whole: leave out the options for datasets of the hub"
            )
        file = EXAMPLE_DATA / SHIPPED[dataset] if dataset in SHIPPED else Path(shipped_path(dataset)).expanduser()
        if not file.is_file():
            raise ConfigurationError(f"dataset={dataset!r}: no such file; {_choices()}")
        return FromConversationFileBuilder(
            common_config=common_config, file_path=str(file), test_size=test_size, shuffle_seed=seed
        )
    known = hub.find(dataset, HUB_CHATS)
    if known is None:
        raise ConfigurationError(f"dataset={dataset!r} is unknown; {_choices()}")
    options = options or HubOptions()
    return fill(
        FromHFConversationsBuilder,
        options,
        common_config=common_config,
        dataset=known.repository,
        test_size=test_size,
        shuffle_seed=seed,
        config_name=options.config_name or known.config,
        test_split=options.test_split or known.test_split,
    )


def is_hub_dataset(dataset: str) -> bool:
    """Whether a dataset's name refers to the hub (or to a folder in that form), not to a file or a shipped dataset."""
    return not (dataset in SHIPPED or is_data_file(dataset))


def _choices() -> str:
    return (
        f"use a shipped name ({', '.join(SHIPPED)}), a .jsonl/.csv/.parquet file of conversations, "
        f"{' or '.join(HUB_CHATS)}, or the id of a Hugging Face dataset (owner/name)"
    )
