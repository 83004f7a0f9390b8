"""The built-in losses as pure functions of per-position tensors. All are sums, never averages.

lp is the model's logprob of the target, q its logprob at sampling time, A the advantage, r = exp(lp - q), and sg stops the
gradient:

- cross_entropy:        -sum(w * lp), any real w, targets (N,) or (N, K)
- importance_sampling:  -sum(r * A)
- ppo:                  -sum(min(r * A, clip(r, low, high) * A))
- cispo:                -sum(sg(clip(r, low, high)) * lp * A)
- dro:                  -sum(lp * A - beta / 2 * (lp - q)^2)
- gspo:                 -sum(min(s * A, clip(s, low, high) * A)), s one ratio per sequence
- sapo:                 -sum(4 / t * sigmoid(t * (r - 1)) * A), t = t+ for A > 0, else t-
- stable_reinforce:     -sum(sg(m * min(r, cap)) * exp(lp - sg(lp)) * A), m = 0 for tokens and sequences out of bounds

low and high are bounds on the ratio itself, not distances from 1. Tokens that were not sampled (prompts, injected text) have
A = 0 and q = 0 by convention, and their ratio is meaningless: every policy loss and its diagnostics exclude them. A sampled
token with A = 0 counts: dro pulls it towards the sampler; in the other losses its term is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Inputs = Mapping[str, torch.Tensor]
Config = Mapping[str, float]
Metrics = dict[str, float]


def cross_entropy(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    return -inputs["weights"] * logprobs


def importance_sampling(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    return -torch.where(_active(inputs), logprobs - inputs["logprobs"], 0.0).exp() * inputs["advantages"]


def ppo(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """Schulman et al. 2017, "Proximal Policy Optimization Algorithms", equation 7, summed."""
    with torch.no_grad():
        ratio = probability_ratio(logprobs, inputs)
    # Where the clipped side is the minimum, the loss is constant. The ratio must stay out of the graph there: it may have
    # overflowed, and the backward pass would multiply 0 by infinity.
    is_clipped = minimum_is_clipped(ratio, inputs, config)
    difference = torch.where(_active(inputs) & ~is_clipped, logprobs - inputs["logprobs"], 0.0)
    return -torch.where(is_clipped, _clip(ratio, config), difference.exp()) * inputs["advantages"]


def cispo(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """CISPO (MiniMax 2025, "MiniMax-M1", section 3.1), summed: the capped ratio is a weight without a gradient.

    Unlike in ppo, a token whose ratio is out of bounds still has a gradient, with the bound as its weight.
    """
    with torch.no_grad():
        weight = _clip(probability_ratio(logprobs, inputs), config)
    return -weight * torch.where(_active(inputs), logprobs, 0.0) * inputs["advantages"]


def dro(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """Direct reward optimisation (Richemond et al. 2024, "Offline Regularised Reinforcement Learning for Large Language
    Models Alignment"): no ratio and no clip, but a quadratic pull towards the policy that sampled.

    It is (A - beta * log r)^2 / (2 * beta) up to a constant in the policy.
    """
    sampled = was_sampled(inputs)
    difference = torch.where(sampled, logprobs - inputs["logprobs"], 0.0)
    objective = torch.where(sampled, logprobs, 0.0) * inputs["advantages"]
    return 0.5 * config["beta"] * difference.square() - objective


def gspo(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """GSPO-token (Zheng et al. 2025, "Group Sequence Policy Optimization", section 4.3), summed over tokens.

    Every token of a sequence has the value s and the gradient s * d lp of its own token; min and clip are ppo's.
    """
    ratio = sequence_ratio(logprobs, inputs)
    is_clipped = minimum_is_clipped(ratio, inputs, config)
    # exp(lp - sg(lp)) is 1 and has the gradient of lp; as in ppo, a clipped side stays out of the graph.
    carrier = torch.where(_active(inputs) & ~is_clipped, logprobs - logprobs.detach(), 0.0).exp()
    value = torch.where(is_clipped, _clip(ratio, config), torch.where(_active(inputs), ratio, 1.0))
    return -value * carrier * inputs["advantages"]


def sapo(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """SAPO ("Soft Adaptive Policy Optimization", arXiv 2511.20347), summed.

    A gate instead of a clip: the gradient for a token's logprob is 4 g (1 - g) r A, g = sigmoid(t (r - 1)). It is A at r = 1 and
    decays as r moves away on either side; faster for A < 0, whose temperature t is larger.
    """
    with torch.no_grad():
        ratio = probability_ratio(logprobs, inputs)
        is_flat = ~torch.isfinite(ratio)  # the gate is 1 there, and its gradient 0
    temperature = _sapo_temperature(inputs, config)
    difference = torch.where(_active(inputs) & ~is_flat, logprobs - inputs["logprobs"], 0.0)
    gate = torch.where(is_flat, 1.0, torch.sigmoid(temperature * (difference.exp() - 1)))
    return -4 / temperature * gate * inputs["advantages"]


def sapo_is_faded(ratio: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """Where the gate reduces the gradient to less than half of importance_sampling's: 4 g (1 - g) < 1 / 2."""
    gate = torch.sigmoid(_sapo_temperature(inputs, config) * (ratio - 1))
    return 4 * gate * (1 - gate) < 0.5


def _sapo_temperature(inputs: Inputs, config: Config) -> torch.Tensor:
    advantages = inputs["advantages"]
    positive = torch.full_like(advantages, config["temperature_positive"])
    return torch.where(advantages > 0, positive, config["temperature_negative"])


def stable_reinforce(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """REINFORCE on data of an older policy, with truncated importance weights and masked outliers, summed.

    The hosted service's formula for this loss is not published. This one combines three published rules:

    - the weight min(r, weight_cap) (truncated importance sampling: Ionides 2008; Yao et al. 2025)
    - weight 0 where r is outside [token_ratio_low, token_ratio_high] (IcePop, Ant 2025)
    - weight 0 in sequences whose mean log r over the sampled tokens is outside +-sequence_log_ratio_bound (masked importance
      sampling; the mean includes tokens that the second rule masks)

    The weight has no gradient, so every unmasked token has the gradient weight * A for its logprob: equal to
    importance_sampling's below the cap, bounded above it. The surrogate min(r, cap) * A would have none above the cap: a token
    more than cap times as likely would be neither reinforced nor, with A < 0, reduced. The value is that of importance_sampling
    with the weight instead of the ratio.
    """
    with torch.no_grad():
        weight = stable_weight(logprobs, inputs, config)
    # exp(lp - sg(lp)) is 1 and has the gradient of lp; masked tokens, whose lp may be infinite, stay out of the graph.
    carrier = torch.where(_active(inputs) & (weight > 0), logprobs - logprobs.detach(), 0.0).exp()
    return -weight * carrier * inputs["advantages"]


def stable_weight(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """min(r, weight_cap) at the sampled tokens that stable_reinforce does not mask, 0 elsewhere."""
    token, sequence = stable_masks(logprobs, inputs, config)
    weight = probability_ratio(logprobs, inputs).clamp(max=config["weight_cap"])
    return torch.where(was_sampled(inputs) & ~token & ~sequence, weight, 0.0)


def stable_masks(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions that stable_reinforce masks because of their token's ratio, and because of their sequence's: bool."""
    ratio, sampled = probability_ratio(logprobs, inputs), was_sampled(inputs)
    token = (ratio < config["token_ratio_low"]) | (ratio > config["token_ratio_high"])
    mean = _sequence_mean(logprobs.detach().double() - inputs["logprobs"], sampled, inputs)
    return token & sampled, ~(mean.abs() <= config["sequence_log_ratio_bound"]) & sampled


def weight_is_truncated(ratio: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """Where min(r, weight_cap) is weight_cap."""
    return ratio > config["weight_cap"]


def probability_ratio(logprobs: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """exp(lp - q) of sampled tokens, 1 elsewhere."""
    return torch.where(was_sampled(inputs), logprobs - inputs["logprobs"], 0.0).exp()


def sequence_ratio(logprobs: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """exp(mean of lp - q over the sequence's mask) at every sampled position, 1 elsewhere; without gradient.

    Args:
        inputs: the loss's inputs, and sequence_index: int64 of logprobs' shape, the datum of each row.
    """
    # Double precision: the clip range is only a few parts in ten thousand wide.
    log_ratio = logprobs.detach().double() - inputs["logprobs"]
    mean = _sequence_mean(log_ratio, inputs["sequence_ratio_mask"] != 0, inputs)
    return torch.where(was_sampled(inputs), mean, 0.0).exp().to(logprobs.dtype)


def _sequence_mean(values: torch.Tensor, chosen: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """At every position, the mean of the chosen values of its sequence (0 without any), float64."""
    total = _sequence_sum(torch.where(chosen, values, 0.0), inputs)
    return total / _sequence_sum(chosen, inputs).clamp(min=1)


def _sequence_sum(values: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """At every position, the sum over its sequence, float64."""
    index = inputs["sequence_index"].reshape(-1)
    zeros = torch.zeros(index.numel(), dtype=torch.float64, device=values.device)  # sequences never outnumber rows
    return zeros.index_add(0, index, values.double().reshape(-1))[index].reshape(values.shape)


def minimum_is_clipped(ratio: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """Where clip(r) * A < r * A: the ratio has already moved far enough in the direction of the advantage."""
    return _clip(ratio, config) * inputs["advantages"] < ratio * inputs["advantages"]


def ratio_is_clipped(ratio: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """Where clip(r) differs from r."""
    return (ratio < config["clip_low_threshold"]) | (ratio > config["clip_high_threshold"])


def _clip(ratio: torch.Tensor, config: Config) -> torch.Tensor:
    return ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])


def was_sampled(inputs: Mapping[str, Any]) -> Any:
    """Positions where a policy loss has a term: those with an advantage or a sampled logprob."""
    return _active(inputs) | (inputs["logprobs"] != 0)


def _active(inputs: Mapping[str, Any]) -> Any:
    """Where the advantage is not 0. Elsewhere a ratio, which may overflow, would be multiplied by 0."""
    return inputs["advantages"] != 0


@dataclass(frozen=True)
class LossFn:
    """A loss: its inputs per datum, its config with defaults, and its computation.

    `compute(logprobs, inputs, config)` returns the elementwise loss, same shape as logprobs. For the diagnostics of a
    policy loss, `ratio` is the ratio that it clips, `clip_binds` where the clip changes the objective (None: no clip), and
    `masks` the positions masked because of their token's ratio, and because of their sequence's (None: no masks).
    """

    inputs: tuple[str, ...]
    config: Config
    compute: Callable[[torch.Tensor, Inputs, Config], torch.Tensor]
    is_policy_loss: bool = True
    trains_without_advantage: bool = False
    """whether a sampled token with advantage 0 has a gradient"""
    is_elementwise: bool = True
    """whether a position's loss depends on that position alone"""
    is_linear: bool = False
    """whether a position's loss is a multiple of its logprob; its slope is then the loss at 1"""
    ratio: Callable[[torch.Tensor, Inputs], torch.Tensor] = probability_ratio
    clip_binds: Callable[[torch.Tensor, Inputs, Config], torch.Tensor] | None = None
    masks: Callable[[torch.Tensor, Inputs, Config], tuple[torch.Tensor, torch.Tensor]] | None = None
    needs_provenance: bool = False
    """whether each datum must have the provenance of its tokens (provenance.py)"""

    def trained(self, inputs: Mapping[str, Any]) -> Any:
        """Positions that can have a gradient: bool, array or tensor like the inputs."""
        if self.trains_without_advantage:
            return was_sampled(inputs)
        return inputs["advantages" if self.is_policy_loss else "weights"] != 0


_POLICY_INPUTS = ("target_tokens", "logprobs", "advantages")

LOSSES: dict[str, LossFn] = {
    "cross_entropy": LossFn(("target_tokens", "weights"), {}, cross_entropy, is_policy_loss=False, is_linear=True),
    "importance_sampling": LossFn(_POLICY_INPUTS, {}, importance_sampling),
    "ppo": LossFn(
        _POLICY_INPUTS, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}, ppo, clip_binds=minimum_is_clipped
    ),
    # No lower bound, as in the paper; the upper bound is the hosted service's.
    "cispo": LossFn(
        _POLICY_INPUTS, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}, cispo, clip_binds=ratio_is_clipped
    ),
    # The hosted service documents no default; 0.05 is the value of its example.
    "dro": LossFn(_POLICY_INPUTS, {"beta": 0.05}, dro, trains_without_advantage=True),
    # 1 - 3e-4 and 1 + 4e-4, the clip ranges of the paper's section 5.1: a mean over a sequence stays close to 1.
    "gspo": LossFn(
        (*_POLICY_INPUTS, "sequence_ratio_mask"),
        {"clip_low_threshold": 0.9997, "clip_high_threshold": 1.0004},
        gspo,
        is_elementwise=False,
        ratio=sequence_ratio,
        clip_binds=minimum_is_clipped,
    ),
    # The cap of Yao et al. and the bounds of IcePop.
    "stable_reinforce": LossFn(
        _POLICY_INPUTS,
        {
            "weight_cap": 2.0,
            "token_ratio_low": 0.5,
            "token_ratio_high": 5.0,
            "sequence_log_ratio_bound": 1.0,
            "verify_provenance": 0.0,
        },
        stable_reinforce,
        is_elementwise=False,
        clip_binds=weight_is_truncated,
        masks=stable_masks,
        needs_provenance=True,
    ),
    # The temperatures of the paper's experiments.
    "sapo": LossFn(
        _POLICY_INPUTS, {"temperature_positive": 1.0, "temperature_negative": 1.05}, sapo, clip_binds=sapo_is_faded
    ),
}


class RatioStats:
    """Diagnostics of a policy loss over the sampled positions (`was_sampled`), accumulated over micro-batches.

    - ratio:mean, :min, :max: the factor of the advantage, before any clip (gspo: the sequence's ratio)
    - clipped_fraction:mean: share of positions where the clip binds (ppo, gspo: the clipped side is the minimum; cispo: the
      weight is a bound; stable_reinforce: the weight is the cap; sapo: the gate halves the gradient); absent for a loss
      without clip
    - masked_fraction:mean, masked_sequences:sum: share of masked positions, and number of fully masked datums, for a loss with
      masks
    - kl:mean, kl_k3:mean: mean(q - lp) and mean(r - 1 - log r), estimates of KL(sampler || model); the second is never
      negative (Schulman 2020, "Approximating KL Divergence": k1 and k3)
    - entropy:mean: mean(-lp) over the sampled tokens, a Monte-Carlo estimate of the model's entropy if the model itself sampled,
      else of the cross-entropy of the sampler under it

    If the SDK splits a call, it averages `:mean` weighted by the number of datums, not of tokens.
    """

    def __init__(self, loss: LossFn) -> None:
        self._loss = loss
        self._sums: list[torch.Tensor] = []
        self._extremes: list[torch.Tensor] = []

    @torch.no_grad()
    def add(self, logprobs: torch.Tensor, inputs: Inputs, config: Config) -> None:
        """Add a micro-batch. The sums stay on the device until `metrics` is called."""
        loss, sampled = self._loss, was_sampled(inputs)
        lp = logprobs.detach().double()
        log_ratio = lp - inputs["logprobs"]
        binds = torch.zeros_like(sampled)
        if loss.clip_binds is not None:
            binds = loss.clip_binds(loss.ratio(logprobs.detach(), inputs), inputs, config)
        masked, sequences = torch.zeros_like(sampled), torch.zeros_like(lp)
        if loss.masks is not None:
            token, sequence = loss.masks(logprobs.detach(), inputs, config)
            masked = token | sequence
            binds = binds & ~masked
            sequences = sequence / _sequence_sum(sampled, inputs).clamp(min=1)  # sums to 1 per sequence
        ratio, kl_k3 = loss.ratio(lp, inputs), log_ratio.expm1() - log_ratio
        summed = (torch.ones_like(lp), ratio, binds.double(), -log_ratio, kl_k3, -lp, masked.double(), sequences)
        self._sums.append(torch.stack([torch.where(sampled, values, 0.0).sum() for values in summed]))
        lowest = torch.where(sampled, ratio, torch.inf).amin()
        highest = torch.where(sampled, ratio, -torch.inf).amax()
        self._extremes.append(torch.stack([lowest, -highest]))

    def metrics(self, config: Config) -> Metrics:
        """The diagnostics; empty if no position was sampled."""
        if not self._sums:
            return {}
        count, *sums = torch.stack(self._sums).sum(dim=0).tolist()
        if count == 0:
            return {}
        ratio, clipped, kl, kl_k3, entropy, masked = (total / count for total in sums[:-1])
        lowest, minus_highest = torch.stack(self._extremes).amin(dim=0).tolist()
        metrics = {
            "ratio:mean": ratio,
            "ratio:min": lowest,
            "ratio:max": -minus_highest,
            "kl:mean": kl,
            "kl_k3:mean": kl_k3,
            "entropy:mean": entropy,
        }
        if self._loss.clip_binds is not None:
            metrics["clipped_fraction:mean"] = clipped
        if self._loss.masks is not None:
            metrics |= {"masked_fraction:mean": masked, "masked_sequences:sum": float(round(sums[-1]))}
        return metrics
