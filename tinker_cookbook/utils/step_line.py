"""The terminal line of a step."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tinker_cookbook.utils.metric_names import ALL_ENVIRONMENTS, FINAL_KEY, carried, without_aliases

KEY_METRICS = {
    "progress/done_frac": "done",
    "env/all/reward/total": "reward",
    "env/all/correct": "correct",
    "env/all/debate/judge_accuracy": "judge",
    "env/all/debate/survivors": "survivors",
    "env/all/debate/survivor_variance": "variance",
    "train_mean_nll": "nll",
    "dpo_loss": "dpo_loss",
    "accuracy": "accuracy",
    "teacher_kl": "teacher_kl",
    "train_questions/env/all/correct": "train_questions/correct",
    "test/env/all/correct": "test/correct",
    "test/env/all/task_reward": "test/task_reward",
    "test/nll": "test/nll",
    "train/loss_sum": "loss",
    "train/trained_tokens_sum": "tokens",
    "optim/kl_sample_train_v1": "kl",
    "optim/entropy": "entropy",
    "optim/lr": "lr",
    "time/total": "seconds",
}
"""Metric -> its label in the terminal line of a step; everything else is in metrics.jsonl."""


_OF_EVERY_ENVIRONMENT = re.compile(
    r"(ac|ob)_tokens_per_turn|turns_per_episode|total_.*|reward/.*|by_group/.*|stop/.*|trained_fraction|num_truncations.*|"
    r"debate/.*|correct|parsed|format|task_reward|context_overflow|.*_len"
)

FALLBACK_COUNT = 6
"""Number of metrics shown for a step without any of KEY_METRICS."""

MAX_CUSTOM = 4
"""Number of metrics shown of a custom environment."""


SHOWN_ELSEWHERE = ("done", "loss", "tokens", "lr", "filtered")
"""Labels omitted on a terminal: its live line shows them, they follow from the rest, or metrics.jsonl is enough."""


def step_line(
    metrics: Mapping[str, float | int | str],
    step: int | None,
    key_metrics: Mapping[str, str],
    width: int | None = None,
    prefix: str = "",
) -> str:
    """The key metrics of a step with short names, other metrics of the environment, and group counts if some were not
    trained on. The last row shows the final evaluation, without training metrics.

    Args:
        width: columns of the terminal: lines are wrapped, and SHOWN_ELSEWHERE omitted; None: everything on one line.
    """
    final = FINAL_KEY in metrics
    metrics = _evaluated(metrics) if final else metrics
    shown: dict[str, Any] = {label: metrics[key] for key, label in key_metrics.items() if key in metrics}
    parts = [
        key
        for key in metrics
        if key.startswith(ALL_ENVIRONMENTS) and not _OF_EVERY_ENVIRONMENT.fullmatch(key[len(ALL_ENVIRONMENTS) :])
    ]
    shown |= {key[len(ALL_ENVIRONMENTS) :]: metrics[key] for key in parts[:MAX_CUSTOM] if key not in key_metrics}
    if not shown:
        shown = dict(list(metrics.items())[:FALLBACK_COUNT])
    shown |= _groups(metrics)
    if width is not None and len(shown) > len(SHOWN_ELSEWHERE):
        shown = {label: value for label, value in shown.items() if label not in SHOWN_ELSEWHERE}
        if _show(shown.get("correct")) == _show(shown.get("reward")):
            shown.pop("correct", None)
    first = prefix + ("final evaluation" if final else "metrics" if step is None else f"step {step:4d}")
    digits = 4 if width is None else 3
    items = [first, *(f"{label}={_show(value, digits)}" for label, value in shown.items())]
    return "  ".join(items) if width is None else wrapped(items, width, " " * (len(first) + 2))


def _evaluated(row: Mapping[str, float | int | str]) -> dict[str, float | int | str]:
    """The final evaluation in the last row, rewards first: without what it repeats from the last step, and without
    progress.
    """
    shown, repeated = without_aliases(row), carried(row)
    keys = [key for key in shown if key not in repeated and not key.startswith(("progress/", "tokens/", "time/"))]
    return {key: shown[key] for key in sorted(keys, key=lambda key: not key.endswith("reward/total"))}


def wrapped(items: Sequence[str], width: int, indent: str) -> str:
    """Items two spaces apart, wrapped between items; items are never split, and continuation lines are indented."""
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + 2 + len(item) <= width:
            lines[-1] += "  " + item
        else:
            lines.append(item if not lines else indent + item)
    return "\n".join(lines)


def _groups(metrics: Mapping[str, float | int | str]) -> dict[str, str]:
    """The number of groups trained on, if not all; and what happened to the others."""
    sampled, trained = metrics.get("groups/sampled"), metrics.get("groups/trained")
    if not isinstance(sampled, int) or not isinstance(trained, int) or trained == sampled:
        return {}
    others = {name: metrics.get(f"groups/{name}") for name in ("filtered", "failed", "stale")}
    return {"groups": f"{trained}/{sampled}"} | {name: str(count) for name, count in others.items() if count}


def _show(value: Any, digits: int = 4) -> str:
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)
