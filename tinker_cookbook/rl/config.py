"""The config of a reinforcement learning run, and all checks that need no model."""

import logging
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import chz

from tinker_cookbook import local_sampling
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.field_groups import Epochs, GradientClip, LongestReply, Temperature, Truncation
from tinker_cookbook.models.hyperparameters import warn_if_low
from tinker_cookbook.rl.advantages import AdvantageConfig
from tinker_cookbook.rl.algorithms import (
    LOSS_FNS,
    ROUTE_REPLAY,
    STABLE_REINFORCE,
    check_discount,
    check_loss,
    needs_provenance,
)
from tinker_cookbook.rl.curriculum import CurriculumConfig
from tinker_cookbook.rl.entropy import EntropyConfig
from tinker_cookbook.rl.monitors import MonitorKeys
from tinker_cookbook.rl.monitors.judge import MonitorJudgeConfig
from tinker_cookbook.rl.off_policy import OffPolicyCorrection
from tinker_cookbook.rl.overlong import OVERLONG_METRIC_KEY, OverlongConfig
from tinker_cookbook.rl.rollout_limits import MAX_GROUPS_IN_FLIGHT, Termination, TerminationRewardPolicy
from tinker_cookbook.rl.rollout_presets import RolloutConfig, RolloutKey
from tinker_cookbook.rl.rollout_strategy import RolloutStrategy, rollout_strategy_from_config
from tinker_cookbook.rl.types import RLData
from tinker_cookbook.runs.config import RunConfig, RunOptions
from tinker_cookbook.runs.reference import KLReferenceConfig
from tinker_cookbook.utils.fields import REQUIRED, default_of, docs

logger = logging.getLogger(__name__)

ZeroAdvantages = Literal["stop", "skip", "raise"]


@chz.chz(typecheck=True)
class OverlapConfig:
    """How sampling and training overlap."""

    groups_per_batch: int | None = chz.field(default=None, doc="groups per batch; None: as in the dataset")
    deterministic: bool = chz.field(
        default=True,
        doc="True: step i trains on batch i, in its order, so that the same config, seed and machine give the same metrics "
        "(local engine); False: it trains on the groups that finish first, so that slow groups delay nothing, and runs differ",
    )


@chz.chz(typecheck=True)
class StreamMinibatchConfig(OverlapConfig):
    """Train on the first groups of a batch while the others are still being sampled. Still on-policy.

    Quantities relative to the batch (the centre of a KL penalty) are relative to the groups of one pass.
    """

    num_minibatches: int = chz.field(
        default=1, doc="forward_backward calls per optimizer step", validator=chz.validators.gt(0)
    )


@chz.chz(typecheck=True)
class AsyncConfig(OverlapConfig):
    """Sample ahead of training, with weights that are at most `max_steps_off_policy` optimizer updates old."""

    max_steps_off_policy: int = chz.field(
        doc="batches that may be sampled ahead of the one that trains next; 0 is the synchronous loop",
        validator=chz.validators.ge(0),
    )
    loss_fn: str | Callable[..., Any] | None = chz.field(
        default=None,
        doc=f"the loss of a run that samples ahead, instead of `loss_fn`; default: {STABLE_REINFORCE}",
    )
    too_old: Literal["train", "wait", "drop"] = chz.field(
        default="train",
        doc="deterministic=False: a group still being sampled when it is as old as max_steps_off_policy; train on it when it is "
        "done, or let the step wait for it, or drop it (groups/stale) where the step has others",
    )

    inflight: bool = chz.field(
        default=False,
        doc="deterministic=False: replies in progress continue with new weights as soon as there are any; each token records "
        "which weights drew it (weight_versions). Such a run neither repeats nor resumes bit for bit",
    )

    @chz.validate
    def _check_inflight(self) -> None:
        if self.inflight and (self.deterministic or not self.max_steps_off_policy):
            raise ConfigurationError(
                "async_config.inflight=True changes weights while replies are sampled, which depends on timing; add "
                "async_config.deterministic=False, and max_steps_off_policy of at least 1"
            )

    @chz.validate
    def _check_too_old(self) -> None:
        if self.too_old == "drop" and self.deterministic:
            raise ConfigurationError(
                "async_config.too_old=drop depends on what finishes first; add async_config.deterministic=False"
            )


@chz.chz(typecheck=True)
class SamplingOptions(GradientClip, Temperature, RunOptions):
    """Settings of the loops that train on tokens the policy sampled."""

    DOCS = docs(temperature="sampling temperature; it must be 1 where sampled tokens are scored by a teacher")

    num_substeps: int = chz.field(
        default=1, doc="optimizer steps per batch, each on a share of the datums", validator=chz.validators.gt(0)
    )
    write_records: bool = chz.field(
        default=True, doc="write the tokens and logprobs of each rollout, and the training data of each step"
    )

    @chz.validate
    def _check_sampled(self) -> None:
        chz.validators.gt(0)(self, "temperature")


@chz.chz(typecheck=True)
class UpdateOptions(RolloutKey, SamplingOptions):
    """Settings of an update by policy gradient, for any source of advantages."""

    loss_fn: str | Callable[..., Any] = chz.field(
        default="importance_sampling",
        doc=f"{', '.join(LOSS_FNS)}, or a custom one: package.module:function, path/file.py:function",
    )
    loss_fn_config: dict[str, float] | None = chz.field(
        default=None,
        doc="settings of the loss; on the local engine also `temperature` (the trainer scores at that of sampling) and "
        "`route_replay` (1: the experts of sampling are chosen again)",
    )
    compute_post_kl: bool = chz.field(
        default=False, doc="score each batch again after its update, for optim/kl_pre_post"
    )
    kl_alarm: float = chz.field(
        default=0.01,
        doc="warn when the KL between sampler and trainer (v2, in nats) is above this at some depth; 0: never",
        validator=chz.validators.ge(0),
    )
    kl_penalty_coef: float = chz.field(
        default=0.0, doc="weight of the KL penalty to a reference policy; 0: none", validator=chz.validators.ge(0)
    )
    kl_discount_factor: float = chz.field(
        default=0.0, doc="discount of later tokens' KL penalties; 0: only a token's own penalty counts"
    )
    num_groups_to_log: int = chz.field(
        default=4,
        doc="groups per step and per evaluation whose transcripts and JSON records are written; 0: none, -1: all",
        validator=chz.validators.ge(-1),
    )


@chz.chz(typecheck=True)
class RLOptions(MonitorKeys, Truncation, Termination, UpdateOptions):
    """Settings of the reinforcement learning loop."""

    DOCS = docs(termination="reward of a rollout that hit a limit; None: as set in `rollout`")

    rollout_json_export: bool = chz.field(
        default=True,
        doc="write a line per rollout, without its tokens, of each step and evaluation: *_rollout_summaries.jsonl",
    )
    max_groups_in_flight: int = chz.field(
        default=MAX_GROUPS_IN_FLIGHT,
        doc="groups sampled concurrently; the others of a larger batch wait",
        validator=chz.validators.gt(0),
    )
    advantage: AdvantageConfig = chz.field(default_factory=AdvantageConfig, doc="how rewards become advantages")
    on_zero_advantages: ZeroAdvantages = chz.field(
        default="stop",
        doc="a batch in which no advantage differs from zero is skipped and counted; stop: several in a row end the run; "
        "skip: the run continues, even if it never trains, as a custom script does by default; raise: the first ends the run",
    )
    max_zero_advantage_steps: int = chz.field(
        default=3, doc="on_zero_advantages=stop: this many in a row end the run", validator=chz.validators.gt(0)
    )
    remove_constant_reward_groups: bool = chz.field(
        default=False, doc="groups whose rewards are all equal neither train nor count in a mean over tokens"
    )
    replace_constant_groups: int = chz.field(
        default=0,
        doc="how often to replace a group that failed or whose rewards are all equal by another one (groups/replaced): the "
        "dynamic sampling of DAPO; 0: never",
        validator=chz.validators.ge(0),
    )
    curriculum: CurriculumConfig | None = chz.field(
        default=None, doc="draw fewer of the items that are always or never solved; None: the dataset's order"
    )
    overlong: OverlongConfig | None = chz.field(
        default=None,
        doc="mask truncated replies, or lower the reward of long ones; None: they train like any other",
    )
    entropy: EntropyConfig | None = chz.field(default=None, doc="a bonus for entropy; None: none")
    top_entropy_share: float = chz.field(
        default=1.0,
        doc="share of a batch's sampled tokens that train, those with the highest entropy (one more forward pass, local engine); "
        "1: all",
        validator=[chz.validators.gt(0), chz.validators.le(1)],
    )
    environment_loss_coef: float = chz.field(
        default=0.0,
        doc="weight of cross entropy on the tokens that the environment wrote between turns, of rollouts that train (one more "
        "pass over them); 0: only sampled tokens train",
        validator=chz.validators.ge(0),
    )
    kl_reference_config: KLReferenceConfig | None = chz.field(
        default=None, doc="the reference policy; None: the weights that the run started from"
    )
    off_policy_correction: OffPolicyCorrection | None = chz.field(
        default=None, doc="weight tokens by the truncated ratio of trainer and sampler (one more forward pass)"
    )
    rollout_error_tolerance: bool | RolloutStrategy | None = chz.field(
        default=None,
        doc="how a failed rollout is handled: False ends the run, True retries, or a strategy; None: as set in `rollout`",
    )
    async_config: AsyncConfig | None = chz.field(default=None, doc="sample ahead of training")
    stream_minibatch_config: StreamMinibatchConfig | None = chz.field(default=None, doc="train while still sampling")

    @chz.validate
    def _check_truncation(self) -> None:
        if self.top_k != -1 and self.top_k < 1:
            raise ConfigurationError(f"top_k={self.top_k}: must be at least 1, or -1 for all tokens")
        if not 0 < self.top_p <= 1:
            raise ConfigurationError(f"top_p={self.top_p}: must be above 0 and at most 1")

    @property
    def num_groups_shown(self) -> int:
        """`num_groups_to_log` as a count: -1 means all."""
        return sys.maxsize if self.num_groups_to_log == -1 else self.num_groups_to_log

    def removes_groups(self) -> bool:
        """Whether groups without signal are removed: if configured, or if they are replaced."""
        return self.remove_constant_reward_groups or self.replace_constant_groups > 0

    def effective_rollout(self) -> RolloutConfig:
        """`rollout`, overridden by `termination` and `rollout_error_tolerance`."""
        rollout = self.rollout or RolloutConfig()
        if self.termination is not None:
            rollout = chz.replace(rollout, termination=self.termination)
        if self.rollout_error_tolerance is not None:
            rollout = rollout.with_strategy(rollout_strategy_from_config(self.rollout_error_tolerance))
        return rollout

    def effective_termination(self) -> TerminationRewardPolicy | None:
        """The reward policy for rollouts that hit a limit."""
        return self.effective_rollout().termination

    def effective_rollout_strategy(self) -> RolloutStrategy:
        """How to handle failed rollouts."""
        return self.effective_rollout().effective_strategy()


@chz.chz(typecheck=True)
class SamplingConfig(LongestReply, SamplingOptions, RunConfig, max_tokens=REQUIRED):
    """A run that trains on tokens the policy sampled."""

    DOCS = docs(max_tokens="longest completion of one turn")


@chz.chz(typecheck=True)
class Config(RLData, Epochs, RLOptions, SamplingConfig, on_zero_advantages="skip"):
    """A reinforcement learning run. Synchronous, unless `stream_minibatch_config` or `async_config` is given."""

    DOCS = docs(num_epochs="passes over the dataset's batches; max_steps may end the run earlier")

    def training_loss_fn(self) -> str | Callable[..., Any]:
        """The loss of the run: that of `async_config`, if there is one."""
        return self.loss_fn if self.async_config is None else self.async_config.loss_fn or STABLE_REINFORCE

    def records_stability_info(self) -> bool:
        """Whether samples are recorded for the loss, because it needs their provenance."""
        return needs_provenance(self.training_loss_fn(), self.loss_fn_config)


@cache
def _warn_of_fewer_tokens(top_k: int, top_p: float, min_p: float) -> None:
    """Warn once per process: recipes check a config before they open its folder, and the loop checks it again."""
    logger.warning(
        "top_k=%d, top_p=%g, min_p=%g: rollouts are drawn from fewer tokens than their logprobs are taken over, so that "
        "training is off-distribution and no ratio shows it; leave them out, unless you study that",
        top_k,
        top_p,
        min_p,
    )


def check_config(config: Config) -> None:
    """Check everything that can be checked without loading a model. Raises ConfigurationError naming the fix."""
    backend = config.check_setup()
    check_loss(config.training_loss_fn(), config.loss_fn_config, backend)
    if config.monitors or config.monitor_judge != MonitorJudgeConfig():
        config.check_monitors(config.backend, config.base_url)
    _check_async_loss(config)
    warn_if_low(config.learning_rate, config.model_name)
    _check_temperature(config, backend)
    local_sampling.check_min_p(config.min_p, backend)
    if config.top_k != -1 or config.top_p < 1 or config.min_p > 0:
        _warn_of_fewer_tokens(config.top_k, config.top_p, config.min_p)
    _check_set_once(config)
    _check_signal(config, backend)
    if config.stream_minibatch_config is not None:
        if config.async_config is not None:
            raise ConfigurationError("async_config and stream_minibatch_config are both set; use one of them")
        if config.advantage.scale == "token":
            raise ConfigurationError(
                "advantage.scale=token divides by the tokens of the whole batch, which a stream does not know when it trains "
                "on the first groups; use scale=sequence or sum, or leave stream_minibatch_config out"
            )
        if config.advantage.baseline == "gdpo":
            raise ConfigurationError(
                "advantage.baseline=gdpo divides by the deviation of a whole batch, which a stream does not know when it trains "
                "on the first groups; use baseline=zscore, or leave stream_minibatch_config out"
            )
        if config.off_policy_correction is not None:
            raise ConfigurationError("off_policy_correction has nothing to correct in a stream, which is on-policy")
    if not 0 <= config.kl_discount_factor <= 1:
        raise ConfigurationError(f"kl_discount_factor={config.kl_discount_factor}: must be between 0 and 1")
    if config.kl_penalty_coef == 0 and (config.kl_reference_config is not None or config.kl_discount_factor > 0):
        raise ConfigurationError("kl_reference_config and kl_discount_factor need kl_penalty_coef > 0")
    if config.kl_reference_config is not None:
        if config.dataset_builder.needs_starting_policy:
            raise ConfigurationError(
                "kl_reference_config names another reference than the policy the run started from, which the opponents are; "
                "leave it out, or choose other opponents"
            )
        config.kl_reference_config.check("kl_reference_config", config.backend, config.base_url)
    if config.off_policy_correction is None:
        return
    if config.training_loss_fn() not in LOSS_FNS:
        raise ConfigurationError(
            "off_policy_correction needs a built-in loss; a custom loss sees both logprobs and can weight them itself"
        )
    if config.records_stability_info():
        raise ConfigurationError(
            f"loss_fn={STABLE_REINFORCE} weights tokens by their ratio itself; leave off_policy_correction out, or use ppo"
        )
    if config.training_loss_fn() == "dro":
        raise ConfigurationError(
            "loss_fn=dro pulls towards the policy that sampled, which off_policy_correction replaces by the trainer's; "
            "leave off_policy_correction out, or use another loss"
        )


def _check_async_loss(config: Config) -> None:
    """Raise ConfigurationError for two losses, and for settings that stable_reinforce does not support. Warn of an
    unbounded loss.
    """
    loss, ahead = config.training_loss_fn(), config.async_config
    default = default_of(chz.chz_fields(Config)["loss_fn"])
    if ahead is not None and config.loss_fn not in (default, loss):
        raise ConfigurationError(
            f"loss_fn={config.loss_fn} and async_config.loss_fn={loss} differ; a run that samples ahead trains with "
            "async_config.loss_fn, so set it there"
        )
    check_discount(loss, config.kl_discount_factor)
    most_ahead = 0 if ahead is None else ahead.max_steps_off_policy
    needs_known = [key for key in ("verify_provenance", ROUTE_REPLAY) if (config.loss_fn_config or {}).get(key)]
    if most_ahead > 0 and needs_known:
        raise ConfigurationError(
            f"loss_fn_config {needs_known[0]}=1 rejects samples of an earlier process, which a resumed run with "
            "async_config.max_steps_off_policy > 0 trains on; leave it out"
        )
    if most_ahead > 0 and loss in ("importance_sampling", "cispo") and config.off_policy_correction is None:
        logger.warning(
            "loss_fn=%s keeps on pushing tokens that have already become much less likely, and may become unstable on samples "
            "that are up to %d batches old; %s or a clipped loss (ppo) is made for them",
            loss,
            most_ahead,
            STABLE_REINFORCE,
        )


def _check_signal(config: Config, backend: str) -> None:
    """Raise ConfigurationError for settings of groups, rewards and entropy that do not go together."""
    if config.top_entropy_share < 1:
        loss = config.training_loss_fn()
        if backend != "local":
            raise ConfigurationError(
                f"top_entropy_share={config.top_entropy_share} needs the entropy of whole distributions, which only the local "
                f"engine returns, not backend={backend}; leave it out"
            )
        if config.stream_minibatch_config is not None or loss not in LOSS_FNS or loss == "dro":
            raise ConfigurationError(
                "top_entropy_share sets advantages of a whole batch to 0: a stream has no whole batch, a custom loss may not use "
                "advantages, and dro trains without them; leave one of them out"
            )
    if config.overlong is not None:
        config.overlong.check(config.max_tokens)
    if config.advantage.baseline == "gdpo" and not config.advantage.parts:
        raise ConfigurationError(
            "advantage.baseline=gdpo needs advantage.parts, metrics that are rewards and their weights: advantage.parts.correct=1"
        )
    if config.overlong is not None and config.overlong.penalty_tokens > 0:
        _check_penalty(config.advantage)
    if config.replace_constant_groups and config.advantage.credit == "turn":
        raise ConfigurationError(
            "replace_constant_groups compares total rewards, and with advantage.credit=turn equal totals may be sums of "
            "different turns; leave one of them out"
        )


def _check_penalty(advantage: AdvantageConfig) -> None:
    """Raise ConfigurationError for advantages that do not read a penalty in the total reward."""
    if advantage.baseline == "gdpo" and OVERLONG_METRIC_KEY not in (advantage.parts or {}):
        raise ConfigurationError(
            f"overlong.penalty_tokens changes the total reward, which advantage.baseline=gdpo does not read; add "
            f"advantage.parts.{OVERLONG_METRIC_KEY}=1, or leave one of them out"
        )
    if advantage.baseline == "maxrl":
        raise ConfigurationError(
            "overlong.penalty_tokens makes rewards other than 0 and 1, which advantage.baseline=maxrl does not take; use "
            "overlong.mask=True, or another baseline"
        )


def _check_set_once(config: Config) -> None:
    if config.rollout is None:
        return
    for name, parts in (("termination", ["termination"]), ("rollout_error_tolerance", ["retries", "strategy"])):
        for part in parts:
            if getattr(config, name) is not None and getattr(config.rollout, part) is not None:
                raise ConfigurationError(f"{name} and rollout.{part} are both set; use one of them")


def _check_temperature(config: Config, backend: str) -> None:
    trainer_temperature = (config.loss_fn_config or {}).get("temperature", 1.0)
    if trainer_temperature != config.temperature:
        fix = (
            f"set loss_fn_config={{'temperature': {config.temperature}}}"
            if backend == "local" and config.training_loss_fn() in LOSS_FNS
            else "the hosted trainer, and a custom loss, score at temperature 1: set temperature=1.0"
        )
        raise ConfigurationError(
            f"temperature={config.temperature} samples on another distribution than "
            f"loss_fn_config temperature={trainer_temperature} scores on, which biases every ratio; {fix}"
        )
    if config.temperature != 1.0 and (config.kl_penalty_coef > 0 or config.compute_post_kl):
        raise ConfigurationError(
            f"temperature={config.temperature}: kl_penalty_coef and compute_post_kl compare sampled logprobs with those of "
            "another policy at temperature 1; set temperature=1.0, or leave them out"
        )
