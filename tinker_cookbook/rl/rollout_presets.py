"""Rollout settings as one object, and two presets that most runs start from."""

from collections.abc import Callable

import chz

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl.rollout_limits import (
    ParseErrorPolicy,
    RolloutLimits,
    Termination,
    TerminationRewardPolicy,
    ToolErrors,
    ToolExecution,
    not_negative,
)
from tinker_cookbook.rl.rollout_runner import RolloutHooks
from tinker_cookbook.rl.rollout_strategy import FailFast, MinViableGroup, RetryOnFailure, RolloutStrategy
from tinker_cookbook.utils.fields import FieldGroup


@chz.chz(typecheck=True)
class RolloutConfig(Termination):
    """How rollouts are run, in a training run and its evaluations (`rl.train.Config.rollout`) or in one group."""

    limits: RolloutLimits = chz.field(
        default_factory=RolloutLimits, doc="limits of a rollout; if none is set, those of the env, if any"
    )
    parse_errors: ParseErrorPolicy | None = chz.field(
        default=None, doc="how to handle replies that cannot be parsed; None: as the env does"
    )
    tool_execution: ToolExecution = chz.field(
        default="parallel",
        doc="sequential: the tool calls of one reply run one after the other; parallel: concurrently, unless the env sets it",
    )
    tool_errors: ToolErrors | None = chz.field(
        default=None,
        doc="a tool call that cannot be parsed, or an exception inside a tool: answer tells the model, end ends the episode, "
        "raise the run; None: the env's setting (answer)",
    )
    reward_threads: int = chz.field(
        default=0,
        doc="threads in which reward functions, graders, judges and the `step` of episodes run where they are not `async "
        "def`, so that a blocking one delays nothing else; 0: in the event loop, where runs repeat bit for bit",
        validator=not_negative,
    )
    hooks: Callable[[], RolloutHooks] | None = chz.field(
        default=None, doc="the callbacks of rollouts: a subclass of RolloutHooks, instantiated for each; None: none"
    )
    retries: int | None = chz.field(
        default=None,
        doc="rerun a failed rollout up to this many times, then leave its group out; None: a failure ends the run",
        validator=not_negative,
    )
    strategy: RolloutStrategy | None = chz.field(
        default=None, doc="how a failed rollout is handled, if `retries` is not enough"
    )

    @chz.validate
    def _one_way(self) -> None:
        if self.retries is not None and self.strategy is not None:
            raise ConfigurationError(f"retries={self.retries} and strategy={self.strategy}: give one of the two")

    def with_strategy(self, strategy: RolloutStrategy | None) -> "RolloutConfig":
        """A copy with another strategy; None: unchanged."""
        if strategy is None:
            return self
        return chz.replace(self, strategy=strategy, retries=None)  # pyright: ignore[reportUnknownMemberType]

    def effective_strategy(self) -> RolloutStrategy:
        """The strategy set by `retries` or `strategy`; FailFast if neither is given."""
        if self.strategy is not None:
            return self.strategy
        return FailFast() if self.retries is None else RetryOnFailure(max_retries=self.retries)


def simple() -> RolloutConfig:
    """No limits, unchanged rewards: for single-turn tasks."""
    return RolloutConfig()


def agentic() -> RolloutConfig:
    """For tools and many turns: everything has a limit, two unparsable tool calls in a row are answered, and hitting a
    limit never pays.
    """
    return RolloutConfig(
        limits=RolloutLimits(max_turns=10, max_trajectory_tokens=65536, max_tool_calls=30),
        parse_errors=ParseErrorPolicy(max_consecutive=2),
        termination=TerminationRewardPolicy(
            zero_reward_on_limit=True, skip_grading_on_timeout=True, grader_timeout_seconds=900.0
        ),
        tool_execution="sequential",
    )


def default_rollout_config_for_model(model_name: str) -> RolloutConfig:
    """Default of an env that knows its model but has no settings: `agentic` for Inkling models, `simple` for others."""
    return agentic() if _made_for_agents(model_name) else simple()


def default_rollout_strategy_for_model(model_name: str) -> RolloutStrategy:
    """Default strategy for failing rollouts: MinViableGroup for Inkling models, FailFast for others."""
    return MinViableGroup() if _made_for_agents(model_name) else FailFast()


def _made_for_agents(model_name: str) -> bool:
    """Inkling is a model for multi-turn tool use; match each of its names (sizes, and ":peft:" for long contexts)."""
    return model_name.startswith("thinkingmachines/Inkling")


@chz.chz(typecheck=True)
class RolloutKey(FieldGroup):
    """How rollouts are run."""

    rollout: RolloutConfig | None = chz.field(
        default=None, doc="how rollouts are run, in training and in evaluations; None: the environments' defaults"
    )
