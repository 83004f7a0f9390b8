"""An environment in which the policy may call tools until it answers without a call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Message, Renderer
from tinker_cookbook.rl.message_env import MessageEnv, MessageStepResult
from tinker_cookbook.rl.rollout_limits import ToolExecution
from tinker_cookbook.rl.types import STOP_METRIC_PREFIX, Metrics, StopReason
from tinker_cookbook.tool_use.tools import ToolRegistry

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

    The last transition reports `tool_calls` and `tool_errors` of the episode (calls that no tool could answer) and
    `used_tools`, 0 or 1.

    Args:
        messages: the conversation to begin with, tools declared; see `tool_conversation`.
        grade: asked once, when the policy has answered.
        max_tool_calls: an episode whose calls exceed it ends there, ungraded, with reward 0. None: no limit.
        tool_execution: whether the calls of one reply run at once or one after the other.
    """

    def __init__(
        self,
        messages: list[Message],
        tools: ToolRegistry,
        grade: Grader,
        max_tool_calls: int | None = None,
        tool_execution: ToolExecution = "parallel",
    ):
        self.messages, self.tools, self.grade = list(messages), tools, grade
        self.tool_calls = self.tool_errors = 0
        self.set_max_tool_calls(max_tool_calls)
        self.set_tool_execution(tool_execution)

    def set_max_tool_calls(self, max_tool_calls: int | None) -> None:
        if max_tool_calls is not None and max_tool_calls < 1:
            raise ConfigurationError(f"max_tool_calls={max_tool_calls}: must be at least 1, or None for no limit")
        self.max_tool_calls = max_tool_calls

    def set_tool_execution(self, tool_execution: ToolExecution) -> None:
        self.tool_execution: ToolExecution = tool_execution

    async def initial_observation(self) -> list[Message]:
        return list(self.messages)

    async def add_messages(self, messages: list[Message]) -> list[Message]:
        self.messages += messages
        return list(self.messages)

    async def step(self, message: Message) -> MessageStepResult:
        self.messages.append(message)
        calls = message.get("tool_calls", [])
        if not calls:
            reward, metrics = await self.grade(list(self.messages))
            return MessageStepResult(reward, True, list(self.messages), self._counts() | metrics)
        if self.max_tool_calls is not None and self.tool_calls + len(calls) > self.max_tool_calls:
            stopped = {STOP_METRIC_PREFIX + StopReason.MAX_TOOL_CALLS.value: 1}
            return MessageStepResult(0.0, True, list(self.messages), self._counts() | stopped)
        for answer, good in await self.tools.call_all(calls, self.tool_execution):
            self.messages.append(answer)
            self.tool_errors += not good
        self.tool_calls += len(calls)
        return MessageStepResult(0.0, False, list(self.messages))

    def _counts(self) -> Metrics:
        return {
            "tool_calls": self.tool_calls,
            "tool_errors": self.tool_errors,
            "used_tools": float(self.tool_calls > 0),
        }
