"""Batches from a stream: a dataset too large to hold, read once per epoch from front to back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from tinker_cookbook.data.rows import located
from tinker_cookbook.exceptions import ConfigurationError, DataError, DataValidationError
from tinker_cookbook.supervised.types import RowDataset, rows_to_datums
from tinker_cookbook.utils.lazy import tinker

if TYPE_CHECKING:
    import datasets

WhenExhausted = Literal["raise", "restart"]


class StreamingSupervisedDatasetFromHFDataset(RowDataset):
    """Rows of a streamed Hugging Face dataset (`load_dataset(..., streaming=True)`).

    Batches are asked for in rising order within an epoch. Asked for a later one, as a resumed run does, the rows between
    are read and passed over, so the rows are those of an uninterrupted run. `set_epoch` starts the stream again, shuffled
    within a buffer (and by shards) as the seed says.

    Args:
        hf_dataset: the stream.
        batch_size: rows per batch; the last batch of an epoch has what is left.
        length: rows of an epoch, known or estimated. What a longer stream has beyond is left for other epochs' shuffles.
        map_fn: row -> datum.
        flatmap_fn: row -> one or more datums. Exactly one of the two is given.
        buffer_size: rows that a shuffle draws from.
        when_exhausted: what to do when the stream is shorter than `length`: "raise", or "restart" it in another order
            to fill the epoch.

    Raises:
        ConfigurationError: length, batch_size or buffer_size is below 1, or not exactly one function is given.
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
    ) -> None:
        for name, value in (("length", length), ("buffer_size", buffer_size)):
            if value < 1:
                raise ConfigurationError(f"{name}={value}: must be at least 1")
        if when_exhausted not in ("raise", "restart"):
            raise ConfigurationError(f"when_exhausted={when_exhausted!r}: must be raise or restart")
        super().__init__(length, batch_size)
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
            # One more per round: seeds of neighbouring epochs are far apart, so no other epoch has the same order.
            stream = stream.shuffle(seed=self._seed + rounds, buffer_size=self._buffer_size)
        return iter(stream)

    def get_row(self, position: int) -> list[tinker.Datum]:
        if position < self._position:
            raise DataError(
                f"row {position} of a stream that has been read up to row {self._position}: it goes forward only; ask for "
                "batches in rising order, or call set_epoch to start again"
            )
        if not position < self.num_rows:
            raise IndexError(f"row {position} of a stream with {self.num_rows} rows per epoch")
        while self._position < position:
            self._read()
        row = self._read()
        with located(f"row {position} of the stream (shuffled with seed {self._seed})"):
            return self._to_datums(row)

    def _read(self) -> dict[str, Any]:
        row = next(self._stream, None)
        if row is None and self._position:
            if self._when_exhausted == "raise":
                raise DataValidationError(
                    f"the stream ended after {self._position} rows, and length={self.num_rows}: set length to what it has, or "
                    "when_exhausted='restart' to fill the epoch with rows from its beginning"
                )
            self._rounds += 1
            self._stream = self._open(self._rounds)
            row = next(self._stream, None)
        if row is None:
            raise DataValidationError("the stream has no row at all; check the dataset, its split and its filters")
        self._position += 1
        return row
