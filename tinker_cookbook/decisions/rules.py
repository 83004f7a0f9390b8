"""Proper scoring rules for probabilities of choices, and how calibrated they are.

A choice's score is the sum of the logprobs of its tokens, its end included; the softmax of the scores is the decision. The rules
are proper: the expected value is lowest if the decision equals the outcome's probabilities (Gneiting and Raftery 2007, "Strictly
proper scoring rules, prediction, and estimation", sections 3 and 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.utils.lazy import torch
from tinker_cookbook.utils.narrowing import to_list

Rule: TypeAlias = Literal["cross_entropy", "brier"]
METRICS = ("cross_entropy", "brier", "accuracy", "confidence", "distance", "calibration_error")
BINS = 10
"""Number of confidence bins in `calibration_error`."""


def decision(scores_K: torch.Tensor) -> torch.Tensor:
    """Log-probabilities float64 (K,) of the choices, from their scores (K,): log softmax.

    Raises DataValidationError for fewer than two choices, and if every choice has probability 0.
    """
    if scores_K.ndim != 1 or len(scores_K) < 2:
        raise DataValidationError(f"a decision takes at least two choices, got scores of shape {tuple(scores_K.shape)}")
    if not bool(torch.isfinite(scores_K.detach()).any()):
        raise DataValidationError("no choice has any probability under the model")
    return torch.log_softmax(scores_K.double(), dim=0)


def score(log_probabilities_K: torch.Tensor, target_K: Sequence[float], rule: Rule) -> torch.Tensor:
    """The rule's expected value, lower is better, when the outcome has the probabilities of `target_K`.

        cross_entropy   -sum_k t_k log p_k
        brier           sum_k t_k sum_j (p_j - [j = k])^2  =  sum_k p_k^2 - 2 sum_k t_k p_k + 1        (0 to 2)

    Raises ConfigurationError for an unknown rule, DataValidationError if the numbers of targets and choices differ.
    """
    if rule not in get_args(Rule):
        raise ConfigurationError(f"rule={rule!r} is unknown; use {', '.join(get_args(Rule))}")
    target = torch.tensor(target_K, dtype=torch.float64)
    if target.shape != log_probabilities_K.shape:
        raise DataValidationError(f"{len(target_K)} targets for {len(log_probabilities_K)} choices")
    if rule == "cross_entropy":
        possible = target > 0  # a choice that is never the outcome may have probability 0
        return -(target[possible] * log_probabilities_K[possible]).sum()
    probabilities = log_probabilities_K.exp()
    return (probabilities**2).sum() - 2 * (target * probabilities).sum() + 1


def decision_loss(
    scores_D: Sequence[torch.Tensor], targets_D: Sequence[Sequence[float]], rule: Rule
) -> tuple[torch.Tensor, dict[str, float]]:
    """Mean score over D decisions, differentiable in the scores, and METRICS.

    Metrics are means over decisions: both rules; `accuracy`, the probability that the likeliest choice is the outcome;
    `confidence`, its probability under the model; `distance`, half the sum of |p - t|; and `calibration_error`.

    Args:
        scores_D: one tensor (K,) per decision.
        targets_D: the probability that each choice is the outcome; 1 and 0 for a known outcome.
    """
    if not scores_D or len(scores_D) != len(targets_D):
        raise DataValidationError(
            f"{len(scores_D)} decisions with {len(targets_D)} targets; give equally many, at least one"
        )
    logs_D = [decision(scores) for scores in scores_D]
    loss = torch.stack([score(logs, target, rule) for logs, target in zip(logs_D, targets_D, strict=True)]).mean()
    probabilities_D: list[list[float]] = [to_list(logs.detach().exp()) for logs in logs_D]
    return loss, decision_metrics(probabilities_D, targets_D)


def decision_metrics(
    probabilities_D: Sequence[Sequence[float]], targets_D: Sequence[Sequence[float]]
) -> dict[str, float]:
    """METRICS of decisions, as in `decision_loss`."""
    logs_D = [torch.tensor(one, dtype=torch.float64).log() for one in probabilities_D]
    pairs = list(zip(logs_D, targets_D, strict=True))
    likeliest = [max(range(len(one)), key=one.__getitem__) for one in probabilities_D]
    confidence = [one[k] for one, k in zip(probabilities_D, likeliest, strict=True)]
    right = [target[k] for target, k in zip(targets_D, likeliest, strict=True)]
    distances = [
        sum(abs(p - t) for p, t in zip(one, target, strict=True)) / 2
        for one, target in zip(probabilities_D, targets_D, strict=True)
    ]
    return {
        "cross_entropy": _mean([float(score(logs, target, "cross_entropy")) for logs, target in pairs]),
        "brier": _mean([float(score(logs, target, "brier")) for logs, target in pairs]),
        "accuracy": _mean(right),
        "confidence": _mean(confidence),
        "distance": _mean(distances),
        "calibration_error": calibration_error(confidence, right),
    }


def calibration_error(confidence: Sequence[float], right: Sequence[float]) -> float:
    """Expected calibration error: |mean confidence - fraction right| in BINS bins of equal width, weighted by their sizes
    (Guo et al. 2017, "On calibration of modern neural networks", eq. 3).

    Args:
        confidence: of each decision, from 0 to 1.
        right: 1 or 0, or the probability of being right.
    """
    total = 0.0
    for members in bins(confidence).values():
        total += abs(sum(confidence[i] - right[i] for i in members))
    return total / max(1, len(confidence))


def bins(probabilities: Sequence[float]) -> dict[float, list[int]]:
    """Lower end of each non-empty bin of width 1/BINS -> indices of its members; 1 belongs to the last bin."""
    members_by_bin: dict[float, list[int]] = {}
    for i, probability in enumerate(probabilities):
        members_by_bin.setdefault(min(int(probability * BINS), BINS - 1) / BINS, []).append(i)
    return dict(sorted(members_by_bin.items()))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
