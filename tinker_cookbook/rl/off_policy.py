"""Truncated importance weights for data sampled by an older (or differently rounded) policy.

With q the sampler's logprob of a token and p0 the trainer's before the update, every token is weighted by its
truncated ratio exp(p0 - q), and the loss then measures its ratio from p0. This separates the two sources of a
ratio, staleness and the update itself, so that clipping bounds only the update (Hilton et al. 2022). Truncation (TIS) is that of
Ionides 2008 and Yao et al. 2025, masking (MIS) that of IcePop (Ant 2025). The weights are
in the advantages, so both engines take them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import chz

from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.rl.data_processing import replace_inputs
from tinker_cookbook.utils.lazy import np, tinker


@chz.chz(typecheck=True)
class OffPolicyCorrection:
    """How ratios between trainer and sampler enter the advantages."""

    mode: Literal["truncate", "mask"] = chz.field(
        default="truncate",
        doc="truncate: weight by min(ratio, cap) (TIS); mask: weight 0 outside [low, cap], else the ratio (MIS, IcePop)",
    )
    level: Literal["token", "sequence"] = chz.field(
        default="token", doc="token: the ratio of each token; sequence: the product over the datum's action tokens"
    )
    cap: float = chz.field(default=2.0, doc="largest weight")
    low: float | None = chz.field(
        default=None, doc="mode=mask: smallest ratio that is not masked (IcePop: low=0.5 cap=5); None: 1 / cap"
    )

    @chz.validate
    def _check(self) -> None:
        if not self.cap >= 1:
            raise ConfigurationError(f"cap={self.cap}: must be at least 1")
        if self.low is not None and not (self.mode == "mask" and 0 <= self.low <= 1):
            raise ConfigurationError(f"low={self.low}: must be between 0 and 1, and goes with mode=mask")

    @property
    def log_bounds(self) -> tuple[float, float]:
        """The bounds of the log ratio; the lower one is only used by mode=mask."""
        low = 1 / self.cap if self.low is None else self.low
        return math.log(low) if low > 0 else -math.inf, math.log(self.cap)


def correct_off_policy(
    data_D: Sequence[tinker.Datum], trainer_logprobs_D: Sequence[np.ndarray], config: OffPolicyCorrection
) -> tuple[list[tinker.Datum], dict[str, float]]:
    """New datums with weighted advantages and the trainer's logprobs (`Update.score`) instead of the sampler's.

    Metrics describe the ratios before truncation: `off_policy/ratio_{min,mean,max}` over tokens (level=token) or
    datums, and `off_policy/frac_cut`, the fraction changed by truncation or masking.
    """
    log_low, log_cap = config.log_bounds
    corrected: list[tinker.Datum] = []
    all_log_ratios: list[np.ndarray] = []
    for i, (datum, trainer_logprobs) in enumerate(zip(data_D, trainer_logprobs_D, strict=True)):
        inputs, current = datum.loss_fn_inputs, trainer_logprobs.astype(np.float64)
        sampled, mask = inputs["logprobs"].to_numpy().astype(np.float64), inputs["mask"].to_numpy() > 0
        if current.shape != sampled.shape:
            raise DataValidationError(f"datum {i}: {sampled.shape} sampled logprobs, the trainer gave {current.shape}")
        # In log space: a ratio that overflows would turn 0 * inf into NaN.
        log_ratio = np.where(mask, current - sampled, 0.0)
        if config.level == "sequence":
            all_log_ratios.append(log_ratio.sum(keepdims=True))
            log_ratio = np.where(mask, all_log_ratios[-1], 0.0)
        else:
            all_log_ratios.append(log_ratio[mask])
        weight = np.exp(np.minimum(log_ratio, log_cap))
        if config.mode == "mask":
            weight = np.where((log_ratio >= log_low) & (log_ratio <= log_cap), weight, 0.0)
        advantages = (inputs["advantages"].to_numpy() * weight).astype(np.float32)
        logprobs = np.where(mask, current, sampled).astype(np.float32)
        corrected.append(replace_inputs(datum, advantages=advantages, logprobs=logprobs))
    log_ratios = np.concatenate(all_log_ratios)
    cut = log_ratios > log_cap
    if config.mode == "mask":
        cut |= log_ratios < log_low
    ratios = np.exp(np.clip(log_ratios, -80, 80))
    return corrected, {
        "off_policy/ratio_min": float(ratios.min()),
        "off_policy/ratio_mean": float(ratios.mean()),
        "off_policy/ratio_max": float(ratios.max()),
        "off_policy/frac_cut": float(cut.mean()),
    }
