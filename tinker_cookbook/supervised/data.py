"""Datasets of conversations: from conversations to datums, rows in memory or in a Hugging Face dataset, a JSONL file.

Reading is left to `conversations`, streams to `streaming`, several datasets at once to `mixture`, the hub to `hub`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import chz

from tinker_cookbook.data.epochs import ShuffledItems, hold_out
from tinker_cookbook.data.rows import located
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Message, Renderer, TrainOnWhat
from tinker_cookbook.supervised.common import Reduction, datum_from_model_input_weights
from tinker_cookbook.supervised.conversations import ConversationRow, read_conversations
from tinker_cookbook.supervised.streaming import StreamingSupervisedDatasetFromHFDataset
from tinker_cookbook.supervised.types import ChatDatasetBuilder, RowDataset, SupervisedDataset, rows_to_datums
from tinker_cookbook.utils.lazy import tinker

if TYPE_CHECKING:
    import datasets

__all__ = [
    "ConversationRow",
    "FromConversationFileBuilder",
    "StreamingSupervisedDatasetFromHFDataset",
    "SupervisedDatasetFromHFDataset",
    "SupervisedDatasetFromList",
    "conversation_to_datum",
    "conversation_to_datums",
    "read_conversations",
]

logger = logging.getLogger(__name__)

Row = TypeVar("Row")

_MERGED_HISTORY = (TrainOnWhat.LAST_ASSISTANT_TURN, TrainOnWhat.ALL_ASSISTANT_MESSAGES)
"""What may select several replies, of which a renderer without the extension property rewrites all but the last."""


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
    """One conversation as few datums as train every selected reply on the tokens that the model would have written.

    With reduction="mean" each datum weighs the same, so a conversation that is split weighs as many times more.
    Raises as conversation_to_datum.
    """
    if renderer.has_extension_property or train_on_what not in _MERGED_HISTORY:
        return [conversation_to_datum(conversation, renderer, max_length, train_on_what, reduction)]
    examples = renderer.build_supervised_examples(conversation, train_on_what)
    return [datum_from_model_input_weights(*example, max_length, reduction) for example in examples]


class SupervisedDatasetFromList(RowDataset, Generic[Row]):
    """Rows in memory, turned into datums when their batch is asked for. They keep their order until set_epoch.

    Give `to_datum`, or `flatmap_fn` for rows that become several datums each; batch_size counts rows.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        batch_size: int,
        to_datum: Callable[[Row], tinker.Datum] | None = None,
        flatmap_fn: Callable[[Row], list[tinker.Datum]] | None = None,
    ) -> None:
        super().__init__(len(rows), batch_size)
        self._rows, self._to_datums = rows, rows_to_datums(to_datum, flatmap_fn)
        self._order = ShuffledItems(range(len(rows)))

    def get_row(self, position: int) -> list[tinker.Datum]:
        return self._to_datums(self._rows[self._order.get_row(position)])

    def set_epoch(self, seed: int = 0) -> None:
        self._order.set_epoch(seed)


class SupervisedDatasetFromHFDataset(SupervisedDatasetFromList[dict[str, Any]]):
    """Rows of a map-style Hugging Face dataset, turned into datums when their batch is asked for.

    Args:
        hf_dataset: the rows; shuffled by set_epoch, without touching the dataset or its cache files.
        batch_size: rows per batch; the last batch has what is left.
        map_fn: row -> datum.
        flatmap_fn: row -> one or more datums. Exactly one of the two is given.

    Errors of these functions are told with the row's index.
    """

    def __init__(
        self,
        hf_dataset: datasets.Dataset,
        batch_size: int,
        map_fn: Callable[[dict[str, Any]], tinker.Datum] | None = None,
        flatmap_fn: Callable[[dict[str, Any]], list[tinker.Datum]] | None = None,
    ) -> None:
        super().__init__(cast(Sequence[dict[str, Any]], hf_dataset), batch_size, map_fn, flatmap_fn)

    def get_row(self, position: int) -> list[tinker.Datum]:
        with located(f"row {self._order.get_row(position)}"):
            return super().get_row(position)


def conversation_mapper(builder: ChatDatasetBuilder, default: TrainOnWhat) -> Callable[[list[Message]], list]:
    """How a builder's config turns a conversation into datums. `default`: train_on_what where the config leaves it open."""
    config = builder.common_config
    convert = conversation_to_datums if config.split_rewritten else _as_one
    return partial(
        convert,
        renderer=builder.renderer,
        max_length=config.max_length,
        train_on_what=config.train_on_what or default,
    )


def _as_one(conversation: list[Message], **settings: Any) -> list[tinker.Datum]:
    return [conversation_to_datum(conversation, **settings)]


@chz.chz(typecheck=True)
class FromConversationFileBuilder(ChatDatasetBuilder):
    """Conversations from a JSONL file. All assistant messages are trained unless common_config says otherwise."""

    file_path: str = chz.field(doc="JSONL file, one conversation per line.")
    test_size: int = chz.field(default=0, doc="Conversations held out as the test set; 0: no test set.")
    shuffle_seed: int | None = chz.field(default=0, doc="Shuffles before the split; None keeps the order of the file.")

    @chz.validate
    def _check_test_size(self) -> None:
        if self.test_size < 0:
            raise ConfigurationError(f"test_size={self.test_size}: must be 0 (no test set) or more")

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        rows = read_conversations(self.file_path)
        train, test = hold_out(rows, self.test_size, self.shuffle_seed, self.file_path)
        warn_of_rewritten_history([row.messages for row in rows], self)
        convert = conversation_mapper(self, TrainOnWhat.ALL_ASSISTANT_MESSAGES)
        to_datums = partial(_placed, convert=convert)
        batch_size = self.common_config.batch_size
        return (
            SupervisedDatasetFromList(train, batch_size, flatmap_fn=to_datums),
            SupervisedDatasetFromList(test, batch_size, flatmap_fn=to_datums) if test else None,
        )


def _placed(row: ConversationRow, convert: Callable[[list[Message]], list[tinker.Datum]]) -> list[tinker.Datum]:
    with located(row.place):
        return convert(row.messages)


def warn_of_rewritten_history(conversations: Sequence[list[Message]], builder: ChatDatasetBuilder) -> None:
    """Say so when replies are going to be trained in a form in which the model never writes them."""
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
