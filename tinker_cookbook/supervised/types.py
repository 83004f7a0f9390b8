"""The data interface of a supervised loop: batches of datums, made by a builder, which is plain, serialisable config."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

import chz

from tinker_cookbook.data.rows import BadRows
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.field_groups import BadRowKey, BatchSize, NamedRenderer
from tinker_cookbook.models import info as model_info
from tinker_cookbook.renderers import Renderer, TrainOnWhat, get_renderer_of_model
from tinker_cookbook.tokenizer_utils import Tokenizer, get_tokenizer
from tinker_cookbook.utils.fields import REQUIRED, FieldGroup
from tinker_cookbook.utils.lazy import tinker

Row = TypeVar("Row")


class SupervisedDataset(ABC):
    """Batches by index. The order may only change between epochs, so that a run can resume anywhere."""

    shared_system_prompt: str | None = None
    """The system prompt of every conversation, for chatting with the result; None: there is none, or it varies."""

    @abstractmethod
    def get_batch(self, index: int) -> list[tinker.Datum]:
        """Batch `index` of the current epoch, 0 <= index < len(self); IndexError outside."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of batches."""

    @property
    def bad_rows(self) -> Sequence[BadRows]:
        """Rows skipped so far; empty if unusable rows raise."""
        return ()

    def set_epoch(self, seed: int = 0) -> None:  # noqa: B027  (a dataset without a shuffle has nothing to do)
        """Shuffle the examples for the epoch with this seed; the same seed gives the same order."""


class RowDataset(SupervisedDataset):
    """A dataset that also has single rows, so that several can be mixed. A row may become several datums.

    A batch has `batch_size` rows, the last one what is left: no row is dropped.

    Args:
        bad: how to handle rows that cannot be used; None: they raise.

    Raises:
        ConfigurationError: there is no row, or batch_size is below 1.
    """

    def __init__(self, num_rows: int, batch_size: int, bad: BadRows | None = None) -> None:
        if num_rows < 1:
            raise ConfigurationError("rows is empty: a dataset needs at least one example")
        if batch_size < 1:
            raise ConfigurationError(f"batch_size={batch_size}: must be at least 1")
        self.num_rows = num_rows
        self.batch_size, self._bad = batch_size, bad or BadRows()

    @property
    def bad_rows(self) -> Sequence[BadRows]:
        return [self._bad] if self._bad.skips else []

    @abstractmethod
    def get_row(self, position: int) -> list[tinker.Datum]:
        """The datums of the row at `position` of the current epoch, 0 <= position < num_rows; empty if it is skipped."""

    def get_batch(self, index: int) -> list[tinker.Datum]:
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of a dataset with {len(self)} batches")
        end = min((index + 1) * self.batch_size, self.num_rows)
        return [datum for position in range(index * self.batch_size, end) for datum in self.get_row(position)]

    def convert(self, place: str, to_datums: Callable[[Row], list[tinker.Datum]], row: Row) -> list[tinker.Datum]:
        """The datums of the row at `place`; empty if it cannot be used and such rows are skipped."""
        datums: list[tinker.Datum] = []
        with self._bad.handle_errors(place):
            datums = to_datums(row)
        return datums

    def __len__(self) -> int:
        return -(-self.num_rows // self.batch_size)


def rows_to_datums(
    map_fn: Callable[[Row], tinker.Datum] | None, flatmap_fn: Callable[[Row], list[tinker.Datum]] | None
) -> Callable[[Row], list[tinker.Datum]]:
    """Combine the two options into one function from a row to its datums. A flatmap_fn must return at least one datum
    per row.

    Raises ConfigurationError unless exactly one of the two is passed; the result raises DataValidationError for a row
    without datums.
    """
    if (map_fn is None) == (flatmap_fn is None):
        raise ConfigurationError(
            f"map_fn={map_fn!r}, flatmap_fn={flatmap_fn!r}: give exactly one, a function from a row to its datum or to "
            "its list of datums"
        )

    def to_datums(row: Row) -> list[tinker.Datum]:
        if map_fn is not None:
            return [map_fn(row)]
        assert flatmap_fn is not None
        datums = list(flatmap_fn(row))
        if not datums:
            raise DataValidationError("flatmap_fn gave no datum for the row; filter such rows out of the dataset first")
        return datums

    return to_datums


@chz.chz(typecheck=True)
class SupervisedDatasetBuilder:
    """Config that makes the training set and, if it has one, the test set."""

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        raise NotImplementedError(f"{type(self).__name__} must define __call__")


@chz.chz(typecheck=True)
class SupervisedData(FieldGroup):
    """Data of a run."""

    dataset_builder: SupervisedDatasetBuilder = chz.field(doc="makes the training and test batches")


@chz.chz(typecheck=True)
class RendererConfig(NamedRenderer):
    """How messages become tokens."""

    model_name_for_tokenizer: str = chz.field(doc="Model whose tokenizer is used: hub id, folder or registered name.")

    @property
    def tokenizer(self) -> Tokenizer:
        return get_tokenizer(self.model_name_for_tokenizer)

    @property
    def renderer(self) -> Renderer:
        return get_renderer_of_model(self.renderer_name, self.model_name_for_tokenizer)


@chz.chz(typecheck=True)
class ExampleSizes(BatchSize, FieldGroup):
    """How many examples, and how long."""

    max_length: int | None = chz.field(
        default=512, doc="longest example in tokens; longer ones are truncated; None: no limit"
    )

    @chz.validate
    def _check_length(self) -> None:
        if self.max_length is not None and self.max_length < 2:
            raise ConfigurationError(f"max_length={self.max_length}: must be at least 2, a token and its target")


@chz.chz(typecheck=True)
class ExampleKeys(ExampleSizes, BadRowKey, FieldGroup):
    """How rows become batches of examples."""


@chz.chz(typecheck=True)
class ConversationKeys(ExampleKeys, FieldGroup):
    """How conversations become examples."""

    train_on_what: TrainOnWhat | None = chz.field(
        default=None, doc=f"which tokens train: {', '.join(TrainOnWhat)}; None: the dataset's default"
    )
    split_rewritten: bool = chz.field(
        default=False,
        doc="train each reply on the tokens the model writes: several examples per conversation where the renderer drops "
        "the thinking of earlier replies",
    )


@chz.chz(typecheck=True)
class ChatDatasetBuilderCommonConfig(ConversationKeys, RendererConfig, max_length=REQUIRED, batch_size=REQUIRED):
    """Settings of every conversation dataset."""


@chz.chz(typecheck=True)
class ChatDatasetBuilder(SupervisedDatasetBuilder):
    """A builder whose examples are conversations."""

    common_config: ChatDatasetBuilderCommonConfig = chz.field(doc="Tokenizer, renderer, lengths and batch size.")

    @property
    def tokenizer(self) -> Tokenizer:
        return self.common_config.tokenizer

    @property
    def context_length(self) -> int | None:
        """The model's context length in tokens; None: unknown."""
        return model_info.get_context_length(self.common_config.model_name_for_tokenizer)

    @property
    def renderer(self) -> Renderer:
        return self.common_config.renderer
