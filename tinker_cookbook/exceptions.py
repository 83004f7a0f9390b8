"""Errors that the library raises deliberately. Each also inherits the standard type that it refines (ValueError,
RuntimeError).
"""

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
    "ImageError",
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
    """A required package is not installed, or the feature is not in this library. The message says what to do."""


class DataError(TinkerCookbookError, ValueError):
    """Training or task data cannot be used."""


class DataFormatError(DataError):
    """A line or row of a dataset does not have the expected form. The message names file and line."""


class DataValidationError(DataError):
    """Assembled training data breaks an invariant (lengths, missing logprobs, shapes)."""


class RendererError(TinkerCookbookError, ValueError):
    """A message cannot be rendered or parsed by this renderer."""


class ImageError(DataFormatError, RendererError):
    """An image cannot be read, or the model does not support its kind. The message names it, and its message and part if it is
    in a conversation.
    """


class TrainingError(TinkerCookbookError, RuntimeError):
    """A training step cannot continue."""


class RewardError(TinkerCookbookError, RuntimeError):
    """A user's reward code failed. The message names it, the line, and its input."""


class ZeroAdvantageError(TrainingError):
    """Every advantage of a batch is zero: the step would train nothing."""


class UntrainedRunError(TrainingError):
    """A completed run trained nothing. Resuming it would end the same way, because no step is left."""


class GroupFailedError(TrainingError):
    """A group of rollouts was dropped: too few of its members succeeded. `errors` has the reasons
    (list[RolloutError]).
    """

    def __init__(self, message: str, errors: Iterable[Any] = ()):
        super().__init__(message)
        self.errors = list(errors)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.errors), self.__dict__


class EpisodeFailedError(TrainingError):
    """An episode that runs itself did not end validly; none of it may train."""


AllTrajectoriesFailedError = GroupFailedError
"""Its name in tinker-cookbook."""


class RolloutTimeoutError(TinkerCookbookError, TimeoutError):
    """A rollout, a sampling call or a grader exceeded its time limit. The message names the env and the limit."""


class ServerLostError(TinkerCookbookError, ConnectionError):
    """The server of a run has not answered for longer than the limit. The message names address and limit."""


class EndpointError(TinkerCookbookError, RuntimeError):
    """An OpenAI-compatible endpoint rejected a request or could not be reached. The message names address, model and
    reason.
    """


class CheckpointError(TrainingError):
    """A checkpoint record or its files are missing or unusable."""


class WeightsError(TinkerCookbookError, RuntimeError):
    """Weights cannot be fetched, merged or exported."""


class WeightsDownloadError(WeightsError, CheckpointError):
    """The files of a checkpoint are not available, or differ from the published ones. The message names the checkpoint."""


class WeightsMergeError(WeightsError, ValueError):
    """An adapter does not match the base model for the merge, or the requested merge is not possible."""


class WeightsAdapterError(WeightsError, CheckpointError, ValueError):
    """A folder contains no adapter, or one that cannot be written in the form that a serving program reads."""


class SandboxError(TinkerCookbookError, RuntimeError):
    """Code could not be run in its sandbox."""


class EvalError(TinkerCookbookError, RuntimeError):
    """An evaluation cannot continue."""


class EvalTimeoutError(EvalError, TimeoutError):
    """An example of an evaluation exceeded its time limit."""


class EvalGradingError(EvalError):
    """An answer could not be graded. It does not count as wrong."""


class BenchmarkNotFoundError(EvalError, KeyError):
    """There is no benchmark with this name. The message lists the known ones."""

    __str__ = Exception.__str__  # KeyError would show the message in quotes
