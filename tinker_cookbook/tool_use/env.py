"""An environment in which the policy may call tools until it answers without a call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from tinker_cookbook.exceptions import ConfigurationError, TrainingError
from tinker_cookbook.renderers import Message, Renderer, UnparsedToolCall
from tinker_cookbook.rl.message_env import EnvFromMessageEnv, MessageEnv, MessageStepResult
from tinker_cookbook.rl.rollout_limits import ParseErrorPolicy, ToolErrors, ToolExecution
from tinker_cookbook.rl.rollout_presets import RolloutConfig
from tinker_cookbook.rl.types import STOP_METRIC_PREFIX, Metrics, StopReason
from tinker_cookbook.tool_use.tools import Tool, ToolError, ToolRegistry, ToolResult, error_tool_result
from tinker_cookbook.utils.reward_threads import call_reward

RewardFn: TypeAlias = Callable[[list[Message]], "Awaitable[tuple[float, Metrics]] | tuple[float, Metrics]"]
"""Reward and metrics of a whole conversation, which ends with the policy's answer or with what a tool said last."""


def tool_conversation(renderer: Renderer, tools: ToolRegistry, system_prompt: str, question: str) -> list[Message]:
    """Messages that declare the tools in the renderer's own way and ask the question.

    Raises:
        RendererError: the renderer has no tool format.
    """
    prefix = renderer.create_conversation_prefix_with_tools(tools.specs, system_prompt)
    return [*prefix, {"role": "user", "content": question}]


class ToolUseEnv(MessageEnv):
    """Runs the tool calls of each reply and shows their results; a reply without calls is the answer, and is graded.

    A tool may end the episode (`ToolResult.should_stop`), which is then graded as it stands. The last transition reports
    `tool_calls` of the episode, of these `tool_errors` (calls that no tool could answer), of these `unparsed_tool_calls` and
    `tool_exceptions` (calls that cannot be parsed, exceptions inside a tool), and `used_tools`, 0 or 1.

    Args:
        messages: the conversation to begin with, tools declared; see `tool_conversation`.
        grade: asked once, when the policy has answered.
        max_tool_calls: an episode whose calls exceed it ends there, ungraded, with reward 0. None: no limit.
        tool_execution: whether the calls of one reply run at once or one after the other.
        tool_errors: what follows a call that cannot be parsed, or an exception inside a tool. An episode that ends so has
            stop reason tool_error, and reward 0.
        max_turns: replies of the policy, after which the episode is graded as it stands. None: no limit.
    """

    takes_unparsed_calls = True

    def __init__(
        self,
        messages: list[Message],
        tools: ToolRegistry,
        grade: RewardFn,
        max_tool_calls: int | None = None,
        tool_execution: ToolExecution = "parallel",
        tool_errors: ToolErrors = "answer",
        max_turns: int | None = None,
    ):
        if max_turns is not None and max_turns < 1:
            raise ConfigurationError(f"max_turns={max_turns}: must be at least 1, or None for no limit")
        self.messages, self.tools, self.grade, self.max_turns = list(messages), tools, grade, max_turns
        self.turns, self.counts = 0, Counter[str]()
        self.set_max_tool_calls(max_tool_calls)
        self.set_tool_execution(tool_execution)
        self.set_tool_errors(tool_errors)

    def set_max_tool_calls(self, max_tool_calls: int | None) -> None:
        if max_tool_calls is not None and max_tool_calls < 1:
            raise ConfigurationError(f"max_tool_calls={max_tool_calls}: must be at least 1, or None for no limit")
        self.max_tool_calls = max_tool_calls

    def set_tool_execution(self, tool_execution: ToolExecution) -> None:
        self.tool_execution: ToolExecution = tool_execution

    def set_tool_errors(self, tool_errors: ToolErrors) -> None:
        self.on_tool_error: ToolErrors = tool_errors

    async def initial_observation(self) -> list[Message]:
        return list(self.messages)

    async def add_messages(self, messages: list[Message]) -> list[Message]:
        self.messages += messages
        return list(self.messages)

    async def step(self, message: Message) -> MessageStepResult:
        self.messages.append(message)
        self.turns += 1
        calls, unparsed = message.get("tool_calls", []), message.get("unparsed_tool_calls", [])
        if not calls and not unparsed:
            return await self._grade({})
        total = self.counts["tool_calls"] + len(calls) + len(unparsed)
        if self.max_tool_calls is not None and total > self.max_tool_calls:
            return self._stop(StopReason.MAX_TOOL_CALLS)
        results = await self.tools.call_all(calls, self.tool_execution)
        results += [_answer_unparsed(call) for call in unparsed]
        self.messages += [answer for result in results for answer in result.messages]
        failures = [result.error for result in results if result.error is not None]
        exceptions = [error for error in failures if not isinstance(error, ToolError)]
        self.counts.update(
            tool_calls=len(results),
            tool_errors=len(failures),
            unparsed_tool_calls=len(unparsed),
            tool_exceptions=len(exceptions),
        )
        if self.on_tool_error == "raise" and exceptions:
            raise exceptions[0]
        if self.on_tool_error == "raise" and unparsed:
            raise TrainingError(f"tool_errors=raise, and a tool call cannot be parsed: {unparsed[0].error}")
        if self.on_tool_error == "end" and (exceptions or unparsed):
            return self._stop(StopReason.TOOL_ERROR)
        metrics: Metrics = {key: value for result in results for key, value in result.metrics.items()}
        if any(result.should_stop for result in results):
            return await self._grade(metrics | {STOP_METRIC_PREFIX + StopReason.TOOL_STOPPED.value: 1})
        if self.turns == self.max_turns:
            return await self._grade(metrics | {STOP_METRIC_PREFIX + StopReason.MAX_TURNS.value: 1})
        return MessageStepResult(0.0, False, list(self.messages), metrics)

    async def _grade(self, metrics: Metrics) -> MessageStepResult:
        reward, found = await call_reward(self.grade, list(self.messages))
        return MessageStepResult(reward, True, list(self.messages), metrics | self._counted() | found)

    def _stop(self, reason: StopReason) -> MessageStepResult:
        metrics = self._counted() | {STOP_METRIC_PREFIX + reason.value: 1}
        return MessageStepResult(0.0, True, list(self.messages), metrics)

    def _counted(self) -> Metrics:
        kinds = ("tool_calls", "tool_errors", "unparsed_tool_calls", "tool_exceptions")
        return {kind: self.counts[kind] for kind in kinds} | {"used_tools": float(self.counts["tool_calls"] > 0)}


def _answer_unparsed(call: UnparsedToolCall) -> ToolResult:
    return error_tool_result(f"this tool call cannot be read: {call.error}", name="unknown")


def build_agent_tool_env(
    renderer: Renderer,
    tools: Sequence[Tool | Callable[..., Any]],
    initial_messages: list[Message],
    reward_fn: RewardFn,
    *,
    rollout_config: RolloutConfig | None = None,
    model_name: str | None = None,
    max_turns: int | None = None,
    failed_parse_reward: float = -0.1,
    terminate_on_parse_error: bool = True,
    max_tool_calls: int | None = None,
    max_trajectory_tokens: int | None = None,
    max_generation_tokens: int | None = None,
    context_overflow_reward: float = -0.1,
    terminate_on_length: bool = True,
    parse_error_policy: ParseErrorPolicy | None = None,
) -> EnvFromMessageEnv:
    """A ToolUseEnv for a policy over tokens.

    Args:
        tools: tools, or typed functions with a docstring, plain or async.
        initial_messages: the conversation to begin with, tools declared; see `tool_conversation`.
        reward_fn: grades the whole conversation, once.
        rollout_config: limits, what to do with replies that cannot be parsed, how tools are run and what follows when one fails,
            where nothing else here says it. With its `tool_errors`, calls that cannot be parsed are the matter of that, and not
            of `terminate_on_parse_error`. A rollout that is given settings of its own goes by those.
        model_name: taken for scripts that give it; no model has settings of its own.
        max_turns: replies of the policy, after which the episode is graded as it stands.
        failed_parse_reward, terminate_on_parse_error, max_trajectory_tokens, max_generation_tokens, context_overflow_reward,
        terminate_on_length, parse_error_policy: see EnvFromMessageEnv.
    """
    config = rollout_config or RolloutConfig()
    limits = config.limits
    env = ToolUseEnv(
        initial_messages,
        ToolRegistry(tools),
        reward_fn,
        max_tool_calls if limits is None or max_tool_calls is not None else limits.max_tool_calls,
        config.tool_execution,
        config.tool_errors or "answer",
        max_turns=max_turns if limits is None or max_turns is not None else limits.max_turns,
    )
    # Without `tool_errors`, what a call that cannot be parsed is worth is said to the adapter here.
    env.takes_unparsed_calls = config.tool_errors is not None
    return EnvFromMessageEnv(
        renderer,
        env,
        failed_parse_reward=failed_parse_reward,
        terminate_on_parse_error=terminate_on_parse_error,
        max_trajectory_tokens=max_trajectory_tokens
        if limits is None or max_trajectory_tokens is not None
        else limits.max_trajectory_tokens,
        max_generation_tokens=max_generation_tokens,
        context_overflow_reward=context_overflow_reward,
        terminate_on_length=terminate_on_length,
        parse_error_policy=parse_error_policy or config.parse_errors,
        rollout_limits=limits,
    )
