"""A judge's input and output: seats, the view of a debate, and the verdict. Plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import Literal

from tinker_cookbook.env.steps import Step

Role = Literal["debater", "proposer", "critic", "consultant", "examiner", "answer", "step"]
"""The role of a seat. `answer`: an answer without a speaker; `step`: it is the claim of a single step of an answer."""


class Seat(IntEnum):
    """The sides of a debate, in display order."""

    A = 0
    B = 1
    C = 2
    D = 3
    E = 4
    F = 5
    G = 6
    H = 7

    @property
    def opponent(self) -> Seat:
        """The other seat of a two-sided debate."""
        return Seat(1 - self)


class Winner(StrEnum):
    """A seat, TIE (a verdict that favours no seat), or INVALID (there is no verdict)."""

    A = "A"
    B = "B"
    C = "C"
    D = "D"
    E = "E"
    F = "F"
    G = "G"
    H = "H"
    TIE = "TIE"
    INVALID = "INVALID"

    @property
    def seat(self) -> Seat | None:
        """The winning seat; None for TIE and INVALID."""
        return Seat[self.value] if self.value in Seat.__members__ else None


@dataclass(frozen=True)
class JudgeCall:
    """The prompt of a token-level judge and its sample, for the record."""

    prompt_tokens: list[int]
    completion_tokens: list[int]
    completion_logprobs: list[float] | None


@dataclass(frozen=True)
class Verdict:
    winner: Winner
    reasoning: str = ""
    raw_response: str = ""
    call: JudgeCall | None = None
    retries: int = 0
    usage: Mapping[str, float] = field(default_factory=dict[str, float])
    """of an endpoint: calls, tokens, cost"""
    shares: tuple[float, ...] | None = None
    """of a soft verdict, the probability that each option wins; they sum to 1. None: a hard verdict"""
    votes: tuple[Winner, ...] = ()
    """the verdicts that were merged into this one, in the view's order; empty for a single verdict"""

    def share(self, option: int, num_options: int) -> float | None:
        """Probability in [0, 1] that this option wins: 1 or 0 for a hard verdict, 1 / num_options for TIE, None for INVALID."""
        if self.winner is Winner.INVALID:
            return None
        if self.shares is not None:
            return self.shares[option]
        return 1 / num_options if self.winner is Winner.TIE else float(self.winner.seat == option)


@dataclass(frozen=True)
class SeatView:
    """One side as a judge may see it. `reward` and `correct` are the truth, for judges that know it (baselines, tests)."""

    rounds: list[str]
    """its turns, the answer first"""
    confidence: float | None = None
    reward: float = 0.0
    correct: bool | None = None
    role: Role = "debater"
    place: float = 0.0
    """of a step: the fraction of its answer's steps that come before it"""
    spoken: Literal["right", "wrong"] | None = None
    """of a step: the opinion of the speech that names it; None: no speech does. Hidden from models"""


@dataclass(frozen=True)
class DebateView:
    """Everything that a judge may see.

    With one seat, verdict A says that its answer is right, B that it is wrong.
    """

    context: str
    seats: tuple[SeatView, ...]
    key: tuple[int, ...]
    """identifies the debate within the run, for judges that draw random numbers"""
    reference: str | None = None
    """the answer key, for the baseline judge that sees it"""

    @property
    def num_options(self) -> int:
        """Number of possible verdicts, not counting TIE."""
        return max(2, len(self.seats))

    @property
    def options(self) -> tuple[Winner, ...]:
        return tuple(Winner(Seat(i).name) for i in range(self.num_options))

    @property
    def is_step(self) -> bool:
        """Whether it only shows a step of an answer."""
        return self.seats[0].role == "step"

    @property
    def labels(self) -> dict[str, Winner]:
        """The labels that a language model may write as its verdict, and their meaning."""
        if self.is_step:
            return {"RIGHT": Winner.A, "WRONG": Winner.B}
        return {option.value: option for option in (*self.options, Winner.TIE)}

    @property
    def rounds_a(self) -> list[str]:
        return self.seats[0].rounds

    @property
    def rounds_b(self) -> list[str]:
        return self.both()[1].rounds

    def both(self) -> tuple[SeatView, ...]:
        """A seat for each option; for a single answer also its denial."""
        first, *others = self.seats
        return (first, *(others or [denial(first)]))

    def in_order(self, order: Sequence[int]) -> DebateView:
        """The same debate with seat order[i] in position i."""
        return replace(self, seats=tuple(self.seats[i] for i in order))

    def without_speeches(self) -> DebateView:
        """The answers only, as if there had been no speeches. A criticised answer is judged alone."""
        answers = (seat for seat in self.seats if seat.role != "critic")
        return replace(self, seats=tuple(replace(seat, rounds=seat.rounds[:1], role="answer") for seat in answers))


def step_view(
    step: Step, key: tuple[int, ...], place: float = 0.0, spoken: Literal["right", "wrong"] | None = None
) -> DebateView:
    """A step of an answer, alone; `place` and `spoken` as in `SeatView`."""
    holds = step.holds
    seat = SeatView([step.claim], reward=float(holds), correct=holds, role="step", place=place, spoken=spoken)
    return DebateView("", (seat,), key)


def denial(answer: SeatView) -> SeatView:
    """The claim that an answer is wrong, without arguments."""
    return SeatView(
        rounds=[],
        confidence=None if answer.confidence is None else 1 - answer.confidence,
        reward=1 - answer.reward,
        correct=None if answer.correct is None else not answer.correct,
        role="critic",
    )
