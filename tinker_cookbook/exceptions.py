"""Errors that the library raises on purpose. Each also inherits the standard type that it refines (ValueError, RuntimeError)."""


class TinkerCookbookError(Exception):
    """Root of all errors of this library."""


class ConfigurationError(TinkerCookbookError, ValueError):
    """A configuration value is wrong. The message names the field, the value and the mend."""


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


class ZeroAdvantageError(TrainingError):
    """Every advantage of a batch is zero: the step would train nothing."""


class CheckpointError(TinkerCookbookError, RuntimeError):
    """A checkpoint record or its files are missing or unusable."""
