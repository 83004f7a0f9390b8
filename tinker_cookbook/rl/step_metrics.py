"""What became of the groups of a step, in numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tinker_cookbook.rl.metric_util import compute_trajectory_metrics
from tinker_cookbook.rl.metrics import compute_advantage_metrics, compute_sampling_client_metrics
from tinker_cookbook.rl.minibatch import Minibatch


def account_for_groups(
    batch: Minibatch,
    steps_P: Sequence[int],
    seconds_P: Sequence[float],
    stale: int,
    errors: Mapping[str, float],
    step: int,
) -> dict[str, float | int | str]:
    """Each group that was sampled is trained, filtered, stale or failed.

    Args:
        batch: of the groups that came through.
        steps_P: of each group that was sampled but the stale ones, updates that its weights had seen.
        seconds_P: how long each took.
        stale: groups that were dropped for their age.
        errors: metrics of the failures since the run's start.
        step: updates that the weights have seen which are trained: `async/staleness_*` are how many more than those that sampled.
    """
    trained = batch.num_trained_groups
    metrics: dict[str, float | int | str] = {
        **compute_trajectory_metrics(batch.groups),
        **errors,
        **compute_sampling_client_metrics(steps_P, seconds_P),
        "async/staleness_max": step - min(steps_P),
        "async/staleness_min": step - max(steps_P),
        "async/staleness_mean": step - sum(steps_P) / len(steps_P),
        **batch.metrics,
        "groups/sampled": len(steps_P) + stale,
        "groups/trained": trained,
        "groups/filtered": len(batch.groups) - trained,
        "groups/stale": stale,
        "groups/failed": len(steps_P) - len(batch.groups),
        "train/num_datums": len(batch.data_D),
        "train/skipped_steps": int(not batch.data_D),
        "advantages/nonzero_count": 0,
    }
    if batch.data_D:
        metrics |= compute_advantage_metrics(batch.data_D)
        members = {(meta["group_idx"], meta["traj_idx"]) for meta in batch.metadata_D}
        metrics["train/branches_per_rollout"] = len(batch.data_D) / len(members)
    return metrics


def training_data_line(metrics: Mapping[str, float | int | str]) -> str:
    """What a step trains on, of its `account_for_groups`, for the terminal."""
    names = ("count", "min", "max", "mean")
    stats = {name: metrics[key] for name in names if (key := f"advantages/nonzero_{name}") in metrics}
    told = ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in stats.items()
    )
    return f"Training data: {metrics['train/num_datums']} datums. Advantage stats (nonzero): {told}"
