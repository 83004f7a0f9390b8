"""Opening a run: the first step of every training loop.

`open_run` creates the folder, records config and metadata, and opens the loggers. `cli_utils.check_log_dir` decides
before whether an existing folder may be used; `runs.checkpoints` decides after where training continues.
"""

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tinker_cookbook.runs import ml_log
from tinker_cookbook.runs.metadata import write_code_state, write_run_metadata
from tinker_cookbook.stores.folder import one_writer, open_folder
from tinker_cookbook.stores.training_store import METADATA_BASE_NAME, TrainingRunStore
from tinker_cookbook.utils.metric_names import FINAL_KEY, carried, with_aliases
from tinker_cookbook.utils.run_logs import FILE_ONLY

logger = logging.getLogger(__name__)

_noted: Path | None = None


class Run:
    """An open run: its locked folder and its loggers. Made by `open_run`; a context manager that closes both."""

    def __init__(self, log_path: Path, metrics_logger: ml_log.Logger, resumed: bool, opened: ExitStack) -> None:
        self.log_path = log_path
        self.store = TrainingRunStore.in_folder(log_path)
        """the files of the folder"""
        self.logger = metrics_logger
        self.resumed = resumed
        """True if the folder was a run's before. It may still have no checkpoint."""
        self._opened = opened

    def log_metrics(self, metrics: ml_log.Metrics, step: int) -> None:
        """Log the row of a step, with each metric also under its name in tinker-cookbook (`metric_names`)."""
        self.logger.log_metrics(with_aliases(metrics), step=step)

    def log_final(self, evaluation: ml_log.Metrics, step: int) -> None:
        """Log the last row: the final evaluation, plus the last step's training metrics (`metric_names.carried`).

        The step's row is read from its file, which exists even if a run was stopped before its final evaluation.
        """
        rows = self.store.read_metrics()
        last = carried(rows[-1]) if rows else {}
        self.log_metrics({**last, **evaluation, FINAL_KEY: 1}, step)

    def rewind_metrics(self, next_step: int) -> int:
        """Drop the metrics and spans of steps that a resumed run repeats: those with step >= `next_step`.

        Returns:
            The number of lines of metrics dropped.
        """

        return self.store.rewind(next_step)

    def close(self) -> None:
        """Close the loggers and release the folder. Calling it again does nothing."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            # The terminal shows errors in its own way; an unattended run needs the traceback in a file.
            logger.error("the run stopped", exc_info=error, extra=FILE_ONLY)
        self.close()


def open_run(
    log_path: str | Path,
    *,
    config: Any,
    recipe_name: str,
    trackers: ml_log.TrackerConfig | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Run:
    """Create or reopen the folder of a run and return it with its loggers. Use it in a `with` statement.

    Args:
        extra: additional entries for the metadata.

    Raises:
        ConfigurationError: `log_path` is not writable, another run is writing to it, or a logger's package is not
            installed.
        DataFormatError: the folder has a damaged `run_metadata.json`, or one of a later version.
        DataValidationError: the config has a value that JSON cannot represent.
    """
    log_path = open_folder(log_path, "log_path")
    with ExitStack() as opening:
        opening.enter_context(one_writer(log_path, "log_path"))
        resumed = (log_path / METADATA_BASE_NAME).exists()
        write_code_state(log_path)
        entry = write_run_metadata(log_path, config=config, recipe_name=recipe_name, extra=extra)
        tracked = ml_log.tracker_settings(trackers) if trackers is not None else {}
        loggers = ml_log.setup_logging(log_path, config=config, **tracked)
        opening.callback(loggers.close)
        run = Run(log_path, loggers, resumed, opening.pop_all())
    note_log_path(log_path)
    for key, (before, after) in entry.get("changed", {}).items():
        logger.warning("resumed with another %s: %r, was %r at the first start", key, after, before)
    for key, what in (("added", "did not have these keys yet"), ("removed", "still had these keys")):
        if names := entry.get(key):
            text = ", ".join(f"{name}={value!r}" for name, value in names.items())
            logger.info("the version that the run was started with %s: %s", what, text)
    return run


def note_log_path(log_path: str | Path | None) -> None:
    """Record the folder that a command needs to resume this run or sweep. A run in a subfolder belongs to it."""
    global _noted
    path = None if log_path is None else Path(log_path).expanduser()
    if path is None or _noted is None or not path.is_relative_to(_noted):
        _noted = path


def last_log_path() -> Path | None:
    """The last recorded folder, for the message about resuming the run; None if it could not be created."""
    return _noted if _noted is not None and _noted.is_dir() else None
