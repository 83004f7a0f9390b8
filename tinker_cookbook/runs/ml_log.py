"""Metrics and log output of a run: `metrics.jsonl`, the terminal, Weights & Biases, trackio, TensorBoard, and `logs.log`.

A loop calls `log_metrics(metrics, step)` on one logger; `setup_logging` chooses the destinations. The loops define the
meaning of metrics. Destinations other than a folder are stores (`tinker_cookbook.stores`).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, cast

import chz
from rich import get_console
from rich.console import Console

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.runs.loggers import Logger, Metrics, dump_config
from tinker_cookbook.runs.reward_list import RewardListLogger
from tinker_cookbook.runs.trackers import make_tracker, tracker_names
from tinker_cookbook.stores.training_store import CONFIG_BASE_NAME, TrainingRunStore
from tinker_cookbook.utils.fields import Defaults
from tinker_cookbook.utils.run_logs import configure_logging_module, label_prefix
from tinker_cookbook.utils.step_line import KEY_METRICS, step_line
from tinker_cookbook.utils.wrapping import F

LOGS_BASE_NAME = "logs.log"


@chz.chz(typecheck=True)
class TrackerConfig(Defaults):
    """The destinations of metrics besides `metrics.jsonl` and the terminal. The configs of loops and recipes inherit
    these fields.
    """

    trackers: str | None = chz.field(
        default=None,
        doc="trackers that receive metrics, separated by commas: wandb, trackio, tensorboard (extras of these names), neptune; "
        "None: wandb if wandb_project is set",
    )
    wandb_project: str | None = chz.field(default=None, doc="project of W&B or trackio")
    wandb_name: str | None = chz.field(default=None, doc="name of the W&B or trackio run")
    metrics_json: bool = chz.field(
        default=False, doc="write metrics.json too, one JSON list of reward, loss and weights of each step"
    )
    quiet: bool = chz.field(default=False, doc="print only warnings, errors and the location of the files")


def tracker_settings(config: TrackerConfig) -> dict[str, Any]:
    """The fields of TrackerConfig from a config that may have more: keyword arguments for `setup_logging`."""
    return {key: getattr(config, key) for key in chz.chz_fields(TrackerConfig)}


def read_metrics(log_path: str | Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl. Errors as `TrainingRunStore.read_metrics`."""
    return TrainingRunStore.in_folder(log_path).read_metrics()


class JsonLogger(Logger):
    """Appends `{"step": step, ...metrics}` to `metrics.jsonl`; each line is on disk when `log_metrics` returns.

    Args:
        log_dir: the run's folder.
        store: receives metrics and config instead of the folder.
    """

    def __init__(self, log_dir: str | Path, store: TrainingRunStore | None = None) -> None:
        self.log_dir = Path(log_dir)
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self._given, self._store = store, store or TrainingRunStore.in_folder(log_dir)

    @property
    def store(self) -> TrainingRunStore | None:
        """The store passed to the constructor."""
        return self._given

    def log_metrics(self, metrics: Metrics, step: int | None = None) -> None:
        """Append one line. Errors as `TrainingRunStore.write_metrics`."""
        self._store.write_metrics(metrics, step)

    def log_hparams(self, config: Any) -> None:
        """Write `config.json`, unless there is one: a resumed run keeps the config of its first start."""
        if not self._store.has(CONFIG_BASE_NAME):
            self._store.write_config(dump_config(config))


class PrettyPrintLogger(Logger):
    """Shows each step on the terminal: on one line, or on several if it does not fit.

    The first few metrics of a custom environment are shown too; group counts only if not all groups were trained on.

    Args:
        key_metrics: metric -> displayed name. For a step without any of them, its first few metrics are shown.
        console: where to print; None: the process's console.
    """

    def __init__(self, key_metrics: Mapping[str, str] = KEY_METRICS, console: Console | None = None) -> None:
        self.key_metrics = dict(key_metrics)
        self.console = console if console is not None else get_console()

    def log_metrics(self, metrics: Metrics, step: int | None = None) -> None:
        """Print one step."""
        width = self.console.width if self.console.is_terminal else None
        line = step_line(metrics, step, self.key_metrics, width, label_prefix())
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def log_long_text(self, key: str, text: str) -> None:
        """Print the text below its key."""
        self.console.print(f"{label_prefix()}{key}\n{text}", markup=False, highlight=False, soft_wrap=True)


def _each(method: F) -> F:
    """The method that calls this one of each logger."""

    @wraps(method)
    def call(self: "MultiplexLogger", *args: Any, **kwargs: Any) -> None:
        for child in self.loggers:
            getattr(child, method.__name__)(*args, **kwargs)

    return cast(F, call)


class MultiplexLogger(Logger):
    """Forwards everything to several loggers, in order.

    Args:
        loggers: the loggers.
        on_close: called last on close, to undo the setup.
    """

    def __init__(self, loggers: Sequence[Logger], on_close: Callable[[], None] | None = None) -> None:
        self.loggers = list(loggers)
        self.on_close = on_close

    def log_metrics(self, metrics: Metrics, step: int | None = None) -> None:
        """Log to each."""
        for child in self.loggers:
            child.log_metrics(metrics, step)

    enable_event_steps = _each(Logger.enable_event_steps)
    log_metrics_event = _each(Logger.log_metrics_event)
    log_hparams = _each(Logger.log_hparams)
    log_summary = _each(Logger.log_summary)
    log_long_text = _each(Logger.log_long_text)
    log_rollouts = _each(Logger.log_rollouts)
    sync = _each(Logger.sync)

    @property
    def takes_rollouts(self) -> bool:
        """Whether any logger does."""
        return any(child.takes_rollouts for child in self.loggers)

    def get_logger_url(self) -> str | None:
        """The first URL of any logger."""
        return next((url for child in self.loggers if (url := child.get_logger_url()) is not None), None)

    @property
    def store(self) -> TrainingRunStore | None:
        """The first store of any logger."""
        return next((child.store for child in self.loggers if child.store is not None), None)

    def close(self) -> None:
        """Close each, even when one fails; then raise the first failure."""
        failures: list[Exception] = []
        if self in _opened:
            _opened.remove(self)
        on_close, self.on_close = self.on_close, None
        for close in (*(child.close for child in self.loggers), on_close):
            try:
                if close is not None:
                    close()
            except Exception as error:
                failures.append(error)
        if failures:
            raise failures[0]


_opened: list[MultiplexLogger] = []
"""The open results of `setup_logging`, newest last."""


def log_metrics(metrics: Metrics, step: int | None = None) -> None:
    """Log to the last open loggers made by `setup_logging`.

    Raises:
        ConfigurationError: there are none.
    """
    if not _opened:
        raise ConfigurationError(
            "log_metrics: no logger is open; call setup_logging first, or use a logger that you made"
        )
    _opened[-1].log_metrics(metrics, step)


def setup_logging(
    log_dir: str | Path,
    wandb_project: str | None = None,
    wandb_name: str | None = None,
    config: Any = None,
    do_configure_logging_module: bool = True,
    *,
    trackers: str | None = None,
    metrics_json: bool = False,
    quiet: bool = False,
) -> MultiplexLogger:
    """The loggers of a run: `metrics.jsonl`, the terminal unless `quiet`, and the selected trackers; each receives the
    config.

    The folder is created if missing. `trackers` are names separated by commas; None: W&B if there is a project.
    Project and name are those of W&B and trackio. With `do_configure_logging_module`, Python's logging goes to the
    terminal and to `logs.log` until the returned logger is closed.

    Raises:
        ConfigurationError: a tracker is unknown, lacks a project, or its package is not installed.
        DataValidationError: the config has a NaN or infinite number.
    """
    log_dir = Path(log_dir)
    log_dir.mkdir(parents=True, exist_ok=True)
    multiplex = MultiplexLogger([JsonLogger(log_dir), *([] if quiet else [PrettyPrintLogger()])])
    try:
        multiplex.loggers += [
            make_tracker(name, wandb_project, wandb_name, log_dir) for name in tracker_names(trackers, wandb_project)
        ]
        if metrics_json:
            multiplex.loggers.append(RewardListLogger(log_dir))
        if do_configure_logging_module:
            terminal_level = logging.WARNING if quiet else logging.INFO
            multiplex.on_close = configure_logging_module(log_dir / LOGS_BASE_NAME, terminal_level=terminal_level)
        if config is not None:
            multiplex.log_hparams(config)
    except BaseException:
        multiplex.close()
        raise
    _opened.append(multiplex)
    return multiplex
