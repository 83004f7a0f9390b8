"""What a logger of metrics is, and the form of what it is given."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.utils.files import to_jsonable
from tinker_cookbook.utils.run_store import RunStore
from tinker_cookbook.utils.secrets import redact

Metrics = Mapping[str, float | int | str]


class Logger(ABC):
    """Takes the metrics of each step and the config of the run."""

    @abstractmethod
    def log_metrics(self, metrics: Metrics, step: int | None = None) -> None:
        """Record the metrics of one step."""

    def enable_event_steps(self) -> None:  # noqa: B027
        """From now on rows come in any order, each with the step that it is of: for what is measured beside the training.

        Only W&B has to know, which otherwise refuses a step that is behind another.
        """

    def log_metrics_event(
        self, metrics: Metrics, step: int, step_metric: str, metric_axes: Mapping[str, str] | None = None
    ) -> None:
        """Record what was measured at a step that may be long past.

        Args:
            step_metric: the metric that says the step, and over which these are drawn.
            metric_axes: metrics that are drawn over others -> those.
        """
        self.log_metrics({**metrics, step_metric: step}, step)

    def log_hparams(self, config: Any) -> None:  # noqa: B027 - most loggers have nothing to do here
        """Record the config of the run."""

    def log_summary(self, metrics: Metrics) -> None:  # noqa: B027
        """Record numbers of the run as a whole, which belong to no step: in W&B's summary. Other loggers leave them out."""

    def log_long_text(self, key: str, text: str) -> None:  # noqa: B027
        """Show a text that is no metric: on the terminal, and in TensorBoard. Other loggers leave it out."""

    @property
    def takes_rollouts(self) -> bool:
        """Whether `log_rollouts` does anything, so that nobody decodes them for nothing."""
        return False

    def log_rollouts(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:  # noqa: B027
        """Show some rollouts of a step, a row each with the same columns."""

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


def metrics_row(metrics: Metrics, step: int | None) -> dict[str, Any]:
    """What a line of `metrics.jsonl` says. Raises DataValidationError: the metrics have a key "step" besides the step."""
    if step is not None and "step" in metrics:
        raise DataValidationError(f"metrics have a key 'step' ({metrics['step']!r}) besides step={step}; rename it")
    return {**({} if step is None else {"step": step}), **metrics}


def dump_config(config: Any) -> Any:
    """The config as plain JSON types, nested, each chz object with its class name under "class"."""
    return redact(to_jsonable(config))
