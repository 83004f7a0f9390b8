"""The interface for writing the files of a run outside its folder; `tinker_cookbook.stores` implements it.

It is at the lowest level of the library, so that loggers and checkpoints can use a store without knowing where it
writes.
"""

from collections.abc import Mapping
from typing import Any, Protocol


class RunStore(Protocol):
    """Receives the config, the metrics and the list of checkpoints of one run."""

    def url(self, path: str = "") -> str:
        """The URL of a file of the run; for a file on disk the resolved path as `file://...`."""
        ...

    def read_config(self) -> dict[str, Any] | None:
        """The stored config; None: there is none."""
        ...

    def write_config(self, config: dict[str, Any]) -> None:
        """Write the config, atomically."""
        ...

    def write_metrics(self, metrics: Mapping[str, float | int | str], step: int | None = None) -> None:
        """Append a line to the metrics."""
        ...

    def write_checkpoint(self, record: dict[str, Any]) -> None:
        """Append a line to the list of checkpoints."""
        ...
