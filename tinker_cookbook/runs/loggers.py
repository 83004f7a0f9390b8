"""The interface of metric loggers."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from tinker_cookbook.stores.training_store import TrainingRunStore
from tinker_cookbook.utils.files import to_jsonable
from tinker_cookbook.utils.secrets import redact

Metrics = Mapping[str, float | int | str]


class Logger(ABC):
    """Receives the metrics of each step and the config of the run."""

    @abstractmethod
    def log_metrics(self, metrics: Metrics, step: int | None = None) -> None:
        """Record the metrics of one step."""

    def enable_event_steps(self) -> None:  # noqa: B027
        """From now on rows come in any order, each with its step: for measurements that run next to the training.

        Only W&B needs this; it otherwise rejects a step lower than the last.
        """

    def log_metrics_event(
        self, metrics: Metrics, step: int, step_metric: str, metric_axes: Mapping[str, str] | None = None
    ) -> None:
        """Record a measurement of a step that may be long past.

        Args:
            step_metric: the metric with the step, the x-axis of these metrics.
            metric_axes: metrics with another x-axis -> that metric.
        """
        self.log_metrics({**metrics, step_metric: step}, step)

    def log_hparams(self, config: Any) -> None:  # noqa: B027 - most loggers have nothing to do here
        """Record the config of the run."""

    def log_summary(self, metrics: Metrics) -> None:  # noqa: B027
        """Record numbers about the whole run, not about a step: in W&B's summary. Other loggers ignore them."""

    def log_long_text(self, key: str, text: str) -> None:  # noqa: B027
        """Show a text that is not a metric: on the terminal, and in TensorBoard. Other loggers ignore it."""

    @property
    def takes_rollouts(self) -> bool:
        """Whether `log_rollouts` does anything; otherwise callers need not decode rollouts."""
        return False

    def log_rollouts(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:  # noqa: B027
        """Show some rollouts of a step, one row each, all with the same columns."""

    def sync(self) -> None:  # noqa: B027 - whatever is logged here is written at once
        """Flush pending writes."""

    def get_logger_url(self) -> str | None:
        """The URL of the run in a browser; None if there is none."""
        return None

    @property
    def store(self) -> TrainingRunStore | None:
        """The store that receives the metrics; None: they go to a folder."""
        return None

    def close(self) -> None:  # noqa: B027
        """Flush pending writes and close files and connections."""


def dump_config(config: Any) -> Any:
    """The config as plain JSON types, nested, each chz object with its class name under "class"."""
    return redact(to_jsonable(config))
