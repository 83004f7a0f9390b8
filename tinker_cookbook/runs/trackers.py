"""Third-party trackers: W&B, trackio, TensorBoard, Neptune. Their packages are imported on use."""

import difflib
import importlib
import json
import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.runs.loggers import Logger, Metrics, dump_config
from tinker_cookbook.utils.extras import install_command
from tinker_cookbook.utils.files import flatten, write_text
from tinker_cookbook.utils.misc_utils import markdown_table

WANDB_ID_BASE_NAME = "wandb_id"
TRACKIO_NAME_BASE_NAME = "trackio_name"
TENSORBOARD_FOLDER = "tensorboard"
ROLLOUTS = "rollouts"
NAMES = ("wandb", "trackio", "tensorboard", "neptune")


def tracker_names(trackers: str | None, project: str | None) -> list[str]:
    """The selected trackers, see `ml_log.TrackerConfig`.

    Raises:
        ConfigurationError: an unknown name, or a tracker that lacks a project.
    """
    if trackers is None:
        return ["wandb"] if project is not None else []
    names = [name.strip() for name in trackers.split(",") if name.strip()]
    for name in names:
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, n=1)
            raise ConfigurationError(
                f"trackers={trackers!r}: {name!r} is unknown; use {', '.join(NAMES)}"
                + (f". Did you mean {near[0]!r}?" if near else "")
            )
        if name != "tensorboard" and project is None:
            raise ConfigurationError(f"trackers={trackers!r}: {name} needs a project; set wandb_project=...")
    return list(dict.fromkeys(names))


def check_trackers(trackers: str | None, project: str | None) -> None:
    """Check the requirements of the selected trackers without creating anything.

    Raises:
        ConfigurationError: as in `tracker_names`, a package that is not installed, or a missing token for Neptune.
    """
    for name in tracker_names(trackers, project):
        _package_of(name, project)


def make_tracker(name: str, project: str | None, run_name: str | None, log_dir: Path) -> Logger:
    """Create one of NAMES, with a project if it needs one. Raises ConfigurationError: its package is not installed."""
    if name == "tensorboard":
        return TensorBoardLogger(log_dir)
    if name == "neptune":
        return NeptuneLogger(project, log_dir=log_dir, neptune_name=run_name)
    if name == "trackio":
        return TrackioLogger(project, log_dir=log_dir, trackio_name=run_name)
    return WandbLogger(project, log_dir=log_dir, wandb_name=run_name)


class _TrackerLogger(Logger):
    """Sends metrics to a tracker's run, `_run`, which the subclass opens."""

    _run: Any
    config_options: ClassVar[Mapping[str, Any]] = {}

    def log_metrics(self, metrics: Metrics, step: int | None = None) -> None:
        """Log one step."""
        self._run.log(dict(metrics), step=step)

    @property
    @abstractmethod
    def _package(self) -> Any:
        """The tracker's package, which has a Table."""

    @property
    def takes_rollouts(self) -> bool:
        """It shows them as a table."""
        return True

    def log_rollouts(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Log a table `rollouts` of the step."""
        if rows:
            data = [[_cell(value) for value in row.values()] for row in rows]
            self._run.log({ROLLOUTS: self._package.Table(columns=[*rows[0]], data=data)}, step=step)

    def log_hparams(self, config: Any) -> None:
        """Set the config of the tracker's run."""
        dumped = dump_config(config)
        self._run.config.update(dumped if isinstance(dumped, dict) else {"config": dumped}, **self.config_options)

    def close(self) -> None:
        """Finish the tracker's run."""
        self._run.finish()


class WandbLogger(_TrackerLogger):
    """Sends metrics to Weights & Biases. A resumed run continues the same W&B run; its id is stored in the folder.

    Args:
        config: the run's config, as `log_hparams` takes it.
        log_dir: the run's folder; None for a run that is never resumed.
        wandb_name: the name of the run.

    Raises:
        ConfigurationError: the package wandb is not installed.
    """

    config_options: ClassVar[Mapping[str, Any]] = {"allow_val_change": True}

    def __init__(
        self,
        project: str | None = None,
        config: Any = None,
        log_dir: str | Path | None = None,
        wandb_name: str | None = None,
    ) -> None:
        self._wandb = _package_of("wandb", project)
        self._run = self._wandb.init(
            project=project,
            name=wandb_name,
            dir=str(log_dir) if log_dir is not None else None,
            id=_remembered(Path(log_dir) / WANDB_ID_BASE_NAME, uuid4().hex) if log_dir is not None else None,
            resume="allow",
        )
        self._event_steps = False
        if config is not None:
            self.log_hparams(config)

    def enable_event_steps(self) -> None:
        """From now on rows are numbered as they arrive; a step's row is drawn over the metric `training/step`."""
        if not self._event_steps:
            self._event_steps = True
            self._run.define_metric("training/step")
            self._run.define_metric("*", step_metric="training/step", step_sync=False)

    def log_metrics(self, metrics: Metrics, step: int | None = None) -> None:
        """Log one step."""
        if not self._event_steps:
            return super().log_metrics(metrics, step)
        self._run.log(dict(metrics) | ({} if step is None else {"training/step": step}), commit=True)

    def log_metrics_event(
        self, metrics: Metrics, step: int, step_metric: str, metric_axes: Mapping[str, str] | None = None
    ) -> None:
        """Log a row with `step_metric` as its x-axis."""
        self.enable_event_steps()
        axes = {name: (metric_axes or {}).get(name, step_metric) for name in metrics}
        for axis in {step_metric, *axes.values()}:
            self._run.define_metric(axis)
        for name, axis in axes.items():
            if name not in axes.values():
                self._run.define_metric(name, step_metric=axis, step_sync=False)
        self.log_metrics({**metrics, step_metric: step})

    @property
    def _package(self) -> Any:
        return self._wandb

    def log_summary(self, metrics: Metrics) -> None:
        """Update the run's summary."""
        self._run.summary.update(dict(metrics))

    def get_logger_url(self) -> str | None:
        """The page of the run; None offline."""
        return self._run.url


class TrackioLogger(_TrackerLogger):
    """Sends metrics to trackio. A resumed run continues the same trackio run; its name is stored in the folder.

    Args:
        config: the run's config, as `log_hparams` takes it.
        log_dir: the run's folder; None for a run that is never resumed.
        trackio_name: the name of the run; None: the name of its folder. Eight random characters are added, because
            trackio merges runs of the same name.

    Raises:
        ConfigurationError: the package trackio is not installed.
    """

    def __init__(
        self,
        project: str | None = None,
        config: Any = None,
        log_dir: str | Path | None = None,
        trackio_name: str | None = None,
    ) -> None:
        self._trackio = _package_of("trackio", project)
        stem = trackio_name or (Path(log_dir).resolve().name if log_dir is not None else "run")
        unique = f"{stem}-{uuid4().hex[:8]}"
        if log_dir is not None:
            unique = _remembered(Path(log_dir) / TRACKIO_NAME_BASE_NAME, unique)
        self._run = self._trackio.init(project=project or "default", name=unique, resume="allow", embed=False)
        if config is not None:
            self.log_hparams(config)

    @property
    def _package(self) -> Any:
        return self._trackio


class NeptuneLogger(Logger):
    """Sends metrics to Neptune; its token is read from NEPTUNE_API_TOKEN. Text metrics are dropped.

    Args:
        project: `workspace/project`.
        config: the run's config, as `log_hparams` takes it.
        log_dir: where Neptune stores unsent data.
        neptune_name: the name of the experiment.

    Raises:
        ConfigurationError: the package neptune-scale is not installed, or there is no token.
    """

    def __init__(
        self,
        project: str | None = None,
        config: Any = None,
        log_dir: str | Path | None = None,
        neptune_name: str | None = None,
    ) -> None:
        package = _package_of("neptune", project)
        folder = None if log_dir is None else str(log_dir)
        self._run = package.Run(project=project, log_directory=folder, experiment_name=neptune_name)
        if config is not None:
            self.log_hparams(config)

    def log_metrics(self, metrics: Metrics, step: int | None = None) -> None:
        """Log one step; rows without a step go to the run's attributes."""
        if step is None:
            return self._run.log_configs(dict(metrics))
        return self._run.log_metrics({k: v for k, v in metrics.items() if not isinstance(v, str)}, step=step)

    def log_hparams(self, config: Any) -> None:
        """Set the config of the experiment."""
        self._run.log_configs(dump_config(config), flatten=True)

    def get_logger_url(self) -> str | None:
        """The page of the run."""
        return self._run.get_run_url()

    def close(self) -> None:
        """Send pending data."""
        self._run.close()


class TensorBoardLogger(Logger):
    """Writes TensorBoard events into `<log_dir>/tensorboard`: numbers as scalars, other metrics and the config as text.

    The first logged step hides what an earlier, interrupted start wrote for that step and later ones.

    Raises:
        ConfigurationError: the package tensorboard is not installed.
    """

    def __init__(self, log_dir: str | Path) -> None:
        _package_of("tensorboard", None)
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

    @property
    def takes_rollouts(self) -> bool:
        """It shows them as text."""
        return True

    def log_rollouts(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Write the rollouts of a step as a table in text."""
        if rows:
            lines = [[*rows[0]], *([_line(value) for value in row.values()] for row in rows)]
            self._write_text(ROLLOUTS, markdown_table(lines), step)

    def log_hparams(self, config: Any) -> None:
        """Write the config as text under "config"."""
        leaves = flatten(dump_config(config)).items()
        rows = [["key", "value"], *([key, json.dumps(value, ensure_ascii=False)] for key, value in leaves)]
        # A separate file: the metrics' events file is opened when the first step is known.
        with self._writer_class(self._folder, filename_suffix=".config") as writer:
            writer.add_text("config", markdown_table(rows))

    def log_long_text(self, key: str, text: str) -> None:
        """Write the text under its key."""
        self._write_text(key, text, None)

    def _write_text(self, key: str, text: str, step: int | None) -> None:
        with self._writer_class(self._folder, filename_suffix=".text") as writer:
            writer.add_text(key, text, step)

    def close(self) -> None:
        """Close the events file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _package_of(tracker: str, project: str | None) -> Any:
    """The package of one of NAMES. Raises ConfigurationError: it is not installed, or there is no token."""
    given = f"wandb_project={project!r}"
    setting = {"wandb": given, "tensorboard": "trackers=tensorboard"}.get(tracker, f"trackers={tracker}, {given}")
    otherwise = f"{'trackers and wandb_project' if tracker == 'wandb' else 'trackers'} unset"
    package = {"neptune": "neptune_scale"}.get(tracker, tracker)
    try:
        module = importlib.import_module(package)
    except ImportError as error:
        raise ConfigurationError(
            f"{setting}: the package {package} is not installed. "
            f"Install it with {install_command(tracker)}, or leave {otherwise}"
        ) from error
    if tracker == "neptune" and not os.environ.get("NEPTUNE_API_TOKEN"):
        raise ConfigurationError(f"trackers=neptune: NEPTUNE_API_TOKEN is not set; set it, or leave {otherwise}")
    return module


def _remembered(path: Path, fresh: str) -> str:
    """The value that an earlier start of the run stored in this file; otherwise `fresh`, which is stored there."""
    if not path.exists():
        write_text(path, fresh)
    return path.read_text(encoding="utf-8").strip()


def _cell(value: Any) -> Any:
    """Tables have plain values."""
    return value if isinstance(value, str | int | float | None) else json.dumps(value, ensure_ascii=False)


def _line(value: Any) -> str:
    """A line break would end the row of a text table."""
    return str(_cell(value)).replace("\n", " ⏎ ")
