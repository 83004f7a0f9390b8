"""What a dataset is told about its rows: a function to one datum, or to several."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.utils.lazy import tinker

Row = TypeVar("Row")


def rows_to_datums(
    map_fn: Callable[[Row], tinker.Datum] | None, flatmap_fn: Callable[[Row], list[tinker.Datum]] | None
) -> Callable[[Row], list[tinker.Datum]]:
    """One function from a row to its datums. The row of a flatmap_fn must give at least one: nothing is dropped unseen.

    Raises ConfigurationError unless exactly one of the two is given; the result raises DataValidationError for a row
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
