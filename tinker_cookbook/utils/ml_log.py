"""Metrics and log output of a run: `metrics.jsonl`, progress on the terminal, Weights & Biases, and `logs.log`.

A loop calls `log_metrics(metrics, step)` on one logger; `setup_logging` decides where that goes. What the metrics mean
is for the loops to say.
"""

import importlib
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from rich.console import Console

from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.runs.files import append_jsonl, to_jsonable, write_json, write_text

logger = logging.getLogger(__name__)

METRICS_BASE_NAME = "metrics.jsonl"
LOGS_BASE_NAME = "logs.log"
WANDB_ID_BASE_NAME = "wandb_id"

Metrics = Mapping[str, float | int | str]

FILE_ONLY = {"file_only": True}
"""`extra=FILE_ONLY` in a logging call sends the record to `logs.log` and not to the terminal."""

KEY_METRICS = {
    "progress/done_frac": "done",
    "progress": "done",
    "env/all/reward/total": "reward",
    "env/all/correct": "correct",
    "env/all/debate/judge_accuracy": "judge",
    "train_mean_nll": "nll",
    "dpo_loss": "dpo_loss",
    "accuracy": "accuracy",
    "teacher_kl": "teacher_kl",
    "train_questions/env/all/correct": "train_questions/correct",
    "test/env/all/correct": "test/correct",
    "test/env/all/task_reward": "test/task_reward",
    "test/nll": "test/nll",
    "optim/kl_sample_train_v1": "kl",
    "optim/entropy": "entropy",
    "optim/lr": "lr",
    "learning_rate": "lr",
    "time/total": "seconds",
}
"""What the terminal shows of a step, and under which name; everything else is in metrics.jsonl."""


class Logger(ABC):
    """Takes the metrics of each step and the config of the run."""

    @abstractmethod
    def log_metrics(self, metrics: Metrics, step: int | None = None) -> None:
        """Record the metrics of one step."""

    def log_hparams(self, config: Any) -> None:  # noqa: B027 - most loggers have nothing to do here
        """Record the config of the run."""

    def close(self) -> None:  # noqa: B027
        """Write what is outstanding and let go of files and connections."""


class JsonLogger(Logger):
    """Appends `{"step": step, ...metrics}` to `metrics.jsonl`; each line is on disk when `log_metrics` returns."""

    def __init__(self, log_dir: str | Path) -> None:
        self.log_dir = Path(log_dir)
        self.log_dir.mkdir(parents=True, exist_ok=True)

    def log_metrics(self, metrics: Metrics, step: int | None = None) -> None:
        """Append one line; without a step the line has no "step".

        Raises:
            DataValidationError: a value is NaN or infinite, or the metrics have a key "step" besides the step.
        """
        if step is None:
            append_jsonl(self.log_dir / METRICS_BASE_NAME, dict(metrics))
            return
        if "step" in metrics:
            raise DataValidationError(f"metrics have a key 'step' ({metrics['step']!r}) besides step={step}; rename it")
        append_jsonl(self.log_dir / METRICS_BASE_NAME, {"step": step, **metrics})

    def log_hparams(self, config: Any) -> None:
        """Write `config.json`, unless the folder has one: a resumed run keeps the config of its first start."""
        path = self.log_dir / "config.json"
        if not path.exists():
            write_json(path, dump_config(config))


class PrettyPrintLogger(Logger):
    """Shows each step on the terminal as one line.

    Args:
        key_metrics: metric -> the name to show it under. A step that has none of them shows its first few.
        console: where to print.
    """

    FALLBACK = 6

    def __init__(self, key_metrics: Mapping[str, str] = KEY_METRICS, console: Console | None = None) -> None:
        self.key_metrics = dict(key_metrics)
        self.console = console if console is not None else Console()

    def log_metrics(self, metrics: Metrics, step: int | None = None) -> None:
        """Print one step."""
        shown = {label: metrics[key] for key, label in self.key_metrics.items() if key in metrics}
        if not shown:
            shown = dict(list(metrics.items())[: self.FALLBACK])
        title = "metrics" if step is None else f"step {step:4d}"
        self._print_line("  ".join([title, *(f"{label}={_show(value)}" for label, value in shown.items())]))

    def _print_line(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)


class WandbLogger(Logger):
    """Sends metrics to Weights & Biases. A resumed run continues the same W&B run, whose id is kept in the folder.

    Raises:
        ConfigurationError: the package wandb is not installed.
    """

    def __init__(self, project: str, name: str | None = None, log_dir: str | Path | None = None) -> None:
        try:
            wandb = importlib.import_module("wandb")
        except ImportError as error:
            raise ConfigurationError(
                f"wandb_project={project!r}: the package wandb is not installed. "
                "Install it with `pip install tinker-cookbook-local[wandb]`, or leave wandb_project unset"
            ) from error
        self._run = wandb.init(
            project=project,
            name=name,
            dir=str(log_dir) if log_dir is not None else None,
            id=_wandb_id(Path(log_dir)) if log_dir is not None else None,
            resume="allow",
        )

    def log_metrics(self, metrics: Metrics, step: int | None = None) -> None:
        """Log one step."""
        self._run.log(dict(metrics), step=step)

    def log_hparams(self, config: Any) -> None:
        """Set the config of the W&B run."""
        dumped = dump_config(config)
        self._run.config.update(dumped if isinstance(dumped, dict) else {"config": dumped}, allow_val_change=True)

    def close(self) -> None:
        """Finish the W&B run."""
        self._run.finish()


class MultiplexLogger(Logger):
    """Passes everything on to several loggers, in order.

    Args:
        loggers: the loggers.
        on_close: called last when it is closed, to undo what opening has set up.
    """

    def __init__(self, loggers: Sequence[Logger], on_close: Callable[[], None] | None = None) -> None:
        self.loggers = list(loggers)
        self._on_close = on_close

    def log_metrics(self, metrics: Metrics, step: int | None = None) -> None:
        """Log to each."""
        for child in self.loggers:
            child.log_metrics(metrics, step)

    def log_hparams(self, config: Any) -> None:
        """Log to each."""
        for child in self.loggers:
            child.log_hparams(config)

    def close(self) -> None:
        """Close each, also when one of them fails; then raise the first failure."""
        failures: list[Exception] = []
        closing = [child.close for child in self.loggers]
        if self._on_close is not None:
            closing.append(self._on_close)
            self._on_close = None
        for close in closing:
            try:
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
) -> MultiplexLogger:
    """The loggers of a run: `metrics.jsonl`, the terminal, and W&B if a project is named; the config goes to each.

    Args:
        log_dir: the run's folder; made if it is missing.
        wandb_project: W&B project; None for no W&B.
        wandb_name: display name of the W&B run.
        config: the config to record; None for none.
        do_configure_logging_module: also send Python's logging to the terminal and to `logs.log`, until the returned
            logger is closed.

    Raises:
        ConfigurationError: W&B is asked for and not installed.
        DataValidationError: the config has a NaN or infinite number.
    """
    log_dir = Path(log_dir)
    log_dir.mkdir(parents=True, exist_ok=True)
    loggers: list[Logger] = [JsonLogger(log_dir), PrettyPrintLogger()]
    if wandb_project is not None:
        loggers.append(WandbLogger(wandb_project, wandb_name, log_dir))
    restore = configure_logging_module(log_dir / LOGS_BASE_NAME) if do_configure_logging_module else None
    multiplex = MultiplexLogger(loggers, on_close=restore)
    if config is not None:
        try:
            multiplex.log_hparams(config)
        except BaseException:
            multiplex.close()
            raise
    return multiplex


def dump_config(config: Any) -> Any:
    """The config as plain JSON types, nested, each chz object with its class name under "class"."""
    return to_jsonable(config)


def configure_logging_module(path: str | Path, level: int = logging.INFO) -> Callable[[], None]:
    """Send Python's logging to the terminal (stderr) and, appended, to the file `path`; record the command line there.

    Handlers of the root logger are replaced, so that no record appears twice.

    Returns:
        A function that closes the file and puts the earlier handlers back.
    """
    root = logging.getLogger()
    previous_handlers, previous_level = root.handlers[:], root.level
    terminal = logging.StreamHandler()
    terminal.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    terminal.addFilter(lambda record: not getattr(record, "file_only", False))
    file = logging.FileHandler(path, mode="a", encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root.handlers[:] = [terminal, file]
    root.setLevel(level)

    def restore() -> None:
        file.close()
        # If somebody has replaced the handlers meanwhile, theirs stay.
        if root.handlers == [terminal, file]:
            root.handlers[:] = previous_handlers
            root.setLevel(previous_level)

    logger.info("command line: %s", sys.argv, extra=FILE_ONLY)
    return restore


def _wandb_id(log_dir: Path) -> str:
    path = log_dir / WANDB_ID_BASE_NAME
    if not path.exists():
        write_text(path, uuid4().hex)
    return path.read_text(encoding="utf-8").strip()


def _show(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
