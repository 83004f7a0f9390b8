"""An environment in which the policy may call tools until it answers without a call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable

from tinker_cookbook.exceptions import ConfigurationError, TrainingError
from tinker_cookbook.renderers import Message, Renderer, UnparsedToolCall
from tinker_cookbook.rl.message_env import MessageEnv, MessageStepResult
from tinker_cookbook.rl.rollout_limits import ToolErrors, ToolExecution
from tinker_cookbook.rl.types import STOP_METRIC_PREFIX, Metrics, StopReason
from tinker_cookbook.tool_use.tools import ERROR_PREFIX, ToolAnswer, ToolError, ToolRegistry, tool_message

Grader = Callable[[list[Message]], Awaitable[tuple[float, Metrics]]]
"""Reward and metrics of a whole conversation, which ends with the policy's answer."""


def tool_conversation(renderer: Renderer, tools: ToolRegistry, system_prompt: str, question: str) -> list[Message]:
    """Messages that declare the tools in the renderer's own way and ask the question.

    Raises:
        RendererError: the renderer has no tool format.
    """
    prefix = renderer.create_conversation_prefix_with_tools(tools.specs, system_prompt)
    return [*prefix, {"role": "user", "content": question}]


class ToolUseEnv(MessageEnv):
    """Runs the tool calls of each reply and shows their results; a reply without calls is the answer, and is graded.

    The last transition reports `tool_calls` of the episode, of these `tool_errors` (calls that no tool could answer), of these
    `unparsed_tool_calls` and `tool_exceptions` (calls that cannot be parsed, exceptions inside a tool), and `used_tools`, 0 or 1.

    Args:
        messages: the conversation to begin with, tools declared; see `tool_conversation`.
        grade: asked once, when the policy has answered.
        max_tool_calls: an episode whose calls exceed it ends there, ungraded, with reward 0. None: no limit.
        tool_execution: whether the calls of one reply run at once or one after the other.
        tool_errors: what follows a call that cannot be parsed, or an exception inside a tool. An episode that ends so has
            stop reason tool_error, and reward 0.
    """

    takes_unparsed_calls = True

    def __init__(
        self,
        messages: list[Message],
        tools: ToolRegistry,
        grade: Grader,
        max_tool_calls: int | None = None,
        tool_execution: ToolExecution = "parallel",
        tool_errors: ToolErrors = "answer",
    ):
        self.messages, self.tools, self.grade = list(messages), tools, grade
        self.counts: Counter[str] = Counter()
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
        calls, unparsed = message.get("tool_calls", []), message.get("unparsed_tool_calls", [])
        if not calls and not unparsed:
            reward, metrics = await self.grade(list(self.messages))
            return MessageStepResult(reward, True, list(self.messages), self._counted() | metrics)
        total = self.counts["tool_calls"] + len(calls) + len(unparsed)
        if self.max_tool_calls is not None and total > self.max_tool_calls:
            return self._stop(StopReason.MAX_TOOL_CALLS)
        answers = await self.tools.call_all(calls, self.tool_execution)
        answers += [_answer_unparsed(call) for call in unparsed]
        self.messages += [answer.message for answer in answers]
        failures = [answer.error for answer in answers if answer.error is not None]
        exceptions = [error for error in failures if not isinstance(error, ToolError)]
        self.counts.update(
            tool_calls=len(answers),
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
        return MessageStepResult(0.0, False, list(self.messages))

    def _stop(self, reason: StopReason) -> MessageStepResult:
        metrics = self._counted() | {STOP_METRIC_PREFIX + reason.value: 1}
        return MessageStepResult(0.0, True, list(self.messages), metrics)

    def _counted(self) -> Metrics:
        kinds = ("tool_calls", "tool_errors", "unparsed_tool_calls", "tool_exceptions")
        return {kind: self.counts[kind] for kind in kinds} | {"used_tools": float(self.counts["tool_calls"] > 0)}


def _answer_unparsed(call: UnparsedToolCall) -> ToolAnswer:
    error = ToolError(f"this tool call cannot be read: {call.error}")
    return ToolAnswer(tool_message(f"{ERROR_PREFIX}{error}", "unknown"), error)
