"""Recipes, loops and data for post-training language models, on the hosted Tinker service or on the local engine."""

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


def __getattr__(name: str) -> Any:
    # Reading what is installed takes longer than all the rest of this import.
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tinker_cookbook.utils.git_rev import installed_version

    return installed_version()
