"""The keys by which a reinforcement learning recipe chooses its algorithm, and what they mean for the loop's config."""

from typing import Any

import chz

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl.advantages import AdvantageConfig, Baseline, Scale
from tinker_cookbook.rl.algorithms import LOSS_FNS, PRESETS, get_preset
from tinker_cookbook.rl.config import AsyncConfig, StreamMinibatchConfig
from tinker_cookbook.rl.off_policy import OffPolicyCorrection
from tinker_cookbook.rl.rollout_strategy import RetryOnFailure, RolloutStrategy
from tinker_cookbook.runs.reference import KLReferenceConfig


@chz.chz(typecheck=True)
class RLOptions:
    """Keys of the algorithm. What is not given comes from the preset, else from the recipe, else it is plain GRPO."""

    preset: str | None = chz.field(
        default=None, doc=f"{', '.join(PRESETS)}: loss, clip, advantages and filter of a published algorithm"
    )
    loss_fn: str | None = chz.field(default=None, doc=f"{', '.join(LOSS_FNS)}; default: importance_sampling")
    clip_low: float | None = chz.field(default=None, doc="lower bound on the ratio (ppo, cispo, gspo), such as 0.8")
    clip_high: float | None = chz.field(default=None, doc="upper bound on the ratio (ppo, cispo, gspo), such as 1.2")
    baseline: Baseline | None = chz.field(
        default=None, doc="what a reward is compared with: mean, zscore, leave_one_out, role or constant; default: mean"
    )
    advantage_scale: Scale | None = chz.field(
        default=None, doc="sum of tokens, mean over each sequence, or mean over all tokens of the batch; default: sum"
    )
    remove_constant_reward_groups: bool | None = chz.field(
        default=None, doc="leave out groups whose rewards are all equal; default: false"
    )
    num_substeps: int = chz.field(default=1, doc="optimizer steps per batch", validator=chz.validators.gt(0))
    grad_clip_norm: float = chz.field(
        default=0.0, doc="bound on the gradient norm; 0: none", validator=chz.validators.ge(0)
    )
    kl_penalty_coef: float = chz.field(
        default=0.0, doc="weight of the KL penalty to the reference policy; 0: none", validator=chz.validators.ge(0)
    )
    kl_discount_factor: float = chz.field(default=0.0, doc="discount of later tokens' KL penalties")
    kl_reference_path: str | None = chz.field(
        default=None, doc="sampler weights of the reference policy; default: the weights that the run started from"
    )
    compute_post_kl: bool = chz.field(default=False, doc="score each batch again after its update (optim/kl_pre_post)")
    off_policy_cap: float | None = chz.field(
        default=None, doc="weight tokens by the ratio of trainer and sampler, truncated at this cap; default: not"
    )
    max_steps_off_policy: int | None = chz.field(
        default=None, doc="sample up to so many batches ahead of training; default: sample, then train"
    )
    stream_minibatches: int | None = chz.field(
        default=None, doc="train on a batch in so many passes while it is still being sampled; default: not"
    )
    rollout_retries: int | None = chz.field(
        default=None,
        doc="run failed rollouts again so often, then leave the group out; default: a failure ends the run",
    )
    rollout_timeout: float | None = chz.field(
        default=None, doc="seconds after which a rollout has failed; default: never"
    )
    on_zero_advantages: str = chz.field(default="raise", doc="raise, or skip the step and count it")


def algorithm_settings(
    options: RLOptions, model: str, default: AdvantageConfig | None = None, temperature: float | None = None
) -> dict[str, Any]:
    """The loop's settings that `options` ask for, as keyword arguments of `rl.train.Config`.

    Args:
        model: base model, of which `kl_reference_path` is an adapter.
        default: the recipe's own advantages, where neither a key nor a preset says otherwise.
        temperature: what the trainer scores at, when it is told (local engine).

    Raises:
        ConfigurationError: an unknown preset, or keys that contradict each other.
    """
    preset = get_preset(options.preset) if options.preset is not None else None
    advantage = preset.advantage if preset else default or AdvantageConfig()
    changes = {"baseline": options.baseline, "scale": options.advantage_scale}
    advantage = chz.replace(advantage, **{key: value for key, value in changes.items() if value is not None})
    loss_fn = options.loss_fn or (preset.loss_fn if preset else "importance_sampling")
    loss_config = dict(preset.loss_fn_config or {}) if preset and preset.loss_fn == loss_fn else {}
    clips = {"clip_low_threshold": options.clip_low, "clip_high_threshold": options.clip_high}
    loss_config |= {key: value for key, value in clips.items() if value is not None}
    if temperature is not None:
        loss_config["temperature"] = temperature
    remove_constant = options.remove_constant_reward_groups
    if remove_constant is None:
        remove_constant = preset is not None and preset.remove_constant_reward_groups
    if options.on_zero_advantages not in ("raise", "skip"):
        raise ConfigurationError(f"on_zero_advantages={options.on_zero_advantages!r}: must be raise or skip")
    return {
        "advantage": advantage,
        "loss_fn": loss_fn,
        "loss_fn_config": loss_config or None,
        "remove_constant_reward_groups": remove_constant,
        "num_substeps": options.num_substeps,
        "grad_clip_norm": options.grad_clip_norm,
        "kl_penalty_coef": options.kl_penalty_coef,
        "kl_discount_factor": options.kl_discount_factor,
        "kl_reference_config": _reference(options, model),
        "compute_post_kl": options.compute_post_kl,
        "off_policy_correction": (
            OffPolicyCorrection(cap=options.off_policy_cap) if options.off_policy_cap is not None else None
        ),
        "on_zero_advantages": options.on_zero_advantages,
        **_pacing(options),
        "rollout_error_tolerance": _strategy(options),
    }


def _reference(options: RLOptions, model: str) -> KLReferenceConfig | None:
    if options.kl_reference_path is None:
        return None
    return KLReferenceConfig(base_model=model, load_checkpoint_path=options.kl_reference_path)


def _pacing(options: RLOptions) -> dict[str, Any]:
    ahead, stream = options.max_steps_off_policy, options.stream_minibatches
    if ahead is not None and ahead < 0:
        raise ConfigurationError(f"max_steps_off_policy={ahead}: must be at least 0")
    if stream is not None and stream < 1:
        raise ConfigurationError(f"stream_minibatches={stream}: must be at least 1")
    if ahead is not None and stream is not None:
        raise ConfigurationError("max_steps_off_policy and stream_minibatches are both set; use one of them")
    return {
        "async_config": AsyncConfig(max_steps_off_policy=ahead) if ahead is not None else None,
        "stream_minibatch_config": StreamMinibatchConfig(num_minibatches=stream) if stream is not None else None,
    }


def _strategy(options: RLOptions) -> RolloutStrategy | None:
    if options.rollout_retries is not None:
        return RetryOnFailure(max_retries=options.rollout_retries, per_rollout_timeout=options.rollout_timeout)
    if options.rollout_timeout is not None:
        raise ConfigurationError(
            f"rollout_timeout={options.rollout_timeout:g} says when a rollout has failed, not what follows; set rollout_retries "
            "too (0: its group is left out at once)"
        )
    return None
