"""Re-exports names of other modules, for scripts that import this path."""

from tinker_cookbook.runs.loggers import Logger, dump_config
from tinker_cookbook.runs.ml_log import (
    JsonLogger,
    MultiplexLogger,
    PrettyPrintLogger,
    log_metrics,
    read_metrics,
    setup_logging,
)
from tinker_cookbook.runs.trackers import NeptuneLogger, TrackioLogger, WandbLogger
from tinker_cookbook.utils.run_logs import configure_logging_module

__all__ = [
    "JsonLogger",
    "Logger",
    "MultiplexLogger",
    "NeptuneLogger",
    "PrettyPrintLogger",
    "TrackioLogger",
    "WandbLogger",
    "configure_logging_module",
    "dump_config",
    "log_metrics",
    "read_metrics",
    "setup_logging",
]
