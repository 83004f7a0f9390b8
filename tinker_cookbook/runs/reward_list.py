"""`metrics.json`: the steps of a run as one JSON list, for programs that read one value. metrics.jsonl has everything.

An entry has `step`, `stage` (train, or final for the evaluation at the end), the measured values of REWARD_LIST, and
in a mixture `reward/<environment>`.
"""

import json
import re
from pathlib import Path
from typing import Any

from tinker_cookbook.runs.loggers import Logger, Metrics
from tinker_cookbook.utils.files import write_text
from tinker_cookbook.utils.metric_names import FINAL_KEY, carried

METRICS_JSON_BASE_NAME = "metrics.json"
REWARD_LIST = {
    "env/all/reward/total": "reward",
    "test/env/all/reward/total": "test_reward",
    "train/loss_sum": "loss",
    "sampling_client/step_max": "sampler_step",
    "optim/kl_sample_train_v2": "kl",
    "time/total": "seconds",
}
"""Metric -> its key in an entry."""


class RewardListLogger(Logger):
    """The file is complete at all times. The first added step replaces an earlier start's entries from there on."""

    def __init__(self, log_dir: str | Path) -> None:
        self._path = Path(log_dir) / METRICS_JSON_BASE_NAME
        self._rows: list[dict[str, Any]] | None = None

    def log_metrics(self, metrics: Metrics, step: int | None = None) -> None:
        """Add one step and write the list; does nothing without a step."""
        if step is None:
            return
        if self._rows is None:
            earlier: list[dict[str, Any]] = json.loads(self._path.read_text()) if self._path.exists() else []
            self._rows = [row for row in earlier if row["step"] < step]
        stage = "train"
        if FINAL_KEY in metrics:
            stage, repeated = "final", carried(metrics)  # of the last step, which has its own entry
            metrics = {key: value for key, value in metrics.items() if key not in repeated}
        short = {label: metrics[key] for key, label in REWARD_LIST.items() if key in metrics}
        tags = {f"reward/{tag}": value for key, value in metrics.items() if (tag := _tag_of_reward(key)) is not None}
        self._rows.append({"step": step, "stage": stage, **short, **tags})
        write_text(self._path, json.dumps(self._rows, indent=0) + "\n")


def _tag_of_reward(key: str) -> str | None:
    match = re.fullmatch(r"env/(.+)/reward/total", key)
    return match[1] if match is not None and match[1] != "all" else None
