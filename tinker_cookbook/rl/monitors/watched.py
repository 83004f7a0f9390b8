"""What a monitor reads: a rollout as text, with what its environment says of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class WatchedTurn:
    """A turn as text, control tokens included."""

    prompt: str
    """what the prompt adds to the turn before; of the first turn all of it"""
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
    """what the group's rewards said of it"""
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """what its environment says of it (`EnvGroupBuilder.describe_members`)"""
    tags: Sequence[str] = ()
    stop_reason: str | None = None

    @property
    def text(self) -> str:
        """Everything in it, from the first prompt to the last reply."""
        return "".join(turn.prompt + turn.reply for turn in self.turns)
