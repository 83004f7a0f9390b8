"""Advantages that change once the trainer has scored a batch."""

from __future__ import annotations

from collections.abc import Sequence

from tinker_cookbook.rl.config import Config
from tinker_cookbook.rl.data_processing import replace_inputs
from tinker_cookbook.rl.metrics import compute_advantage_metrics
from tinker_cookbook.rl.minibatch import LoopMetrics, Update
from tinker_cookbook.rl.off_policy import correct_off_policy
from tinker_cookbook.rl.top_entropy import keep_top_entropy
from tinker_cookbook.utils.lazy import tinker
from tinker_cookbook.utils.misc_utils import timed


async def corrected(
    config: Config, update: Update, data_D: Sequence[tinker.Datum]
) -> tuple[list[tinker.Datum], list[tinker.Datum], LoopMetrics]:
    """The datums of an update with `top_entropy_share` and `off_policy_correction`, a forward pass each.

    Returns:
        The datums to train on; the same for records and metrics, with the logprobs from sampling; and metrics.
    """
    trained, metrics = list(data_D), LoopMetrics()
    if config.top_entropy_share < 1:
        with timed("top_entropy", metrics):
            trained, of_entropy = keep_top_entropy(trained, await update.entropies(trained), config.top_entropy_share)
        metrics |= of_entropy
    recorded = trained
    if config.off_policy_correction is not None:
        with timed("off_policy_correction", metrics):
            trained, ratios = correct_off_policy(trained, await update.score(trained), config.off_policy_correction)
        metrics |= ratios
        recorded = [
            replace_inputs(one, logprobs=datum.loss_fn_inputs["logprobs"].to_numpy())
            for one, datum in zip(trained, data_D, strict=True)
        ]
    if recorded and metrics:
        metrics |= compute_advantage_metrics(recorded)  # fewer tokens may have one now
    return trained, recorded, metrics
