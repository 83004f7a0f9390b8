"""Steps that train nothing: why, how often in a row, and when they end the run (`on_zero_advantages`)."""

from __future__ import annotations

import logging

from tinker_cookbook.exceptions import TrainingError, UntrainedRunError, ZeroAdvantageError
from tinker_cookbook.rl.advantages import check_advantages
from tinker_cookbook.rl.config import Config
from tinker_cookbook.rl.minibatch import Minibatch
from tinker_cookbook.rl.trajectory_text import one_example
from tinker_cookbook.runs.session import Session

logger = logging.getLogger(__name__)


class UntrainedSteps:
    """Counts consecutive steps that trained nothing.

    Attributes:
        in_a_row: part of the run's state.
    """

    def __init__(self, config: Config, session: Session):
        self._config, self._session = config, session
        self.in_a_row = 0
        self._has_warned = False
        self._example: str | None = None
        """its first step that trained nothing"""

    def count(self, step: int, batch: Minibatch) -> TrainingError | None:
        """Count a step, and warn if it trained nothing. Returns the error that has to end the run, if any."""
        if batch.data_D:
            self.in_a_row = 0
            return None
        self.in_a_row += 1
        error = why_untrained(step, batch)
        if self._example is None:
            self._example = one_example(batch.groups, self._session.training_client.get_tokenizer())
        config = self._config
        most = {"skip": None, "raise": 1, "stop": config.max_zero_advantage_steps}[config.on_zero_advantages]
        if most is not None and self.in_a_row >= most:
            self.in_a_row = 0  # the resumed run gets the same number of tries
            error.add_note(
                f"The last {'step' if config.on_zero_advantages == 'raise' else f'{most} steps'} trained nothing, so the run "
                f"ends after step {step} (on_zero_advantages={config.on_zero_advantages}; with skip the run continues). "
                f"{self._session.run.log_path} keeps the finished steps, and behavior_if_log_dir_exists=resume continues with "
                "the next batch."
            )
            return self._with_example(error)
        if self._has_warned:
            logger.warning("step %d: nothing to train on; skipped.", step)
        else:
            logger.warning("step %d: nothing to train on; skipped. %s\n%s", step, error, self._example or "")
        self._has_warned = True
        return None

    def check_run(self, num_steps: int) -> None:
        """Raise UntrainedRunError, or warn, if the run has trained nothing at all."""
        if self._session.progress.trained_tokens > 0:
            return
        problem = (
            f"the run is over and trained nothing: none of its {num_steps} batches had a token with an "
            f"advantage; logs.log in {self._session.run.log_path} has the rewards of the first"
        )
        if self._config.on_zero_advantages != "skip":
            raise self._with_example(UntrainedRunError(problem))
        logger.warning("%s", problem)

    def _with_example(self, error: TrainingError) -> TrainingError:
        if self._example is not None:
            error.add_note(self._example)
        return error


def why_untrained(step: int, batch: Minibatch) -> TrainingError:
    """Why a step's batch has no datum, as the error that may end the run."""
    if not batch.groups:
        return TrainingError(
            f"step {step}: every group failed, so there is nothing to train on; the log has each group's error"
        )
    try:
        check_advantages(batch.groups, batch.advantages_P)
    except ZeroAdvantageError as error:
        return error
    return TrainingError(
        f"step {step}: rewards differ, but no member with an advantage has a sampled token: every prompt of this "
        "batch was too long; shorten the prompts"
    )
