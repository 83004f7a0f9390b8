"""JSON records of a run: what was sampled and what was trained on, down to token ids, logprobs and advantages."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

from tinker_cookbook.rl.data_processing import DatumMetadata
from tinker_cookbook.rl.types import TrajectoryGroup, Transition
from tinker_cookbook.utils.lazy import tinker


def group_records(
    groups: Sequence[TrajectoryGroup], step: int, model: str, config: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """File name (without .json) and content of each record of a batch, e.g. debate_000003_g002_01.

    `model` and `config` (sampling and training settings) go into every record, so that each stands on its own.
    """
    for group_idx, group in enumerate(groups):
        for i, record in enumerate(group.records):
            where = {"timestamp": time.time(), "model": model, "step": step, "group_id": group_idx, "tags": group.tags}
            content = where | record.content | {"config": {**config, **record.content.get("config", {})}}
            yield f"{record.kind}_{step:06d}_g{group_idx:03d}_{i:02d}", content


def transition_record(transition: Transition, text: str, **extra: Any) -> dict[str, Any]:
    """One turn: prompt and completion as ids, with the completion's logprobs."""
    return {
        **extra,
        "prompt_tokens": transition.ob.to_ints(),
        "completion_tokens": transition.ac.tokens,
        "completion_logprobs": transition.ac.logprobs,
        "prompt_token_count": transition.ob.length,
        "completion_token_count": len(transition.ac.tokens),
        "stop_reason": transition.ac.stop_reason,
        "raw_response": text,
    }


def training_step_record(
    step: int,
    data_D: Sequence[tinker.Datum],
    metadata_D: Sequence[DatumMetadata],
    groups: Sequence[TrajectoryGroup],
    metrics: Mapping[str, Any],
    learning_rate: float,
) -> dict[str, Any]:
    """What one update was made of, and what it gave."""
    tokens = sum(datum.model_input.length for datum in data_D)
    return {
        "step": step,
        "timestamp": time.time(),
        "num_datums": len(data_D),
        "datums": [_datum_record(datum, meta, groups) for datum, meta in zip(data_D, metadata_D, strict=True)],
        "results": {
            "loss": metrics.get("train/loss_sum"),
            "num_tokens": tokens,
            "num_trained_tokens": sum(int((_floats(datum, "advantages") != 0).sum()) for datum in data_D),
            "metrics": {"loss:sum": metrics.get("train/loss_sum")},
        },
        "learning_rate": learning_rate,
    }


def _datum_record(datum: tinker.Datum, meta: DatumMetadata, groups: Sequence[TrajectoryGroup]) -> dict[str, Any]:
    group = groups[meta["group_idx"]]
    trained = group.trained_rewards()
    mean = fmean(trained)
    reward = group.get_total_rewards()[meta["traj_idx"]]
    member_info = group.member_info_G[meta["traj_idx"]] if group.member_info_G else {}
    tokens = datum.model_input.to_ints()
    targets = datum.loss_fn_inputs["target_tokens"].tolist()
    logprobs, advantages = _floats(datum, "logprobs").tolist(), _floats(datum, "advantages").tolist()
    mask = _floats(datum, "mask").tolist()
    first = mask.index(1.0)  # position `first` predicts the first sampled token
    return {
        "input_tokens": tokens,
        "target_tokens": targets,
        "advantages": advantages,
        "sampling_logprobs": logprobs,
        "source": {
            **meta,
            "tags": group.tags,
            **member_info,
            "reward": reward,
            "centered_reward": reward - mean,
            "group_mean": mean,
            "group_std": pstdev(trained),
            "group_size": len(trained),
            "rounds_merged": len(group.trajectories_G[meta["traj_idx"]].transitions),
            "metrics": group.metrics_G[meta["traj_idx"]],
        },
        "prompt_tokens": tokens[: first + 1],
        "completion_tokens": targets[first:],
        "completion_logprobs": logprobs[first:],
        "completion_mask": mask[first:],
        "completion_advantages": advantages[first:],
    }


def _floats(datum: tinker.Datum, key: str) -> Any:
    return datum.loss_fn_inputs[key].to_numpy()
