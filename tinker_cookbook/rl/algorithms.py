"""Algorithms: the policy-gradient losses, the settings of each, and published algorithms as presets.

The engine computes the losses; this module only checks their settings. A custom loss is a function of
tensors, which `forward_backward_custom` differentiates locally and passes to either engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, cast

from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.plugins import Kind, Registry, describe, parameter_problem
from tinker_cookbook.rl.advantages import AdvantageConfig
from tinker_cookbook.rl.off_policy import OffPolicyCorrection
from tinker_cookbook.utils.lazy import tinker, torch

_CLIP = frozenset({"clip_low_threshold", "clip_high_threshold"})
STABLE_REINFORCE = "stable_reinforce"
_STABLE = frozenset(
    {"weight_cap", "token_ratio_low", "token_ratio_high", "sequence_log_ratio_bound", "verify_provenance"}
)
SAPO = "sapo"
LOCAL_LOSSES = frozenset({SAPO})
"""Losses that the hosted service does not have."""
ROUTE_REPLAY = "route_replay"
_ANY = frozenset({"temperature", ROUTE_REPLAY})
"""Settings of every loss."""
_LOCAL_ONLY = _ANY | _STABLE
_SETTINGS: dict[str, frozenset[str]] = {
    "importance_sampling": frozenset(),
    "ppo": _CLIP,
    "cispo": _CLIP,
    "gspo": _CLIP,
    "dro": frozenset({"beta"}),
    STABLE_REINFORCE: _STABLE,
    SAPO: frozenset({"temperature_positive", "temperature_negative"}),
}
LOSS_FNS = tuple(_SETTINGS)


CustomLossFn: TypeAlias = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor", "torch.Tensor"], Any]
"""(logprobs, sampling_logprobs, advantages, mask) of one datum, float32 (N,) each -> scalar tensor, or (it, metrics).

Only `logprobs`, those of the model that trains, carry a gradient. `mask` is 1 where a token was sampled; elsewhere
sampling_logprobs and advantages are 0. The losses of a batch's datums are added up.
"""

_CUSTOM_LOSSES: Registry[CustomLossFn] = Registry(
    Kind(
        key="loss_fn",
        wanted="def loss(logprobs, sampling_logprobs, advantages, mask) -> scalar tensor, of one datum, float32 (N,) each; it "
        "may also return (loss, metrics)",
        example='''
def loss(logprobs, sampling_logprobs, advantages, mask):
    """Importance sampling with ratios of at most 2."""
    ratio = (logprobs - sampling_logprobs).exp().clamp(max=2.0)
    return -(ratio * advantages * mask).sum()
''',
        problem=partial(parameter_problem, names=("logprobs", "sampling_logprobs", "advantages", "mask")),
    ),
    {},
)


def register_loss(name: str, loss: CustomLossFn) -> None:
    """Register a custom loss under a name. Raises ConfigurationError for a name that is taken."""
    if name in _SETTINGS:
        raise ConfigurationError(f"loss_fn: the name {name!r} is taken; choose another")
    _CUSTOM_LOSSES.register(name, loss)


def custom_loss(loss_fn: str | CustomLossFn) -> CustomLossFn | None:
    """The custom loss named by `loss_fn`; None for one of LOSS_FNS. Raises ConfigurationError for any other name."""
    return None if loss_fn in _SETTINGS else _CUSTOM_LOSSES.resolve(loss_fn, also=LOSS_FNS)


def check_loss(loss_fn: str | CustomLossFn, loss_fn_config: Mapping[str, float] | None, backend: str) -> None:
    """Raises ConfigurationError for an unknown loss, or a setting that the loss (or the hosted trainer) does not support."""
    if custom_loss(loss_fn) is not None:
        if loss_fn_config:
            raise ConfigurationError(
                f"loss_fn_config={dict(loss_fn_config)} is for the built-in losses; a custom loss closes over its settings "
                "(and is given logprobs at temperature 1)"
            )
        return
    if loss_fn in LOCAL_LOSSES and backend != "local":
        raise ConfigurationError(
            f"loss_fn={loss_fn} exists only in the local engine, not with backend={backend}; use ppo or cispo there, or "
            "give it as a custom loss"
        )
    known = _SETTINGS[str(loss_fn)] | _ANY
    for key, value in (loss_fn_config or {}).items():
        if key not in known:
            raise ConfigurationError(f"loss_fn_config has {key!r}; loss_fn={loss_fn} takes {sorted(known)}")
        if key in _LOCAL_ONLY and backend != "local":
            raise ConfigurationError(f"loss_fn_config has {key!r}, which only the local engine supports; remove it")
        if not 0 <= value < math.inf:
            raise ConfigurationError(f"loss_fn_config {key}={value}: must be a finite number of at least 0")
    config = loss_fn_config or {}
    for lower, upper in (("clip_low_threshold", "clip_high_threshold"), ("token_ratio_low", "token_ratio_high")):
        low, high = config.get(lower, 0.0), config.get(upper, math.inf)
        if low > high:
            raise ConfigurationError(f"loss_fn_config {lower}={low} is above {upper}={high}")
    for key in ("temperature_positive", "temperature_negative"):
        if config.get(key) == 0:
            raise ConfigurationError(f"loss_fn_config {key}=0: must be positive")
    if config.get("weight_cap") == 0:
        raise ConfigurationError("loss_fn_config weight_cap=0 trains nothing; give the largest weight, 2 for example")
    for switch in ("verify_provenance", ROUTE_REPLAY):
        if config.get(switch, 0) not in (0, 1):
            raise ConfigurationError(f"loss_fn_config {switch}={config[switch]}: must be 1 or 0")


def needs_provenance(loss_fn: str | CustomLossFn, loss_fn_config: Mapping[str, float] | None) -> bool:
    """Whether each datum must have the provenance of its samples."""
    return loss_fn == STABLE_REINFORCE or bool((loss_fn_config or {}).get(ROUTE_REPLAY))


def check_discount(loss_fn: str | CustomLossFn, kl_discount_factor: float) -> None:
    """Raise ConfigurationError for a discounted KL with stable_reinforce."""
    if loss_fn == STABLE_REINFORCE and kl_discount_factor > 0:
        raise ConfigurationError(
            f"kl_discount_factor={kl_discount_factor} does not go with loss_fn={STABLE_REINFORCE}, whose advantages belong to "
            "sampled tokens alone; set kl_discount_factor=0, or use another loss, ppo for example"
        )


def sum_over_datums(loss: CustomLossFn) -> Callable[[list[tinker.Datum], list[torch.Tensor]], Any]:
    """A loss for `forward_backward_custom`: the sum of the datums' losses, and as `<metric>:mean` each metric's mean
    over them.

    The function raises DataValidationError for a loss that is not a scalar.
    """

    def total(data_D: list[tinker.Datum], logprobs_D: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        losses: list[torch.Tensor] = []
        sums: dict[str, float] = {}
        for datum, logprobs in zip(data_D, logprobs_D, strict=True):
            given = (datum.loss_fn_inputs[key].to_torch() for key in ("logprobs", "advantages", "mask"))
            returned = loss(logprobs, *(values.to(logprobs) for values in given))
            value, metrics = cast(
                "tuple[Any, dict[str, Any]]", returned if isinstance(returned, tuple) else (returned, {})
            )
            if not isinstance(value, torch.Tensor) or value.shape != ():
                raise DataValidationError(
                    f"loss_fn {describe(loss)} returned {type(value).__name__} of shape "
                    f"{tuple(getattr(value, 'shape', ()))}; a loss is a scalar tensor: sum it"
                )
            losses.append(value)
            for key, number in metrics.items():
                plain = float(number.detach() if isinstance(number, torch.Tensor) else number)
                sums[key] = sums.get(key, 0.0) + plain
        return torch.stack(losses).sum(), {f"{key}:mean": number / len(losses) for key, number in sums.items()}

    return total


@dataclass(frozen=True)
class Preset:
    """A published algorithm, as settings of this loop."""

    source: str
    advantage: AdvantageConfig
    loss_fn: str
    loss_fn_config: Mapping[str, float] | None = None
    remove_constant_reward_groups: bool = False
    off_policy_correction: OffPolicyCorrection | None = None

    def __str__(self) -> str:
        """Its settings as keys of a command line."""
        advantage = AdvantageConfig()
        shown = [
            f"advantage.{key}={value}"
            for key in ("baseline", "scale")
            if (value := getattr(self.advantage, key)) != getattr(advantage, key)
        ]
        shown += [
            f"loss_fn={self.loss_fn}",
            *(f"{key}={value:g}" for key, value in (self.loss_fn_config or {}).items()),
        ]
        shown += ["remove_constant_reward_groups=True"] if self.remove_constant_reward_groups else []
        if (correction := self.off_policy_correction) is not None:
            of = {key: getattr(correction, key) for key in ("mode", "level", "cap", "low")}
            shown += [f"off_policy_correction.{key}={value}" for key, value in of.items() if value is not None]
        return " ".join(shown)


def _clip(low: float, high: float) -> dict[str, float]:
    return {"clip_low_threshold": low, "clip_high_threshold": high}


PRESETS: dict[str, Preset] = {
    "grpo": Preset(
        "Shao et al. 2024 (DeepSeekMath): z-scored rewards, mean over each reply's tokens, clipped ratio",
        AdvantageConfig(baseline="zscore", scale="sequence"),
        "ppo",
        _clip(0.8, 1.2),
    ),
    "dr_grpo": Preset(
        "Liu et al. 2025: centred rewards, divided neither by their deviation nor by the reply's length, clipped ratio",
        AdvantageConfig(baseline="mean", scale="sum"),
        "ppo",
        _clip(0.8, 1.2),
    ),
    "dapo": Preset(
        "Yu et al. 2025: z-scored rewards, mean over the batch's tokens, a higher upper clip bound, no constant groups",
        AdvantageConfig(baseline="zscore", scale="token"),
        "ppo",
        _clip(0.8, 1.28),
        remove_constant_reward_groups=True,
    ),
    "cispo": Preset(
        "MiniMax 2025 (M1): z-scored rewards, mean over the batch's tokens, the ratio is a truncated, detached weight",
        AdvantageConfig(baseline="zscore", scale="token"),
        "cispo",
        _clip(0.0, 4.0),
    ),
    "gspo": Preset(
        "Zheng et al. 2025: z-scored rewards, one ratio per sequence, mean over each reply's tokens",
        AdvantageConfig(baseline="zscore", scale="sequence"),
        "gspo",
        _clip(0.9997, 1.0004),
    ),
    "ppo": Preset(
        "Schulman et al. 2017, with the group's mean in place of a value function: centred rewards, clipped ratio",
        AdvantageConfig(baseline="mean", scale="sum"),
        "ppo",
        _clip(0.8, 1.2),
    ),
    "sapo": Preset(
        "SAPO (arXiv 2511.20347): z-scored rewards, mean over each reply's tokens, a soft gate instead of the clip",
        AdvantageConfig(baseline="zscore", scale="sequence"),
        SAPO,
        {"temperature_positive": 1.0, "temperature_negative": 1.05},
    ),
    "icepop": Preset(
        "IcePop (Ant 2025): as grpo, without the tokens whose probability differs too much between trainer and sampler",
        AdvantageConfig(baseline="zscore", scale="sequence"),
        "ppo",
        _clip(0.8, 1.2),
        off_policy_correction=OffPolicyCorrection(mode="mask", cap=5.0, low=0.5),
    ),
    "maxrl": Preset(
        "MaxRL (arXiv 2602.02710): rewards of 0 and 1, minus the pass rate, over the pass rate",
        AdvantageConfig(baseline="maxrl"),
        "importance_sampling",
    ),
    "gdpo": Preset(
        "GDPO (arXiv 2601.05242): each of several rewards z-scored by itself (advantage.parts), clipped ratio",
        AdvantageConfig(baseline="gdpo", scale="sequence"),
        "ppo",
        _clip(0.8, 1.2),
    ),
}


def get_preset(name: str) -> Preset:
    """Raises ConfigurationError for an unknown name, listing the known ones."""
    if name not in PRESETS:
        raise ConfigurationError(f"preset={name!r} is unknown; use one of {', '.join(PRESETS)}")
    return PRESETS[name]
