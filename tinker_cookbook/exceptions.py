"""Errors that the library raises on purpose. Each also inherits the standard type that it refines (ValueError, RuntimeError)."""

from collections.abc import Iterable
from typing import Any


class TinkerCookbookError(Exception):
    """Root of all errors of this library."""


class ConfigurationError(TinkerCookbookError, ValueError):
    """A configuration value is wrong. The message names the field, the value and the fix."""


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
    """Code of an environment that scores a reply has failed. The message names it, the line, and what it was given."""


class ZeroAdvantageError(TrainingError):
    """Every advantage of a batch is zero: the step would train nothing."""


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


class CheckpointError(TinkerCookbookError, RuntimeError):
    """A checkpoint record or its files are missing or unusable."""
