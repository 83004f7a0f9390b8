"""Environments over messages, and the adapter to a policy over tokens.

EnvFromMessageEnv parses the policy's replies, renders the env's answers, and handles replies that are truncated, lack
a stop token, or fill the context. A message env handles unparsable tool calls itself. Sampled ids stay unchanged in
every later prompt (`continue_prompt`), so a whole episode is one datum if the renderer has the extension property.
"""

from __future__ import annotations

import copy
import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from tinker_cookbook.completers import StopCondition
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Message, ParseFailureKind, ParseTermination, Renderer
from tinker_cookbook.renderers.decoding import decode_tokens, encode_text
from tinker_cookbook.renderers.renderer import merge_text_chunks, text_chunk
from tinker_cookbook.renderers.replies import strip_stop
from tinker_cookbook.rl.rollout_limits import ParseErrorPolicy, RolloutLimits, ToolErrors, ToolExecution
from tinker_cookbook.rl.rollout_runner import MissingSeamError, require_method
from tinker_cookbook.rl.shared_prompt import SharedPrompt
from tinker_cookbook.rl.types import (
    PARSE_ERROR_MASKED_METRIC_KEY,
    STOP_METRIC_PREFIX,
    Action,
    ActionExtra,
    Env,
    InitialObservationOverflow,
    Logs,
    Metrics,
    StepResult,
    StopReason,
)
from tinker_cookbook.utils.lazy import tinker

logger = logging.getLogger(__name__)

MOST_UNREADABLE = 16
"""Consecutive truncated replies to one prompt after which an episode always ends."""


@dataclass
class MessageStepResult:
    """Result of one reply. `next_messages` is the whole conversation so far, including the reply."""

    reward: float
    episode_done: bool
    next_messages: list[Message]
    metrics: Metrics = field(default_factory=Metrics)
    logs: Logs = field(default_factory=Logs)
    next_stop_condition: StopCondition | None = None
    """stop sequences of the next reply; None: the renderer's"""


class MessageEnv(ABC):
    """One episode's environment over messages; used once, never reset.

    An env stores its own conversation. As long as it only appends to it (including the unchanged reply), prompts
    extend each other token for token; if an env rewrites earlier messages, its prompts are rendered again from
    scratch.
    """

    @abstractmethod
    async def initial_observation(self) -> list[Message]:
        """The conversation that the policy continues."""

    @abstractmethod
    async def step(self, message: Message) -> MessageStepResult:
        """Take the policy's complete reply. Tool calls that cannot be parsed are in its `unparsed_tool_calls`."""

    def describe(self) -> dict[str, Any]:
        """Data about the episode for records and monitors, in addition to its turns; empty by default."""
        return {}

    async def observe_truncated_response(self, message: Message) -> list[Message] | None:
        """Take a truncated reply (terminate_on_length=False).

        Returns:
            The conversation to continue, or None (the default) to end the episode.
        """
        return None

    async def add_messages(self, messages: list[Message]) -> list[Message] | None:
        """Append messages from elsewhere (a hook, or the answer to a reply that could not be parsed).

        Returns:
            The whole conversation, or None (the default) if this env does not take such messages.
        """
        return None


@dataclass(frozen=True)
class _Turn:
    """The last reply: its prompt, its ids, and the conversation up to and including it."""

    prompt: tinker.ModelInput
    action: list[int]
    conversation: list[Message]


@dataclass(eq=False)
class EnvFromMessageEnv(Env):
    """Adapts a MessageEnv to a policy over tokens.

    The metrics `parse_error`, `max_tokens_reached` and `context_overflow` are 1 on the turn where that happened.

    Args:
        failed_parse_reward: reward of a reply without its end (malformed as a whole). Ignored with a
            `parse_error_policy`.
        terminate_on_parse_error: such a reply ends the episode. If False, the env does not see the reply, and the
            policy samples again from the same prompt, up to MOST_UNREADABLE times in a row (a greedy policy would
            repeat itself forever). Ignored with a `parse_error_policy`.
        max_trajectory_tokens: longest prompt plus `max_generation_tokens`. A first prompt beyond it is an
            InitialObservationOverflow with stop reason max_tokens; a later one ends the episode, and
            `context_overflow_reward` replaces the reward of the turn that led there.
        max_generation_tokens: tokens to reserve for the next reply; None reserves none.
        terminate_on_length: a truncated reply ends the episode with `context_overflow_reward`. If False, the env may
            continue (`observe_truncated_response`), or end the episode anyway.
        parse_error_policy: the reward of a reply without its end, and, for a message env that parses tool calls
            (`set_parse_error_policy`), how to handle calls that cannot be parsed.
        rollout_limits: default limits for `run_rollout`, which enforces them unless it gets others.
    """

    renderer: Renderer
    message_env: MessageEnv
    failed_parse_reward: float = -1.0
    terminate_on_parse_error: bool = True
    max_trajectory_tokens: int | None = None
    max_generation_tokens: int | None = None
    context_overflow_reward: float = -0.1
    terminate_on_length: bool = True
    parse_error_policy: ParseErrorPolicy | None = None
    rollout_limits: RolloutLimits | None = None

    def __post_init__(self) -> None:
        for name in ("max_trajectory_tokens", "max_generation_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigurationError(f"{name}={value}: must be at least 1, or None for no limit")
        if self.max_trajectory_tokens is not None and (self.max_generation_tokens or 0) >= self.max_trajectory_tokens:
            raise ConfigurationError(
                f"max_generation_tokens={self.max_generation_tokens} leaves no room for a prompt in "
                f"max_trajectory_tokens={self.max_trajectory_tokens}; lower it"
            )
        self._conversation: list[Message] = []
        self._prompt = tinker.ModelInput.empty()
        self._stop: StopCondition = self.renderer.get_stop_sequences()
        self._last: _Turn | None = None
        self._unreadable = 0
        if self.parse_error_policy is not None:
            self.set_parse_error_policy(self.parse_error_policy)
        self.shared_prompt = SharedPrompt()
        """Renders the first prompt. Members of a group share one."""

    @property
    def conversation(self) -> list[Message]:
        """A copy of the conversation that the env last returned."""
        return copy.deepcopy(self._conversation)

    def set_parse_error_policy(self, policy: ParseErrorPolicy) -> None:
        """For `run_rollout`: replace the env's parse error policy, and pass it to the message env."""
        self.parse_error_policy = policy
        set_policy = getattr(self.message_env, "set_parse_error_policy", None)
        if set_policy is not None:
            set_policy(policy)
        elif policy.max_consecutive > 0:
            logger.warning(
                "ParseErrorPolicy.max_consecutive=%d: %s reads no tool calls (it has no set_parse_error_policy), so none is "
                "answered; the policy holds for replies without their end",
                policy.max_consecutive,
                type(self.message_env).__name__,
            )

    def set_max_tool_calls(self, max_tool_calls: int) -> None:
        """Called by `run_rollout`, as are the next two; passed to the message env. Raises ConfigurationError if it has no
        tools.
        """
        require_method(self.message_env, "set_max_tool_calls", f"max_tool_calls={max_tool_calls}")(max_tool_calls)

    def set_tool_execution(self, tool_execution: ToolExecution) -> None:
        require_method(self.message_env, "set_tool_execution", f"tool_execution={tool_execution}")(tool_execution)

    def set_tool_errors(self, tool_errors: ToolErrors) -> None:
        require_method(self.message_env, "set_tool_errors", f"tool_errors={tool_errors}")(tool_errors)

    async def initial_observation(self) -> tuple[tinker.ModelInput, StopCondition] | InitialObservationOverflow:
        self._show(await self.message_env.initial_observation())
        if not self._overflows():
            return self._prompt, self._stop
        detail = (
            f"the first prompt ({self._prompt.length} tokens) with max_generation_tokens={self.max_generation_tokens} is too "
            f"long for the model's context window, max_trajectory_tokens={self.max_trajectory_tokens}"
        )
        metrics = _flagged("max_tokens_reached", StopReason.MAX_TOKENS)
        return InitialObservationOverflow(
            self.context_overflow_reward, metrics, {"initial_observation_overflow": detail}
        )

    async def inject_messages(self, messages: list[Message]) -> tuple[tinker.ModelInput, StopCondition]:
        """For the hooks of `run_rollout`: add messages to the conversation before the next reply.

        Raises:
            MissingSeamError: the message env takes none.
        """
        conversation = await self.message_env.add_messages(messages)
        if conversation is None:
            raise MissingSeamError(
                f"{type(self.message_env).__name__} does not support message injection, which the hook on_turn_begin needs; "
                "override its add_messages"
            )
        self._show(conversation)
        return self._prompt, self._stop

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        cut_off = (extra or {}).get("stop_reason") == "length"
        if cut_off and self.terminate_on_length:
            return self._cut_off()
        message, termination = self.renderer.parse_response(action)
        if not cut_off and not termination.is_clean:
            return self._without_end(termination)
        self._unreadable = 0
        self._last = _Turn(self._prompt, list(action), [*self._conversation, copy.deepcopy(message)])
        if not cut_off:
            return await self._step_env(message)
        going_on = await self.message_env.observe_truncated_response(message)
        return self._cut_off() if going_on is None else self._go_on(going_on, 0.0, {})

    async def _step_env(self, message: Message) -> StepResult:
        result = await self.message_env.step(message)
        if result.episode_done:
            self._show(result.next_messages)
            return StepResult(result.reward, True, self._prompt, self._stop, result.metrics, result.logs)
        return self._go_on(result.next_messages, result.reward, result.metrics, result.logs, result.next_stop_condition)

    def _cut_off(self) -> StepResult:
        return self._end(self.context_overflow_reward, _flagged("max_tokens_reached", StopReason.MAX_TOKENS))

    def _without_end(self, termination: ParseTermination) -> StepResult:
        policy = self.parse_error_policy
        self._unreadable += 1
        if policy is None and not self.terminate_on_parse_error and self._unreadable < MOST_UNREADABLE:
            return StepResult(self.failed_parse_reward, False, self._prompt, self._stop, {"parse_error": 1.0})
        metrics = _flagged("parse_error", StopReason.PARSE_ERROR)
        if policy is None:
            return self._end(self.failed_parse_reward, metrics)
        if policy.mask_error_turns:
            metrics[PARSE_ERROR_MASKED_METRIC_KEY] = 1.0
        detail = f"the reply has no end that the renderer knows ({termination}), so that nothing can follow it"
        return self._end(
            policy.terminal_reward,
            metrics,
            {"parse_failure_kind": ParseFailureKind.STRUCTURAL.value, "parse_failure_detail": detail},
        )

    def _go_on(
        self,
        messages: list[Message],
        reward: float,
        metrics: Metrics,
        logs: Logs | None = None,
        stop: StopCondition | None = None,
    ) -> StepResult:
        self._show(messages, stop)
        if self._overflows():
            metrics = metrics | _flagged("context_overflow", StopReason.CONTEXT_OVERFLOW)
            return self._end(self.context_overflow_reward, metrics, logs)
        return StepResult(reward, False, self._prompt, self._stop, metrics, logs or {})

    def _end(self, reward: float, metrics: Metrics, logs: Logs | None = None) -> StepResult:
        return StepResult(reward, True, tinker.ModelInput.empty(), self._stop, metrics, logs or {})

    def _show(self, messages: list[Message], stop: StopCondition | None = None) -> None:
        """Make `messages` the conversation and render it, incrementally from the last reply if possible."""
        prompt = None
        if self._last is not None:
            seen = len(self._last.conversation)
            if messages[:seen] == self._last.conversation:
                reply = self._last.conversation[-1]
                prompt = continue_prompt(self.renderer, self._last.prompt, self._last.action, reply, messages[seen:])
        elif not self._conversation:
            prompt = self.shared_prompt.render(self.renderer, messages)
        self._prompt = prompt if prompt is not None else self.renderer.build_generation_prompt(messages)
        self._conversation = copy.deepcopy(messages)
        self._stop = stop if stop is not None else self.renderer.get_stop_sequences()

    def _overflows(self) -> bool:
        limit = self.max_trajectory_tokens
        return limit is not None and self._prompt.length + (self.max_generation_tokens or 0) > limit


def _flagged(flag: str, reason: StopReason) -> Metrics:
    """Metrics of a turn that ended the episode."""
    return {flag: 1.0, STOP_METRIC_PREFIX + reason.value: 1.0}


def continue_prompt(
    renderer: Renderer, prompt: tinker.ModelInput, response: list[int], reply: Message, following: list[Message]
) -> tinker.ModelInput | None:
    """prompt + response verbatim + (end of turn, if the response lacks one) + `following` + the assistant's header.

    prompt: the prompt that the response was sampled from.
    response: sampled ids, including the stop token if there was one.
    reply: the parsed response; only its tool calls matter, because a tool's result may name its call.
    following: messages after the reply, which the model has not seen.

    Returns:
        None when the format cannot be continued this way: the renderer lacks the extension property, or the following
        messages do not begin with what ended the response (role_colon, where only a user may follow). Then render the
        whole prompt again.
    """
    if getattr(renderer, "has_extension_property", False) is not True:  # a custom renderer may lack it
        return None
    stand_in: Message = {"role": "assistant", "content": "."}
    if calls := reply.get("tool_calls"):
        stand_in["tool_calls"] = calls
    before: list[Message] = [{"role": "user", "content": "."}, stand_in]
    spoken = renderer.build_supervised_example(before)[0].to_ints()
    first, *rest = renderer.build_generation_prompt([*before, *following]).chunks
    if not isinstance(first, tinker.EncodedTextChunk) or list(first.tokens[: len(spoken)]) != spoken:
        return None
    stopped = len(strip_stop(renderer, response)) < len(response)
    closing = [] if stopped else _stop_tokens(renderer, spoken)
    delta = text_chunk([*response, *closing, *first.tokens[len(spoken) :]])
    return tinker.ModelInput(chunks=merge_text_chunks([*prompt.chunks, *([delta] if delta else []), *rest]))


def _stop_tokens(renderer: Renderer, spoken: list[int]) -> list[int]:
    """The tokens in which the format writes the stop at the end of a rendered turn."""
    for stop in renderer.get_stop_sequences():
        if isinstance(stop, int):
            if spoken[-1] == stop:
                return [stop]
            continue
        for length in range(1, len(spoken) + 1):
            text = decode_tokens(renderer.tokenizer, spoken[-length:])
            if text == stop:
                return spoken[-length:]
            if len(text) > len(stop):
                # A token spans the text and the stop, so the turn's tokens cannot be split there.
                return encode_text(renderer.tokenizer, stop)
    raise ValueError(f"renderer {type(renderer).__name__} does not end a turn with one of its stop sequences")
