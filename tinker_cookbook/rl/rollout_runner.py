"""One rollout: a policy acts in an env until the env, a limit or a hook ends the episode.

Before each turn, in this order: check the rollout's time and `max_turns`; call `hooks.on_turn_begin`, and let the env
add its messages to the prompt; check the token budgets, starting with `max_trajectory_tokens`. A budget that leaves at
most 1 token ends the rollout. The policy may then sample up to the tightest budget, and at most `max_turn_tokens`.

A rollout that a limit ends is kept unfinished, without the env's grade. Only a sampling call that takes too long is an
error: it leaves no turn to keep, and a strategy (`rollout_strategy`) may try again. `Trajectory.stop_reason` says how
a rollout ended, and so does one metric stop/<reason> of its last transition.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from tinker_cookbook.completers import StopCondition, TokenCompleter, TokensWithLogprobs
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError, RolloutTimeoutError
from tinker_cookbook.renderers import Message
from tinker_cookbook.rl.rollout_limits import ParseErrorPolicy, RolloutLimits
from tinker_cookbook.rl.types import (
    STOP_METRIC_PREFIX,
    Action,
    ActionExtra,
    Env,
    InitialObservationOverflow,
    Logs,
    Metrics,
    StepResult,
    StopReason,
    Trajectory,
    Transition,
)
from tinker_cookbook.utils import logtree
from tinker_cookbook.utils.lazy import tinker
from tinker_cookbook.utils.trace import scope_span_sync

if TYPE_CHECKING:
    from tinker_cookbook.rl.rollout_presets import RolloutConfig

TRUNCATION_METRIC_KEY = "num_truncations_max_turn_tokens"
"""On the last transition: the number of replies that were cut off without ending the rollout; absent if none was."""


class MissingSeamError(ConfigurationError, TypeError):
    """A setting or a hook needs a method that the env does not have."""


class SamplingTurnTimeoutError(RolloutTimeoutError):
    """One sampling call took longer than `sampling_turn_timeout_seconds`."""


@dataclass(frozen=True)
class RolloutState:
    """Progress of a rollout. `transitions` is the live list: do not modify it."""

    turn_index: int
    """turns recorded so far"""
    observation_tokens: int
    """length of the next prompt"""
    sampled_tokens: int
    num_length_truncations: int
    """replies that were cut off without ending the rollout"""
    elapsed_seconds: float
    transitions: list[Transition]


class RolloutHooks:
    """Callbacks into a rollout, all no-ops by default. Set them for a whole run with `RolloutConfig.hooks`."""

    async def on_turn_begin(self, state: RolloutState) -> list[Message] | None:
        """Return messages to add to the conversation before this turn.

        The env must have `async inject_messages(messages)`, which returns the new prompt and its stop condition.
        """
        return None

    async def on_stop_reason(self, reason: str, state: RolloutState) -> str | None:
        """Return the reason to record, or None to continue.

        Called when the env ends the episode, and between turns when `max_turns`, a token budget or the rollout's time
        does. Continuing then allows one turn without that limit, from the env's last prompt. Not called for a timeout
        within a turn or a first prompt that is too long: these cannot be undone.
        """
        return reason

    async def on_grade(self, state: RolloutState) -> None:
        """Called after the env ended, and so graded, the episode. Not called when a limit ended the rollout."""

    async def on_artifacts(self, state: RolloutState) -> None:
        """Called last, before the trajectory is returned, for any stop reason. Not called when the rollout fails."""


class SupportsToolCallLimit(Protocol):
    """An env that counts tool calls; its limit is set once, before the first observation."""

    def set_max_tool_calls(self, max_tool_calls: int) -> None: ...


class SupportsParseErrorPolicy(Protocol):
    """An env that parses replies; its policy is set once, before the first observation."""

    def set_parse_error_policy(self, policy: ParseErrorPolicy) -> None: ...


def stop_reason_from_metrics(metrics: Metrics) -> str | None:
    """The <reason> of the first metric stop/<reason>; None if there is none."""
    reasons = (key.removeprefix(STOP_METRIC_PREFIX) for key in metrics if key.startswith(STOP_METRIC_PREFIX))
    return next(reasons, None)


def _without_stop(metrics: Metrics) -> Metrics:
    return {key: value for key, value in metrics.items() if not key.startswith(STOP_METRIC_PREFIX)}


@asynccontextmanager
async def time_limit(seconds: float | None, late: Callable[[], Exception]) -> AsyncGenerator[None]:
    """Raise `late()` if the body takes longer than the limit; None: no limit. A TimeoutError raised by the body passes
    through.
    """
    timer = asyncio.timeout(seconds)
    try:
        async with timer:
            yield
    except TimeoutError as error:
        if not timer.expired():
            raise
        raise late() from error


async def call_policy(
    policy: TokenCompleter, prompt: tinker.ModelInput, stop: StopCondition, max_tokens: int | None
) -> TokensWithLogprobs:
    """Sample one completion. A completer need not accept `max_tokens` if no token limit is set."""
    return await policy(prompt, stop, **({} if max_tokens is None else {"max_tokens": max_tokens}))


async def run_rollout(
    policy: TokenCompleter,
    env: Env,
    *,
    limits: RolloutLimits | None = None,
    hooks: RolloutHooks | None = None,
    parse_errors: ParseErrorPolicy | None = None,
    config: RolloutConfig | None = None,
) -> Trajectory:
    """Run one episode of `env`, which must be fresh.

    Args:
        limits, hooks, parse_errors: None uses those of `config`, or, if there are none, the env's.
        config: settings of a run's rollouts. `rollouts.do_group_rollout` applies the settings of groups.

    Returns:
        A trajectory of at least one transition. One that ended before its first turn (prompt too long, no budget, no time)
        has a single empty one: it counts in its group's baseline and yields no data.

    Raises:
        MissingSeamError: `max_tool_calls`, `parse_errors`, sequential tool calls or a hook's messages are used with an
            env that does not support them.
        SamplingTurnTimeoutError: a sampling call took longer than its limit.
    """
    if config is not None:
        limits = limits if limits is not None or config.limits == RolloutLimits() else config.limits
        parse_errors = parse_errors if parse_errors is not None else config.parse_errors
        hooks = hooks if hooks is not None or config.hooks is None else config.hooks()
    if limits is None:
        offered: RolloutLimits | None = getattr(env, "rollout_limits", None)
        limits = offered or RolloutLimits()
    if limits.max_tool_calls is not None:
        require_method(env, "set_max_tool_calls", f"max_tool_calls={limits.max_tool_calls}")(limits.max_tool_calls)
    if parse_errors is not None:
        require_method(env, "set_parse_error_policy", "parse_errors")(parse_errors)
    if config is not None and config.tool_execution == "sequential":
        require_method(env, "set_tool_execution", "tool_execution=sequential")("sequential")
    if config is not None and config.tool_errors is not None:
        require_method(env, "set_tool_errors", f"tool_errors={config.tool_errors}")(config.tool_errors)
    return await _Rollout(policy, env, limits, hooks or RolloutHooks()).run()


def require_method(env: object, method: str, wanted_by: str) -> Any:
    """An optional method of an env or a message env. Raises MissingSeamError when a setting needs it and this env lacks it."""
    attribute = getattr(env, method, None)
    if attribute is None:
        raise MissingSeamError(
            f"{wanted_by}: {type(env).__name__} has no method {method} and so cannot do this; use EnvFromMessageEnv (and "
            "AgentToolMessageEnv for tools), add the method, or leave the setting out"
        )
    return attribute


@lru_cache(maxsize=256)
def _takes_extra(env_class: type[Env]) -> bool:
    parameters = inspect.signature(env_class.step).parameters.values()  # once per class, not by catching a TypeError
    return any(parameter.name == "extra" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


async def step_env(env: Env, action: Action, extra: ActionExtra | None) -> StepResult:
    """Call `env.step`. If the class declares `step(self, action)`, as the cookbook's first envs did, `extra` is not
    passed.
    """
    if _takes_extra(type(env)):
        return await env.step(action, extra=extra)
    return await env.step(action)


class _Rollout:
    """The state of one rollout. Used once, like the env."""

    def __init__(self, policy: TokenCompleter, env: Env, limits: RolloutLimits, hooks: RolloutHooks):
        self.policy, self.env, self.limits, self.hooks = policy, env, limits, hooks
        self.transitions: list[Transition] = []
        self.observation = tinker.ModelInput.empty()
        self.stop: StopCondition = []
        self.sampled_tokens = 0
        self.truncations = 0
        self.reason = ""
        self.notes = logtree.Node("section")
        self.clock = asyncio.get_running_loop().time
        self.started = self.clock()

    async def run(self) -> Trajectory:
        try:
            return await self._run()
        finally:
            rollout_ended = getattr(self.env, "rollout_ended", None)
            if rollout_ended is not None:
                rollout_ended()

    async def _run(self) -> Trajectory:
        timer = asyncio.timeout(self.limits.rollout_timeout_seconds)
        with logtree.write_into(self.notes):
            try:
                async with timer:
                    await self._play()
            except TimeoutError:
                if not timer.expired():
                    raise
                self.reason = StopReason.ROLLOUT_TIMEOUT.value
            if not self.transitions:
                self._record_nothing(0.0, {}, {})
            last = self.transitions[-1].metrics
            if self.truncations:
                last[TRUNCATION_METRIC_KEY] = self.truncations
            last[STOP_METRIC_PREFIX + self.reason] = 1
            self.transitions[-1].episode_done = True
            await self.hooks.on_artifacts(self._state())
        self.transitions[-1].notes += self.notes.take()
        return Trajectory(self.transitions, self.observation, stop_reason=self.reason)

    async def _play(self) -> None:
        """Play turns until `reason` is set."""
        with scope_span_sync("env_initial_observation"):
            first = await self.env.initial_observation()
        if isinstance(first, InitialObservationOverflow):
            self._record_nothing(first.reward, _without_stop(first.metrics), first.logs)
            self.reason = stop_reason_from_metrics(first.metrics) or StopReason.CONTEXT_OVERFLOW.value
            return
        self.observation, self.stop = first
        while not self.reason:
            await self._turn()

    async def _turn(self) -> None:
        limits = self.limits
        seconds = limits.rollout_timeout_seconds
        late = (
            seconds is not None and self.clock() - self.started >= seconds
        )  # the env blocked the loop: no timer fired
        if late and await self._ends(StopReason.ROLLOUT_TIMEOUT.value):
            return
        spent = limits.max_turns is not None and len(self.transitions) >= limits.max_turns
        if spent and await self._ends(StopReason.MAX_TURNS.value):
            return
        if messages := await self.hooks.on_turn_begin(self._state()):
            inject = require_method(self.env, "inject_messages", "message injection by on_turn_begin")
            self.observation, self.stop = await inject(messages)
        room = self._room()
        exhausted = [reason for reason, tokens in room.items() if tokens <= 1]  # a single token is not a useful turn
        if exhausted and await self._ends(exhausted[0].value):
            return
        allowed = [tokens for reason, tokens in room.items() if reason not in exhausted]
        if limits.max_turn_tokens is not None:
            allowed.append(limits.max_turn_tokens)
        await self._step(await self._sample(min(allowed, default=None)))

    def _room(self) -> dict[StopReason, int]:
        """Tokens that each cumulative budget leaves for the next reply, in order of precedence."""
        room: dict[StopReason, int] = {}
        if self.limits.max_trajectory_tokens is not None:
            room[StopReason.MAX_TOKENS] = self.limits.max_trajectory_tokens - self.observation.length
        if self.limits.max_sampled_tokens is not None:
            room[StopReason.MAX_SAMPLED_TOKENS] = self.limits.max_sampled_tokens - self.sampled_tokens
        return room

    async def _sample(self, max_tokens: int | None) -> TokensWithLogprobs:
        seconds = self.limits.sampling_turn_timeout_seconds

        def late() -> SamplingTurnTimeoutError:
            return SamplingTurnTimeoutError(
                f"turn {len(self.transitions)} of {type(self.env).__name__}: the policy had not answered a prompt of "
                f"{self.observation.length} tokens after sampling_turn_timeout_seconds={seconds}"
            )

        async with time_limit(seconds, late):
            with scope_span_sync("policy_sample"):
                return await call_policy(self.policy, self.observation, self.stop, max_tokens)

    async def _step(self, action: TokensWithLogprobs) -> None:
        started = time.perf_counter()
        with scope_span_sync("env_step"):
            result = await step_env(self.env, action.tokens, {"stop_reason": action.stop_reason})
        reason = stop_reason_from_metrics(result.metrics)
        metrics = _without_stop(result.metrics)
        transition = Transition(
            self.observation,
            action,
            result.reward,
            result.episode_done,
            metrics,
            result.logs,
            self.notes.take(),
            time.perf_counter() - started,
        )
        self.transitions.append(transition)
        self.sampled_tokens += len(action.tokens)
        following = result.next_observation
        if following is not None and (following.length or not result.episode_done):
            self.observation = following
        if result.next_stop_condition is not None:
            self.stop = result.next_stop_condition
        if result.episode_done:
            if await self._ends(reason or StopReason.COMPLETED.value):
                self.observation = following if following is not None else tinker.ModelInput.empty()
                await self.hooks.on_grade(self._state())
                return
            transition.episode_done = False
        if following is None:
            raise DataValidationError(
                f"{type(self.env).__name__}.step: next_observation is None, but the rollout continues after turn "
                f"{len(self.transitions) - 1}; give the next prompt, or set episode_done=True"
            )
        self.truncations += action.stop_reason == "length"

    async def _ends(self, reason: str) -> bool:
        """Whether the rollout ends here, after asking the hook."""
        self.reason = await self.hooks.on_stop_reason(reason, self._state()) or ""
        return bool(self.reason)

    def _record_nothing(self, reward: float, metrics: Metrics, logs: Logs) -> None:
        nothing = TokensWithLogprobs([], [], "length")
        self.transitions.append(Transition(tinker.ModelInput.empty(), nothing, reward, True, dict(metrics), dict(logs)))

    def _state(self) -> RolloutState:
        return RolloutState(
            turn_index=len(self.transitions),
            observation_tokens=self.observation.length,
            sampled_tokens=self.sampled_tokens,
            num_length_truncations=self.truncations,
            elapsed_seconds=self.clock() - self.started,
            transitions=self.transitions,
        )
