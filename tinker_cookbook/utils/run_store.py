"""What the files of a run are written through where it is not its own folder; `tinker_cookbook.stores` has one.

It stands at the bottom of the house, so that loggers and checkpoints can take a store without knowing where it writes.
"""

from collections.abc import Mapping
from typing import Any, Protocol


class RunStore(Protocol):
    """Takes the config, the metrics and the list of checkpoints of one run."""

    def url(self, path: str = "") -> str:
        """Where a file of the run is; that of a file on disk is its resolved path as `file://...`."""
        ...

    def read_config(self) -> dict[str, Any] | None:
        """The config that was written; None: none was."""
        ...

    def write_config(self, config: dict[str, Any]) -> None:
        """Write the config, whole or not at all."""
        ...

    def write_metrics(self, metrics: Mapping[str, float | int | str], step: int | None = None) -> None:
        """Append a line to the metrics."""
        ...

    def write_checkpoint(self, record: dict[str, Any]) -> None:
        """Append a line to the list of checkpoints."""
        ...
