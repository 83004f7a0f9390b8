"""Problems with a checkable answer as environments: give question and checks, get a one-turn env and its group."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinker_cookbook.renderers import Message, Renderer
from tinker_cookbook.rl.types import (
    Metrics,
)

if TYPE_CHECKING:
    pass

from tinker_cookbook.rl.one_turn import OneTurnEnv, OneTurnGroupBuilder, Reply


class ProblemEnv(OneTurnEnv):
    """One question, one answer: reward = format_coef * (format - 1) + correct, each of the two 0 or 1.

    Args:
        convo_prefix: messages before the question (system prompt, examples).
        require_stop_sequence_for_format: an answer that was cut off counts as badly formatted.
    """

    def __init__(
        self,
        renderer: Renderer,
        convo_prefix: list[Message] | None = None,
        format_coef: float = 0.1,
        require_stop_sequence_for_format: bool = True,
    ):
        super().__init__(renderer)
        self.convo_prefix = convo_prefix or []
        self.format_coef = format_coef
        self.require_stop_sequence_for_format = require_stop_sequence_for_format

    @abstractmethod
    def get_question(self) -> str: ...

    @abstractmethod
    def check_answer(self, sample_str: str) -> bool: ...

    @abstractmethod
    def check_format(self, sample_str: str) -> bool: ...

    @abstractmethod
    def get_reference_answer(self) -> str: ...

    def get_messages(self) -> list[Message]:
        return [*self.convo_prefix, {"role": "user", "content": self.get_question()}]

    def score_reply(self, reply: Reply) -> tuple[float, Metrics]:
        ended = reply.is_clean or not self.require_stop_sequence_for_format
        well_formed = ended and self.check_format(reply.text)
        correct = self.check_answer(reply.text)
        reward = self.format_coef * (float(well_formed) - 1) + float(correct)
        return reward, {"format": float(well_formed), "correct": float(correct)}


@dataclass(frozen=True)
class ProblemGroupBuilder(OneTurnGroupBuilder):
    """`num_envs` attempts at the ProblemEnv that `env_thunk` makes."""
