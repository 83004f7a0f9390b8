"""Errors that the library raises on purpose. Each also inherits the standard type that it refines (ValueError, RuntimeError)."""

from collections.abc import Iterable
from typing import Any

__all__ = [
    "AllTrajectoriesFailedError",
    "BenchmarkNotFoundError",
    "CheckpointError",
    "ConfigurationError",
    "DataError",
    "DataFormatError",
    "DataValidationError",
    "EndpointError",
    "EpisodeFailedError",
    "EvalError",
    "EvalGradingError",
    "EvalTimeoutError",
    "GroupFailedError",
    "MissingPackageError",
    "RendererError",
    "RewardError",
    "RolloutTimeoutError",
    "SandboxError",
    "ServerLostError",
    "TinkerCookbookError",
    "TrainingError",
    "UntrainedRunError",
    "WeightsAdapterError",
    "WeightsDownloadError",
    "WeightsError",
    "WeightsMergeError",
    "ZeroAdvantageError",
]


class TinkerCookbookError(Exception):
    """Root of all errors of this library."""


class ConfigurationError(TinkerCookbookError, ValueError):
    """A configuration value is wrong. The message names the field, the value and the fix."""


class MissingPackageError(ConfigurationError, ImportError):
    """What was asked for needs a package that is not installed, or is not in this library. The message says what to do."""


class DataError(TinkerCookbookError, ValueError):
    """Training or task data cannot be used."""


class DataFormatError(DataError):
    """A line or row of a dataset does not have the expected form. The message names file and line."""


class DataValidationError(DataError):
    """Assembled training data breaks an invariant (lengths, missing logprobs, shapes)."""


class RendererError(TinkerCookbookError, ValueError):
    """A message cannot be rendered or parsed by this renderer."""


class TrainingError(TinkerCookbookError, RuntimeError):
    """A training step cannot go on."""


class RewardError(TinkerCookbookError, RuntimeError):
    """Code of a user that scores a reply has failed. The message names it, the line, and what it was given."""


class ZeroAdvantageError(TrainingError):
    """Every advantage of a batch is zero: the step would train nothing."""


class UntrainedRunError(TrainingError):
    """A run has come to its end and trained nothing. Resumed, it ends so again: no step is left."""


class GroupFailedError(TrainingError):
    """A group of rollouts was given up: too few of its members came through. `errors` says why (list[RolloutError])."""

    def __init__(self, message: str, errors: Iterable[Any] = ()):
        super().__init__(message)
        self.errors = list(errors)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.errors), self.__dict__


class EpisodeFailedError(TrainingError):
    """An episode that plays itself did not come to a valid end; nothing of it may train."""


AllTrajectoriesFailedError = GroupFailedError
"""Its name in tinker-cookbook."""


class RolloutTimeoutError(TinkerCookbookError, TimeoutError):
    """A rollout, a sampling call or a grader took longer than its limit. The message names the env and the limit."""


class ServerLostError(TinkerCookbookError, ConnectionError):
    """The server that a run trains on has not answered for longer than the run may wait. The message names address and limit."""


class EndpointError(TinkerCookbookError, RuntimeError):
    """An OpenAI-compatible endpoint refused a request or could not be reached. The message names address, model and reason."""


class CheckpointError(TrainingError):
    """A checkpoint record or its files are missing or unusable."""


class WeightsError(TinkerCookbookError, RuntimeError):
    """Weights cannot be fetched, merged or exported."""


class WeightsDownloadError(WeightsError, CheckpointError):
    """The files of a checkpoint cannot be had, or are not those that were published. The message names the checkpoint."""


class WeightsMergeError(WeightsError, ValueError):
    """An adapter does not fit the base model that it is to be merged into, or the way it is asked for."""


class WeightsAdapterError(WeightsError, CheckpointError, ValueError):
    """A folder holds no adapter, or one that cannot be written in the form that a serving program reads."""


class SandboxError(TinkerCookbookError, RuntimeError):
    """Code could not be run in its sandbox."""


class EvalError(TinkerCookbookError, RuntimeError):
    """An evaluation cannot go on."""


class EvalTimeoutError(EvalError, TimeoutError):
    """An example of an evaluation took longer than its limit."""


class EvalGradingError(EvalError):
    """An answer could not be graded. It is not a wrong answer."""


class BenchmarkNotFoundError(EvalError, KeyError):
    """There is no benchmark of this name. The message lists those that there are."""

    __str__ = Exception.__str__  # KeyError would show the message in quotes
