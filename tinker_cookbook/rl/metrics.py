"""Diagnostics of a policy update: how far the sampler's and the trainer's logprobs are apart, and the policy's entropy.

The KL penalty is in `kl`, whose names can be imported from here too.
"""

from __future__ import annotations

from collections.abc import Sequence

from tinker_cookbook.clients import SamplingClient
from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.rl.kl import compute_target_logprobs, discounted_future_sum_vectorized, incorporate_kl_penalty
from tinker_cookbook.utils.lazy import np, tinker, torch

__all__ = [
    "compute_kl_sample_train",
    "compute_post_kl",
    "compute_sampling_client_metrics",
    "discounted_future_sum_vectorized",
    "incorporate_kl_penalty",
]


def compute_kl_sample_train(
    data_D: Sequence[tinker.Datum], training_logprobs_D: Sequence[torch.Tensor]
) -> dict[str, float]:
    """KL between sampler and trainer over action tokens (mask > 0): v1 = mean(q - p), v2 = mean((q - p)^2) / 2.

    q is the logprob when sampled, p the trainer's before the update; on-policy both are about 0 (v1 below 1e-3 in bf16).
    Entropy is -mean(q), in nats per token. See Schulman 2020, "Approximating KL divergence".
    """
    differences: list[torch.Tensor] = []
    sampled: list[torch.Tensor] = []
    for i, (datum, training) in enumerate(zip(data_D, training_logprobs_D, strict=True)):
        inputs = datum.loss_fn_inputs
        sampling = inputs["logprobs"].to_torch()
        if sampling.shape != training.shape:
            raise DataValidationError(
                f"datum {i}: {tuple(sampling.shape)} sampled logprobs, the trainer returned {tuple(training.shape)}"
            )
        action = inputs["mask"].to_torch() > 0
        differences.append((sampling - training)[action])
        sampled.append(sampling[action])
    if not any(len(difference) for difference in differences):
        return {}
    diff, logprobs = torch.cat(differences), torch.cat(sampled)
    return {
        "optim/kl_sample_train_v1": float(diff.mean()),
        "optim/kl_sample_train_v2": float(0.5 * (diff**2).mean()),
        "optim/entropy": float(-logprobs.mean()),
    }


async def compute_post_kl(data_D: Sequence[tinker.Datum], sampling_client: SamplingClient) -> dict[str, float]:
    """How far an update moved the policy on its own data: KL(before || after) on action tokens, by the v1 and v2 estimators.

    Before is the logprob when sampled, after that of a snapshot taken since.
    """
    after_D = await compute_target_logprobs(data_D, sampling_client)
    differences = [
        (datum.loss_fn_inputs["logprobs"].to_numpy() - after)[datum.loss_fn_inputs["mask"].to_numpy() > 0]
        for datum, after in zip(data_D, after_D, strict=True)
    ]
    difference = np.concatenate(differences).astype(np.float64)
    return {
        "optim/kl_pre_post_v1": float(difference.mean()),
        "optim/kl_pre_post_v2": float(0.5 * (difference**2).mean()),
    }


def compute_sampling_client_metrics(steps_P: Sequence[int], seconds_P: Sequence[float]) -> dict[str, float]:
    """Which snapshots a batch was sampled from (their training steps), and how long its groups took in seconds."""
    return {
        "sampling_client/step_max": max(steps_P),
        "sampling_client/step_min": min(steps_P),
        "sampling_client/step_mean": sum(steps_P) / len(steps_P),
        "time/sampling_time_max": max(seconds_P),
        "time/sampling_time_min": min(seconds_P),
        "time/sampling_time_mean": sum(seconds_P) / len(seconds_P),
    }
