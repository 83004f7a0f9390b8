"""tinker-cookbook's names for our metrics, and the metrics that a run's last row repeats.

A loop names a metric once. When its row is logged, the other name is added (`with_aliases`), so that scripts can read
either name. Our own readers drop the aliases (`without_aliases`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

ALIASES: Mapping[str, str] = {
    "optim/lr": "learning_rate",
    "optim/grad_norm": "grad_norm",
    "optim/kl_policy_base": "kl_policy_base",
    "optim/kl_pre_post_v1": "kl_pre_post_v1",
    "optim/kl_pre_post_v2": "kl_pre_post_v2",
    "progress/batch": "training_client/step",
    "progress/done_frac": "progress",
}
"""Our name -> tinker-cookbook's."""

SPAN_ALIASES: Mapping[str, tuple[str, ...]] = {
    "time/eval": ("time/run_evals", "time/run_evaluations_parallel"),
    "time/run_evaluator": ("time/run_single_evaluation",),
    "time/do_group_rollout": (
        "time/do_group_rollout_and_filter_constant_reward",
        "time/trajectory_group_worker",
    ),
    "time/kl_penalty": ("time/kl_vs_base", "time/incorporate_kl_penalty"),
    "time/teacher_kl": ("time/compute_kl_penalty", "time/incorporate_kl_penalty"),
    "time/sampling": ("time/sample",),
    "time/train": ("time/train_step",),
    "time/update": ("time/do_train_step_and_get_sampling_client",),
    "time/after_update": ("time/compute_full_batch_metrics_and_get_sampling_client",),
    "time/snapshot": ("time/save_checkpoint", "time/save_checkpoint_and_get_sampling_client"),
    "time/post_kl": ("time/compute_post_kl",),
    "time/save_checkpoint": ("time/save_checkpoint_async",),
}
"""Our span -> tinker-cookbook's; span metrics may end in :total, :count, :mean or :max."""

ALL_ENVIRONMENTS = "env/all/"
"""Prefix of the means over all environments of a step."""

FINAL_KEY = "progress/final"
"""1 in the row of the final evaluation, and in no other."""

_CARRIED = ("env/", "advantages/", "optim/", "train_mean_", "dpo_", "teacher_kl")
_COUNTS = ("total_episodes", "total_turns", "total_ac_tokens", "total_ob_tokens", "total_cached_ob_tokens", "_count")
_ALONE = frozenset({"accuracy", "margin", "chosen_reward", "rejected_reward"})


def aliases_of(key: str) -> tuple[str, ...]:
    """The other names of a metric; usually none."""
    if key in ALIASES:
        return (ALIASES[key],)
    name, _, statistic = key.partition(":")
    ending = f":{statistic}" if statistic else ""
    return tuple(f"{other}{ending}" for other in SPAN_ALIASES.get(name, ()))


def with_aliases(row: Mapping[str, float | int | str]) -> dict[str, float | int | str]:
    """A row with the aliases of its metrics added. A metric that already has an alias's name is kept."""
    others = {other: value for key, value in row.items() for other in aliases_of(key)}
    return {**others, **row} if others else dict(row)


def without_aliases(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of metrics.jsonl without aliases. Rows of other libraries are unchanged."""
    others = {other for key in row for other in aliases_of(key)}
    return {key: value for key, value in row.items() if key not in others}


def carried(row: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics that the row of the final evaluation repeats from the last step: means over its data, but no counts, which add
    up.
    """
    return {
        key: value
        for key, value in without_aliases(row).items()
        if (key.startswith(_CARRIED) or key in _ALONE) and not key.endswith(_COUNTS)
    }


def each_once(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a run without aliases, and without the metrics that the last row repeats from the one
    before.
    """
    shown = [without_aliases(row) for row in rows]
    for before, row in pairwise(shown):
        if FINAL_KEY in row:
            for key, value in carried(before).items():
                if row.get(key) == value:
                    del row[key]
    return shown
