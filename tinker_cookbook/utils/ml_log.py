"""Metrics and log output of a run: `metrics.jsonl`, the terminal, Weights & Biases, trackio, TensorBoard, and `logs.log`.

A loop calls `log_metrics(metrics, step)` on one logger; `setup_logging` decides where that goes. What the metrics mean
is for the loops to say. Other places than a folder are stores (`tinker_cookbook.stores`).
"""

import importlib
import json
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

import chz
from rich import get_console
from rich.console import Console

from tinker_cookbook.exceptions import ConfigurationError, DataFormatError, DataValidationError
from tinker_cookbook.utils.files import append_jsonl, flatten, read_jsonl, to_jsonable, write_json, write_text
from tinker_cookbook.utils.misc_utils import markdown_table
from tinker_cookbook.utils.reward_list import RewardList
from tinker_cookbook.utils.run_logs import configure_logging_module, label_prefix
from tinker_cookbook.utils.run_store import RunStore
from tinker_cookbook.utils.secrets import redact
from tinker_cookbook.utils.step_line import KEY_METRICS, step_line

METRICS_BASE_NAME = "metrics.jsonl"
LOGS_BASE_NAME = "logs.log"
WANDB_ID_BASE_NAME = "wandb_id"
TRACKIO_NAME_BASE_NAME = "trackio_name"
TENSORBOARD_FOLDER = "tensorboard"

Metrics = Mapping[str, float | int | str]


@chz.chz(typecheck=True)
class TrackerConfig:
    """Where metrics go besides `metrics.jsonl` and the terminal. The configs of loops and recipes inherit these fields."""

    wandb_project: str | None = chz.field(default=None, doc="log to this Weights & Biases project (extra: wandb)")
    wandb_name: str | None = chz.field(default=None, doc="name of the W&B or trackio run")
    trackio_project: str | None = chz.field(default=None, doc="log to this trackio project (extra: trackio)")
    tensorboard: bool = chz.field(default=False, doc="write TensorBoard events too (extra: tensorboard)")
    metrics_json: bool = chz.field(
        default=False, doc="write metrics.json too, one JSON list of reward, loss and weights of each step"
    )
    quiet: bool = chz.field(default=False, doc="on the terminal only warnings, errors and where the files are")


PROJECT_KEYS = tuple(key for key in chz.chz_fields(TrackerConfig) if key.endswith("_project"))
"""The fields that ask for a tracker whose runs have names."""


def tracker_settings(config: TrackerConfig) -> dict[str, Any]:
    """The fields of TrackerConfig alone, of a config that may have more: keyword arguments of `setup_logging`."""
    return {key: getattr(config, key) for key in chz.chz_fields(TrackerConfig)}


def read_metrics(log_path: str | Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl, without a torn last line; none if there is no file.

    Raises:
        DataFormatError: a line is damaged. The message begins with `path:line:` and names the fix.
    """
    path = Path(log_path).expanduser() / METRICS_BASE_NAME
    if not path.exists():
        return []
    with naming_fix_of_metrics():
        return read_jsonl(path, tolerate_torn_tail=True)


@contextmanager
def naming_fix_of_metrics() -> Generator[None, None, None]:
    """Errors about a damaged line that leave the body say what to do."""
    try:
        yield
    except DataFormatError as error:
        raise DataFormatError(f"{error}. Remove that line: its step's numbers are lost, and nothing else") from error


class Logger(ABC):
    """Takes the metrics of each step and the config of the run."""

    @abstractmethod
    def log_metrics(self, metrics: Metrics, step: int | None = None) -> None:
        """Record the metrics of one step."""

    def log_hparams(self, config: Any) -> None:  # noqa: B027 - most loggers have nothing to do here
        """Record the config of the run."""

    def log_long_text(self, key: str, text: str) -> None:  # noqa: B027
        """Show a text that is no metric: on the terminal, and in TensorBoard. Other loggers leave it out."""

    def sync(self) -> None:  # noqa: B027 - whatever is logged here is written at once
        """Write what is outstanding."""

    def get_logger_url(self) -> str | None:
        """Where the run can be looked at in a browser; None if there is no such place."""
        return None

    @property
    def store(self) -> RunStore | None:
        """The store that metrics go to; None: they go to a folder."""
        return None

    def close(self) -> None:  # noqa: B027
        """Write what is outstanding and let go of files and connections."""


class JsonLogger(Logger):
    """Appends `{"step": step, ...metrics}` to `metrics.jsonl`; each line is on disk when `log_metrics` returns.

    Args:
        log_dir: the run's folder.
        store: takes metrics and config in place of the folder, such as `tinker_cookbook.stores.TrainingRunStore`.
    """

    def __init__(self, log_dir: str | Path, store: RunStore | None = None) -> None:
        self.log_dir = Path(log_dir)
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self._store = store

    @property
    def store(self) -> RunStore | None:
        """The store that was given."""
        return self._store

    def log_metrics(self, metrics: Metrics, step: int | None = None) -> None:
        """Append one line; without a step the line has no "step".

        Raises:
            DataValidationError: a value is NaN or infinite, or the metrics have a key "step" besides the step.
        """
        if self._store is not None:
            self._store.write_metrics(metrics, step)
        else:
            append_jsonl(self.log_dir / METRICS_BASE_NAME, metrics_row(metrics, step))

    def log_hparams(self, config: Any) -> None:
        """Write `config.json`, unless there is one: a resumed run keeps the config of its first start."""
        if self._store is not None:
            if self._store.read_config() is None:
                self._store.write_config(dump_config(config))
        elif not (path := self.log_dir / "config.json").exists():
            write_json(path, dump_config(config))


class PrettyPrintLogger(Logger):
    """Shows each step on the terminal: on one line, or where that is too long for the terminal on as many as it takes.

    Metrics of an environment of one's own are shown too, the first few of them; groups only where not all were trained on.

    Args:
        key_metrics: metric -> the name to show it under. A step that has none of them shows its first few.
        console: where to print; None: the process's own.
    """

    def __init__(self, key_metrics: Mapping[str, str] = KEY_METRICS, console: Console | None = None) -> None:
        self.key_metrics = dict(key_metrics)
        self.console = console if console is not None else get_console()

    def log_metrics(self, metrics: Metrics, step: int | None = None) -> None:
        """Print one step."""
        width = self.console.width if self.console.is_terminal else sys.maxsize
        line = step_line(metrics, step, self.key_metrics, width, label_prefix())
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def log_long_text(self, key: str, text: str) -> None:
        """Print the text below its key."""
        self.console.print(f"{label_prefix()}{key}\n{text}", markup=False, highlight=False, soft_wrap=True)


class _TrackerLogger(Logger):
    """Sends metrics to the run of a tracker, `_run`, that the subclass opens."""

    _run: Any
    config_options: ClassVar[Mapping[str, Any]] = {}

    def log_metrics(self, metrics: Metrics, step: int | None = None) -> None:
        """Log one step."""
        self._run.log(dict(metrics), step=step)

    def log_hparams(self, config: Any) -> None:
        """Set the config of the tracker's run."""
        dumped = dump_config(config)
        self._run.config.update(dumped if isinstance(dumped, dict) else {"config": dumped}, **self.config_options)

    def close(self) -> None:
        """Finish the tracker's run."""
        self._run.finish()


class WandbLogger(_TrackerLogger):
    """Sends metrics to Weights & Biases. A resumed run continues the same W&B run, whose id is kept in the folder.

    Raises:
        ConfigurationError: the package wandb is not installed.
    """

    config_options: ClassVar[Mapping[str, Any]] = {"allow_val_change": True}

    def __init__(self, project: str, name: str | None = None, log_dir: str | Path | None = None) -> None:
        wandb = _require("wandb", f"wandb_project={project!r}", "wandb_project unset")
        self._run = wandb.init(
            project=project,
            name=name,
            dir=str(log_dir) if log_dir is not None else None,
            id=_remembered(Path(log_dir) / WANDB_ID_BASE_NAME, uuid4().hex) if log_dir is not None else None,
            resume="allow",
        )

    def get_logger_url(self) -> str | None:
        """The page of the run; None offline."""
        return self._run.url


class TrackioLogger(_TrackerLogger):
    """Sends metrics to trackio. A resumed run continues the same trackio run, whose name is kept in the folder.

    Args:
        name: what the run is called; None for the name of its folder. Eight random characters are added, because
            trackio would take two runs of one name for the same.
        log_dir: the run's folder; None for a run that is never resumed.

    Raises:
        ConfigurationError: the package trackio is not installed.
    """

    def __init__(self, project: str, name: str | None = None, log_dir: str | Path | None = None) -> None:
        trackio = _require("trackio", f"trackio_project={project!r}", "trackio_project unset")
        stem = name or (Path(log_dir).resolve().name if log_dir is not None else "run")
        unique = f"{stem}-{uuid4().hex[:8]}"
        if log_dir is not None:
            unique = _remembered(Path(log_dir) / TRACKIO_NAME_BASE_NAME, unique)
        self._run = trackio.init(project=project, name=unique, resume="allow", embed=False)


class TensorBoardLogger(Logger):
    """Writes TensorBoard events into `<log_dir>/tensorboard`: numbers as scalars, other metrics and the config as text.

    The first step that is logged hides what an earlier, interrupted start wrote of that step and later ones.

    Raises:
        ConfigurationError: the package tensorboard is not installed.
    """

    def __init__(self, log_dir: str | Path) -> None:
        _require("tensorboard", "tensorboard=True", "tensorboard=False")
        self._writer_class = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        self._folder = str(Path(log_dir) / TENSORBOARD_FOLDER)
        self._writer: Any = None

    def log_metrics(self, metrics: Metrics, step: int | None = None) -> None:
        """Write one step; it is on disk when this returns."""
        if self._writer is None:
            self._writer = self._writer_class(self._folder, purge_step=step)
        for key, value in metrics.items():
            if isinstance(value, str):
                self._writer.add_text(key, value, step)
            else:
                self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def log_hparams(self, config: Any) -> None:
        """Write the config as text under "config"."""
        leaves = flatten(dump_config(config)).items()
        rows = [["key", "value"], *([key, json.dumps(value, ensure_ascii=False)] for key, value in leaves)]
        # Its own file: the events file of the metrics is opened when it is known with which step they begin.
        with self._writer_class(self._folder, filename_suffix=".config") as writer:
            writer.add_text("config", markdown_table(rows))

    def log_long_text(self, key: str, text: str) -> None:
        """Write the text under its key."""
        with self._writer_class(self._folder, filename_suffix=".text") as writer:
            writer.add_text(key, text)

    def close(self) -> None:
        """Close the events file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class RewardListLogger(Logger):
    """Keeps `metrics.json` (`utils.reward_list`)."""

    def __init__(self, log_dir: str | Path) -> None:
        self._list = RewardList(log_dir)

    def log_metrics(self, metrics: Metrics, step: int | None = None) -> None:
        """Add one step; without a step there is nothing to add."""
        if step is not None:
            self._list.add(metrics, step)


class MultiplexLogger(Logger):
    """Passes everything on to several loggers, in order.

    Args:
        loggers: the loggers.
        on_close: called last when it is closed, to undo what opening has set up.
    """

    def __init__(self, loggers: Sequence[Logger], on_close: Callable[[], None] | None = None) -> None:
        self.loggers = list(loggers)
        self.on_close = on_close

    def log_metrics(self, metrics: Metrics, step: int | None = None) -> None:
        """Log to each."""
        for child in self.loggers:
            child.log_metrics(metrics, step)

    def log_hparams(self, config: Any) -> None:
        """Log to each."""
        for child in self.loggers:
            child.log_hparams(config)

    def log_long_text(self, key: str, text: str) -> None:
        """Pass on to each."""
        for child in self.loggers:
            child.log_long_text(key, text)

    def sync(self) -> None:
        """Sync each."""
        for child in self.loggers:
            child.sync()

    def get_logger_url(self) -> str | None:
        """The first that one of them has."""
        return next((url for child in self.loggers if (url := child.get_logger_url()) is not None), None)

    @property
    def store(self) -> RunStore | None:
        """The first that one of them has."""
        return next((child.store for child in self.loggers if child.store is not None), None)

    def close(self) -> None:
        """Close each, also when one of them fails; then raise the first failure."""
        failures: list[Exception] = []
        on_close, self.on_close = self.on_close, None
        for close in (*(child.close for child in self.loggers), on_close):
            try:
                if close is not None:
                    close()
            except Exception as error:
                failures.append(error)
        if failures:
            raise failures[0]


def setup_logging(
    log_dir: str | Path,
    wandb_project: str | None = None,
    wandb_name: str | None = None,
    config: Any = None,
    do_configure_logging_module: bool = True,
    *,
    trackio_project: str | None = None,
    tensorboard: bool = False,
    metrics_json: bool = False,
    quiet: bool = False,
) -> MultiplexLogger:
    """The loggers of a run: `metrics.jsonl`, the terminal unless `quiet`, and those trackers that are asked for; the config
    goes to each.

    The folder is made if it is missing. None stands for no project of that tracker, and no config; `wandb_name` names the
    trackio run too. With `do_configure_logging_module` Python's logging goes to the terminal and to `logs.log`, until the
    returned logger is closed.

    Raises:
        ConfigurationError: a tracker is asked for whose package is not installed.
        DataValidationError: the config has a NaN or infinite number.
    """
    log_dir = Path(log_dir)
    log_dir.mkdir(parents=True, exist_ok=True)
    multiplex = MultiplexLogger([JsonLogger(log_dir), *([] if quiet else [PrettyPrintLogger()])])
    try:
        if wandb_project is not None:
            multiplex.loggers.append(WandbLogger(wandb_project, wandb_name, log_dir))
        if trackio_project is not None:
            multiplex.loggers.append(TrackioLogger(trackio_project, wandb_name, log_dir))
        if tensorboard:
            multiplex.loggers.append(TensorBoardLogger(log_dir))
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
    return multiplex


def metrics_row(metrics: Metrics, step: int | None) -> dict[str, Any]:
    """What a line of `metrics.jsonl` says. Raises DataValidationError: the metrics have a key "step" besides the step."""
    if step is not None and "step" in metrics:
        raise DataValidationError(f"metrics have a key 'step' ({metrics['step']!r}) besides step={step}; rename it")
    return {**({} if step is None else {"step": step}), **metrics}


def dump_config(config: Any) -> Any:
    """The config as plain JSON types, nested, each chz object with its class name under "class"."""
    return redact(to_jsonable(config))


def _require(package: str, setting: str, otherwise: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigurationError(
            f"{setting}: the package {package} is not installed. "
            f"Install it with `pip install tinker-cookbook-local[{package}]`, or leave {otherwise}"
        ) from error


def _remembered(path: Path, fresh: str) -> str:
    """What an earlier start of the run wrote into this file, else `fresh`, which is written there."""
    if not path.exists():
        write_text(path, fresh)
    return path.read_text(encoding="utf-8").strip()
