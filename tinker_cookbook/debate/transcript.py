"""What the two seats of a debate share: each other's turns, as soon as they are spoken, and in the end the verdict."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import IntEnum

from tinker_cookbook.debate.judges import DebateView, Verdict
from tinker_cookbook.tasks.types import Score, Task, TaskItem, parse_confidence, parse_solution
from tinker_cookbook.utils.reward_threads import call_reward

NUM_ROUNDS = 3


class Seat(IntEnum):
    """The two sides of a debate. Rollouts 2i and 2i + 1 of a group are A and B of debate i."""

    A = 0
    B = 1

    @property
    def opponent(self) -> Seat:
        return Seat.B if self is Seat.A else Seat.A


@dataclass(frozen=True)
class Turn:
    """One spoken turn: its ids with the stop, if any; what it says, for rewards and judges; and its whole text, for people.

    malformed: a control token stands in it before its end, so that it passes for several turns.
    """

    tokens: list[int]
    text: str
    raw: str
    malformed: bool = False


class Transcript:
    """One debate. Rounds are simultaneous: a seat sees the opponent's turn of a round only after its own."""

    def __init__(self, task: Task, item: TaskItem):
        self.task, self.item = task, item
        self.turns: dict[Seat, list[Turn]] = {seat: [] for seat in Seat}
        self.scores: dict[Seat, Score] = {}
        self.verdict: Verdict | None = None
        self.judge_seconds = 0.0
        self._spoken = {(seat, round_): asyncio.Event() for seat in Seat for round_ in range(NUM_ROUNDS)}

    async def speak(self, seat: Seat, turn: Turn) -> None:
        """Add a seat's next turn. The first one fixes its solution and task reward."""
        round_ = len(self.turns[seat])
        self.turns[seat].append(turn)
        if round_ == 0:
            self.scores[seat] = await call_reward(self.task.score, self.item, turn.text)
        self._spoken[seat, round_].set()

    async def hear(self, seat: Seat, round_: int) -> Turn:
        """The turn of `seat` in this round, once spoken."""
        await self._spoken[seat, round_].wait()
        return self.turns[seat][round_]

    def solution(self, seat: Seat) -> str | None:
        """The frozen answer of round 1."""
        return parse_solution(self.turns[seat][0].text)

    def confidence(self, seat: Seat) -> float | None:
        return parse_confidence(self.turns[seat][0].text)

    def is_malformed(self, seat: Seat) -> bool:
        return any(turn.malformed for turn in self.turns[seat])

    def won(self, seat: Seat) -> bool:
        return self.verdict is not None and self.verdict.winner.name == seat.name

    def view(self, key: tuple[int, ...]) -> DebateView:
        """What a judge sees. `key` names the debate within the run, for judges that draw random numbers."""
        return DebateView(
            context=self.task.judge_context(self.item),
            rounds_a=[turn.text for turn in self.turns[Seat.A]],
            rounds_b=[turn.text for turn in self.turns[Seat.B]],
            confidence_a=self.confidence(Seat.A),
            confidence_b=self.confidence(Seat.B),
            reward_a=self.scores[Seat.A].reward,
            reward_b=self.scores[Seat.B].reward,
            key=key,
        )
