"""Recipes, loops and data for post-training language models, on the hosted Tinker service or on the local engine."""

import os
import warnings
from typing import Any

from tinker_cookbook.exceptions import (
    AllTrajectoriesFailedError,
    BenchmarkNotFoundError,
    CheckpointError,
    ConfigurationError,
    DataError,
    DataFormatError,
    DataValidationError,
    EvalError,
    EvalGradingError,
    EvalTimeoutError,
    RendererError,
    SandboxError,
    TinkerCookbookError,
    TrainingError,
    WeightsAdapterError,
    WeightsDownloadError,
    WeightsError,
    WeightsMergeError,
)

__upstream__ = "0.6.1"
"""The version of tinker-cookbook whose names and files this library follows."""

__version__: str
"""This project's own version."""

__all__ = [
    "AllTrajectoriesFailedError",
    "BenchmarkNotFoundError",
    "CheckpointError",
    "ConfigurationError",
    "DataError",
    "DataFormatError",
    "DataValidationError",
    "EvalError",
    "EvalGradingError",
    "EvalTimeoutError",
    "RendererError",
    "SandboxError",
    "TinkerCookbookError",
    "TrainingError",
    "WeightsAdapterError",
    "WeightsDownloadError",
    "WeightsError",
    "WeightsMergeError",
    "__upstream__",
    "__version__",
]


def _other_owners(folder: str) -> list[str]:
    """The metadata folders in `folder` of the distribution tinker-cookbook, whose package has the same name as this one."""
    # List the folder directly: importing importlib.metadata takes longer than the rest of this import.
    try:
        return [
            name for name in os.listdir(folder) if name.startswith("tinker_cookbook-") and name.endswith(".dist-info")
        ]
    except OSError:  # a package in an archive
        return []


if _other_owners(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))):
    warnings.warn(
        "the distribution tinker-cookbook is installed next to this project and has files at the same paths, so updating or "
        "removing either breaks the other; run `pip uninstall tinker-cookbook`, then install this project again, or give it a "
        "separate environment",
        stacklevel=2,
    )


def __getattr__(name: str) -> Any:
    # Reading the installed metadata takes longer than the rest of this import.
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tinker_cookbook.utils.git_rev import installed_version

    return installed_version()
