"""Callbacks into a rollout: subclass RolloutHooks, and give it to `run_rollout` or, for all of a run, to `RolloutConfig`."""

from __future__ import annotations

from dataclasses import dataclass

from tinker_cookbook.renderers import Message
from tinker_cookbook.rl.types import Transition


@dataclass(frozen=True)
class RolloutState:
    """How far a rollout has come. `transitions` is the live list: look, do not touch."""

    turn_index: int
    """turns recorded so far"""
    observation_tokens: int
    """length of the prompt that would be next"""
    sampled_tokens: int
    num_length_truncations: int
    """replies that were cut off, after which the rollout went on"""
    elapsed_seconds: float
    transitions: list[Transition]


class RolloutHooks:
    """Callbacks into a rollout, each of which does nothing unless overridden."""

    async def on_turn_begin(self, state: RolloutState) -> list[Message] | None:
        """Messages to put into the conversation before this turn.

        The env must have `async add_messages(messages)`, which returns the prompt with them and what stops a reply.
        """
        return None

    async def on_stop_reason(self, reason: str, state: RolloutState) -> str | None:
        """The reason to record, or None to go on.

        Asked when the env ends the episode and when `max_turns` or a budget of tokens does; going on then means one turn
        without that limit. Not asked about a timeout or a first prompt that is too long: these cannot be undone.
        """
        return reason

    async def on_grade(self, state: RolloutState) -> None:
        """After the env ended the episode, and so graded it. Not called when a limit ended the rollout."""

    async def on_artifacts(self, state: RolloutState) -> None:
        """Last thing before the trajectory is returned, however the rollout ended. Not called when it fails."""
