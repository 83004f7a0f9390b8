"""Diagnostics of a policy update: how far the sampler's and the trainer's logprobs are apart, and the policy's entropy."""

from __future__ import annotations

from collections.abc import Sequence

import tinker
import torch

from tinker_cookbook.exceptions import DataValidationError


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
