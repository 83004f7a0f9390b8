"""The types of tools: calls, results, and the tool interface."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from tinker_cookbook.renderers import Message, ToolSpec


class ToolError(Exception):
    """A call cannot be answered; the model sees the text, which should say how to fix the call."""


@dataclass(frozen=True)
class ToolInput:
    """The input of a tool."""

    arguments: dict[str, Any]
    call_id: str | None = None


@dataclass
class ToolResult:
    """The result of a call."""

    messages: list[Message]
    """the messages that the model sees"""
    should_stop: bool = False
    """end the episode here"""
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """metrics of the turn"""
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    """for programs; the model does not see it"""
    error: Exception | None = None
    """why the call failed: a ToolError for a mistake of the model, another exception if raised inside the tool"""


@runtime_checkable
class Tool(Protocol):
    """Anything with a name, a declaration and a call."""

    @property
    def name(self) -> str:
        """The tool's name in calls."""
        ...

    def to_spec(self) -> ToolSpec:
        """Name, description and JSON schema of the parameters, as shown to the model.

        A subclass need not implement it if it has `description` and `parameters_schema`.
        """
        described: Any = self
        return ToolSpec(name=self.name, description=described.description, parameters=described.parameters_schema)

    async def run(self, input: ToolInput) -> ToolResult:
        """Answer a call. Raises ToolError for mistakes of the model."""
        ...
