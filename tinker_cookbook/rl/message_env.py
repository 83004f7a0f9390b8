"""Environments that speak in messages, and the adapter that puts them before a policy of tokens.

EnvFromMessageEnv parses what the policy sampled, renders what the env answers, and decides what happens to replies that are
cut off, cannot be read, or fill the context. The ids that the policy sampled stay as they are in every later prompt
(`continue_prompt`), so that a whole episode is one datum where the renderer has the extension property.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from tinker_cookbook.completers import StopCondition
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Message, ParseFailureKind, Renderer, classify_parse_failure
from tinker_cookbook.renderers.decoding import decode_tokens, encode_text
from tinker_cookbook.renderers.renderer import merge_text_chunks, text_chunk
from tinker_cookbook.renderers.replies import strip_stop
from tinker_cookbook.rl.rollout_limits import ParseErrorPolicy, RolloutLimits, ToolErrors, ToolExecution
from tinker_cookbook.rl.rollout_runner import seam
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


@dataclass
class MessageStepResult:
    """What one reply led to. `next_messages` is the whole conversation so far, the reply included."""

    reward: float
    episode_done: bool
    next_messages: list[Message]
    metrics: Metrics = field(default_factory=dict)
    logs: Logs = field(default_factory=dict)
    next_stop_condition: StopCondition | None = None
    """what ends the next reply; None: the renderer's stop sequences"""


class MessageEnv(ABC):
    """One episode's environment over messages; used once, never reset.

    An env keeps its conversation itself. As long as it only appends to it, the reply as it was given included, prompts
    extend each other token for token; an env that rewrites earlier messages has its prompts rendered anew.
    """

    takes_unparsed_calls: bool = False
    """whether `step` takes replies with tool calls that cannot be parsed (`unparsed_tool_calls`), and says so to the model"""

    @abstractmethod
    async def initial_observation(self) -> list[Message]:
        """The conversation that the policy is to go on with."""

    @abstractmethod
    async def step(self, message: Message) -> MessageStepResult:
        """Take the policy's reply."""

    async def observe_truncated_response(self, message: Message) -> list[Message] | None:
        """Take a reply that was cut off, as far as it goes (terminate_on_length=False).

        Returns:
            The conversation to go on with, or None to end the episode, which is the default.
        """
        return None

    async def add_messages(self, messages: list[Message]) -> list[Message] | None:
        """Append messages from elsewhere (a hook, or the answer to a reply that could not be read).

        Returns:
            The whole conversation, or None if this env does not take such messages, which is the default.
        """
        return None


@dataclass(frozen=True)
class _Turn:
    """The last reply: what it answered, its ids, and the conversation up to and including it."""

    prompt: tinker.ModelInput
    action: list[int]
    conversation: list[Message]


@dataclass(eq=False)
class EnvFromMessageEnv(Env):
    """A MessageEnv for a policy over tokens.

    Each transition reports `parse_error`, `max_tokens_reached` and `context_overflow`, 0 or 1.

    Args:
        failed_parse_reward: reward of a reply that cannot be parsed. Unused with a `parse_error_policy`, and for tool calls
            of an env that `takes_unparsed_calls`.
        terminate_on_parse_error: such a reply ends the episode. If False it goes to the env as far as it could be read,
            and `failed_parse_reward` is added to what the env gives. Unused with a `parse_error_policy`.
        max_trajectory_tokens: longest prompt plus `max_generation_tokens`. A first prompt beyond it is an
            InitialObservationOverflow; a later one ends the episode, and `context_overflow_reward` replaces the reward
            of the turn that led there.
        max_generation_tokens: room to keep for the next reply; None keeps none.
        terminate_on_length: a reply that was cut off ends the episode with `context_overflow_reward`. If False the env
            may go on with it (`observe_truncated_response`); one that does not ends all the same.
        parse_error_policy: tool calls that cannot be read are answered with a message, as the policy says.
        rollout_limits: offered to `run_rollout`, which enforces them unless it is given others.
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
        self._errors_in_a_row = 0
        self.shared_prompt = SharedPrompt()
        """Renders the first prompt. Members of a group have one together."""

    @property
    def conversation(self) -> list[Message]:
        """A copy of the conversation as the env last gave it."""
        return copy.deepcopy(self._conversation)

    def set_parse_error_policy(self, policy: ParseErrorPolicy) -> None:
        """For `run_rollout`: takes the place of the policy that the env was made with."""
        self.parse_error_policy = policy

    def set_max_tool_calls(self, max_tool_calls: int) -> None:
        """For `run_rollout`, as the next two: told to the message env. Raises ConfigurationError if it has no tools."""
        seam(self.message_env, "set_max_tool_calls", f"max_tool_calls={max_tool_calls}")(max_tool_calls)

    def set_tool_execution(self, tool_execution: ToolExecution) -> None:
        seam(self.message_env, "set_tool_execution", f"tool_execution={tool_execution}")(tool_execution)

    def set_tool_errors(self, tool_errors: ToolErrors) -> None:
        seam(self.message_env, "set_tool_errors", f"tool_errors={tool_errors}")(tool_errors)

    async def initial_observation(self) -> tuple[tinker.ModelInput, StopCondition] | InitialObservationOverflow:
        self._show(await self.message_env.initial_observation())
        if self._overflows():
            return InitialObservationOverflow(self.context_overflow_reward, self._flags("context_overflow"))
        return self._prompt, self._stop

    async def add_messages(self, messages: list[Message]) -> tuple[tinker.ModelInput, StopCondition]:
        """For the hooks of `run_rollout`: messages into the conversation before the next reply."""
        self._show(await self._added(messages))
        return self._prompt, self._stop

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        message, termination = self.renderer.parse_response(action)
        self._last = _Turn(self._prompt, list(action), [*self._conversation, copy.deepcopy(message)])
        if (extra or {}).get("stop_reason") == "length":
            flags = self._flags("max_tokens_reached")
            cut = None if self.terminate_on_length else await self.message_env.observe_truncated_response(message)
            if cut is None:
                return self._end(self.context_overflow_reward, StopReason.MAX_TOKENS, flags)
            return self._go_on(cut, 0.0, flags)
        failure = classify_parse_failure(message, termination)
        if failure is None:
            self._errors_in_a_row = 0
            return await self._step_env(message, 0.0, self._flags())
        if self.parse_error_policy is not None:
            return await self._answer_error(message, failure, self.parse_error_policy)
        if failure[0] is ParseFailureKind.CONTENT and self.message_env.takes_unparsed_calls:
            return await self._step_env(message, 0.0, self._flags("parse_error"))
        if self.terminate_on_parse_error:
            return self._end(self.failed_parse_reward, StopReason.PARSE_ERROR, self._flags("parse_error"))
        return await self._step_env(message, self.failed_parse_reward, self._flags("parse_error"))

    async def _step_env(self, message: Message, extra_reward: float, flags: Metrics) -> StepResult:
        result = await self.message_env.step(message)
        reward, metrics = result.reward + extra_reward, flags | result.metrics
        if result.episode_done:
            self._show(result.next_messages)
            return StepResult(reward, True, self._prompt, self._stop, metrics, result.logs)
        return self._go_on(result.next_messages, reward, metrics, result.logs, result.next_stop_condition)

    async def _answer_error(
        self, message: Message, failure: tuple[ParseFailureKind, str], policy: ParseErrorPolicy
    ) -> StepResult:
        metrics = self._flags("parse_error")
        if policy.mask_error_turns:
            metrics[PARSE_ERROR_MASKED_METRIC_KEY] = 1
        self._errors_in_a_row += 1
        kind, details = failure
        if kind is ParseFailureKind.STRUCTURAL or self._errors_in_a_row > policy.max_consecutive:
            reward = policy.terminal_reward - policy.penalty_per_error
            return self._end(reward, StopReason.PARSE_ERROR, metrics)
        answer: Message = {"role": "user", "content": policy.retry_message(details.replace("\n", "; "))}
        return self._go_on(await self._added([message, answer]), -policy.penalty_per_error, metrics)

    async def _added(self, messages: list[Message]) -> list[Message]:
        conversation = await self.message_env.add_messages(messages)
        if conversation is None:
            raise ConfigurationError(
                f"{type(self.message_env).__name__} takes no messages from outside, which a ParseErrorPolicy with "
                "max_consecutive > 0 and the hook on_turn_begin need; override its add_messages"
            )
        return conversation

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
            metrics = metrics | {"context_overflow": 1.0}
            return self._end(self.context_overflow_reward, StopReason.CONTEXT_OVERFLOW, metrics, logs)
        return StepResult(reward, False, self._prompt, self._stop, metrics, logs or {})

    def _end(self, reward: float, reason: StopReason, metrics: Metrics, logs: Logs | None = None) -> StepResult:
        metrics = {**metrics, STOP_METRIC_PREFIX + reason.value: 1}
        return StepResult(reward, True, self._prompt, self._stop, metrics, logs or {})

    def _show(self, messages: list[Message], stop: StopCondition | None = None) -> None:
        """Make `messages` the conversation and render it, from the last reply on where that is possible."""
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

    def _flags(self, raised: str | None = None) -> Metrics:
        return {name: float(name == raised) for name in ("parse_error", "max_tokens_reached", "context_overflow")}


def continue_prompt(
    renderer: Renderer, prompt: tinker.ModelInput, response: list[int], reply: Message, following: list[Message]
) -> tinker.ModelInput | None:
    """prompt + response verbatim + (end of turn, if the response lacks one) + `following` + the assistant's header.

    Args:
        prompt: what the response was sampled from.
        response: sampled ids, with the stop that ended them if there was one.
        reply: the response as parsed; only its tool calls matter, because a tool's result may name its call.
        following: messages after the reply, none of which the model has seen.

    Returns:
        None when the format cannot go on like this: the renderer lacks the extension property, or the messages that follow
        do not begin with what ended the response (role_colon, where only a user may follow). Render anew then.
    """
    if not renderer.has_extension_property:
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
    """The stop at the end of a rendered turn, in the tokens that the format writes it with."""
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
                # A token reaches from the text into the stop, so the turn's own tokens cannot be cut there.
                return encode_text(renderer.tokenizer, stop)
    raise ValueError(f"renderer {type(renderer).__name__} does not end a turn with one of its stop sequences")
