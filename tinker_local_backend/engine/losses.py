"""The built-in losses as pure functions of per-position tensors. All are sums; nothing here averages.

With lp the model's logprob of the target, q the logprob when it was sampled, A the advantage and r = exp(lp - q):

- cross_entropy:        -sum(w * lp), any real w, targets (N,) or (N, K)
- importance_sampling:  -sum(r * A)
- ppo:                  -sum(min(r * A, clip(r, low, high) * A)), low and high absolute bounds on r
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Inputs = Mapping[str, torch.Tensor]
Config = Mapping[str, float]
Metrics = dict[str, float]


@dataclass(frozen=True)
class LossFn:
    """A loss: what it needs per datum, what may configure it (with defaults), and how it is computed.

    `compute(logprobs, inputs, config)` returns the elementwise loss, same shape as logprobs, and diagnostics named
    `name:reduction` as the SDK's fold over chunks expects.
    """

    inputs: tuple[str, ...]
    config: Config
    compute: Callable[[torch.Tensor, Inputs, Config], torch.Tensor]
    is_policy_loss: bool = False


def cross_entropy(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    return -inputs["weights"] * logprobs


def importance_sampling(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    return -probability_ratio(logprobs, inputs) * inputs["advantages"]


def ppo(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    advantages = inputs["advantages"]
    with torch.no_grad():
        ratio = probability_ratio(logprobs, inputs)
        clipped = ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
        is_clipped = clipped * advantages < ratio * advantages
    # Where the minimum is the clipped side the loss is constant. Its ratio must not enter the graph: it may have
    # overflowed, and the backward pass would multiply 0 by infinity.
    difference = torch.where((advantages != 0) & ~is_clipped, logprobs - inputs["logprobs"], 0.0)
    return -torch.where(is_clipped, clipped, difference.exp()) * advantages


def probability_ratio(logprobs: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """exp(lp - q) where the advantage is not zero, 1 elsewhere.

    Positions without advantage (prompts, injected text) carry q = 0 by convention; their ratio means nothing, and an
    overflow there would turn 0 * inf into NaN.
    """
    active = inputs["advantages"] != 0
    return torch.where(active, logprobs - inputs["logprobs"], 0.0).exp()


LOSSES: dict[str, LossFn] = {
    "cross_entropy": LossFn(("target_tokens", "weights"), {}, cross_entropy),
    "importance_sampling": LossFn(("target_tokens", "logprobs", "advantages"), {}, importance_sampling, True),
    "ppo": LossFn(
        ("target_tokens", "logprobs", "advantages"),
        {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
        ppo,
        True,
    ),
}


class RatioStats:
    """Diagnostics of a policy loss, gathered over micro-batches: ratios before any clipping, and how many were clipped."""

    def __init__(self) -> None:
        self._ratios: list[torch.Tensor] = []
        self._clipped = 0

    def add(self, logprobs: torch.Tensor, inputs: Inputs, config: Config) -> None:
        ratio = probability_ratio(logprobs, inputs)[inputs["advantages"] != 0]
        self._ratios.append(ratio)
        if "clip_low_threshold" in config:
            outside = (ratio < config["clip_low_threshold"]) | (ratio > config["clip_high_threshold"])
            self._clipped += int(outside.sum())

    def metrics(self, config: Config) -> Metrics:
        ratios = torch.cat(self._ratios) if self._ratios else torch.zeros(0)
        if ratios.numel() == 0:
            return {}
        metrics = {
            "ratio:mean": float(ratios.mean()),
            "ratio:min": float(ratios.min()),
            "ratio:max": float(ratios.max()),
        }
        if "clip_low_threshold" in config:
            metrics["clipped_fraction:mean"] = self._clipped / ratios.numel()
        return metrics
