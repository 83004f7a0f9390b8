"""The input of a monitor: a rollout as text, with its environment's description."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class WatchedTurn:
    """A turn as text, control tokens included."""

    prompt: str
    """the text that the prompt adds to the previous turn; for the first turn all of it"""
    reply: str
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    logs: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class WatchedRollout:
    """A finished rollout."""

    turns: Sequence[WatchedTurn]
    reward: float
    """its total reward"""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """its metrics from the group's rewards"""
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """the environment's description of it (`EnvGroupBuilder.describe_members`)"""
    tags: Sequence[str] = ()
    stop_reason: str | None = None

    @property
    def text(self) -> str:
        """Everything in it, from the first prompt to the last reply."""
        return "".join(turn.prompt + turn.reply for turn in self.turns)
