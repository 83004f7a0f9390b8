"""The order of turns: a protocol as a list of slots. Seats that share a slot speak simultaneously.

    debate            every seat has an answer and argues for it
    proposer_critic   A answers, B argues against the answer; the judge says who is right
    consultancy       one seat argues for an answer: its own (open), or an assigned one
    direct            an answer without arguments
    key               the same, for a judge who sees the answer key
    self_consistency  the same, accepted if most answers to the question agree with it
    truth             the same, accepted if it is right

The last two have no judge; they are baselines for oversight (`debate.oversight`), which also has

    consultancy_assigned  both seats answer; in alternate debates they argue for their own answer, or against the other's
    bisection             each seat narrows down where the other's answer is wrong, in several speeches that stay unheard
    prover_estimator      each seat says how likely the steps of the other's answer are right

Answers are proposed by the seats, or assigned: the right one and wrong ones, in an order that depends on the debate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import chz

from tinker_cookbook.debate.views import Role, Seat
from tinker_cookbook.exceptions import ConfigurationError

ProtocolName = Literal[
    "debate", "proposer_critic", "consultancy", "direct", "key", "self_consistency", "truth",
    "consultancy_assigned", "bisection", "prover_estimator",
]  # fmt: skip
PROTOCOLS: tuple[ProtocolName, ...] = get_args(ProtocolName)[:5]
"""Protocols with a judge of whole debates."""
OVERSIGHT: tuple[ProtocolName, ...] = ("debate", "consultancy", "direct", "self_consistency", "truth")
"""Protocols with a judge of single steps, or without a judge."""
TWO_SIDED: tuple[ProtocolName, ...] = (
    "debate",
    "proposer_critic",
    "consultancy_assigned",
    "bisection",
    "prover_estimator",
)
"""Protocols whose seats speak about each other's answers."""
SPOKEN: tuple[ProtocolName, ...] = (*TWO_SIDED, "consultancy")
"""Protocols with speeches; the others have answers alone."""
DEFAULT_ROUNDS = 2
Kind = Literal["answer", "speech"]


@dataclass(frozen=True)
class Slot:
    """A time slot of a debate: who speaks, and the round of speeches (0: the answers)."""

    speakers: tuple[Seat, ...]
    round: int
    is_heard: bool = True
    """by the other seats, before they speak next"""

    @property
    def kind(self) -> Kind:
        return "answer" if self.round == 0 else "speech"


@dataclass(frozen=True)
class Heard:
    """A turn that a seat sees before it speaks."""

    seat: Seat
    slot: int


@chz.chz(typecheck=True)
class ProtocolConfig:
    """Who answers, who argues, in which order and how often."""

    name: ProtocolName = chz.field(
        default="debate",
        doc="debate, proposer_critic, consultancy, direct or key (direct; the judge has the answer key); of oversight also "
        "self_consistency, truth, consultancy_assigned, bisection and prover_estimator",
    )
    answers: Literal["proposed", "assigned"] = chz.field(
        default="proposed",
        doc="proposed: each seat answers for itself (an open consultancy); assigned: the right answer and wrong ones "
        "(wrong_answers of a row, or answers to other questions) are assigned to seats",
    )
    order: Literal["simultaneous", "sequential"] = chz.field(
        default="simultaneous", doc="of speeches: simultaneous, or sequential (each seat hears those before it)"
    )
    rounds: int | None = chz.field(
        default=None, doc=f"speeches of each seat after the answers; default {DEFAULT_ROUNDS}; 0: answers alone"
    )
    seats: int = chz.field(default=2, doc=f"of a debate, 2 to {len(Seat)}; rollouts per debate")
    quotes: bool = chz.field(
        default=False, doc="ask for <quote>...</quote> and tell the judge which quotes are in the article"
    )

    @chz.validate
    def _check(self) -> None:
        if not 2 <= self.seats <= len(Seat):
            raise ConfigurationError(f"protocol.seats={self.seats}: must be from 2 to {len(Seat)}")
        if self.seats != 2 and self.name != "debate":
            raise ConfigurationError(f"protocol.seats={self.seats}: only protocol.name=debate takes more than two")
        if self.rounds is not None and self.rounds < 0:
            raise ConfigurationError(f"protocol.rounds={self.rounds}: must be at least 0")
        if self.name not in SPOKEN and self.rounds:
            raise ConfigurationError(
                f"protocol.rounds={self.rounds}: there are no speeches in protocol.name={self.name}"
            )
        if self.answers == "assigned" and self.name not in ("debate", "consultancy"):
            raise ConfigurationError(
                f"protocol.answers=assigned: protocol.name={self.name} judges an answer of the policy; use debate or "
                "consultancy (whose judge can be shown the answers alone: measure=no_debate,with_key)"
            )
        if self.num_rounds == 0 and (self.answers == "assigned" or self.name == "proposer_critic"):
            raise ConfigurationError(
                f"protocol.rounds=0 with protocol.name={self.name}, protocol.answers={self.answers}: a seat would have "
                "nothing to say; give at least 1"
            )

    @property
    def num_rounds(self) -> int:
        """Speeches of each seat."""
        return 0 if self.name not in SPOKEN else DEFAULT_ROUNDS if self.rounds is None else self.rounds

    @property
    def verdict_seats(self) -> tuple[Seat, ...]:
        """The seats of the verdict; one if it says whether an answer is right."""
        if self.name == "consultancy" and self.answers == "assigned":
            return (Seat.A, Seat.B)
        return tuple(Seat)[: self.num_speakers]

    @property
    def num_speakers(self) -> int:
        """Number of rollouts in a debate."""
        return self.seats if self.name in TWO_SIDED else 1

    def speakers(self, draw: int) -> tuple[Seat, ...]:
        """The seats that the policy speaks for. With assigned answers, `draw` picks whose consultant it is."""
        if self.name == "consultancy" and self.answers == "assigned":
            return (Seat(draw % 2),)
        return self.verdict_seats

    def role(self, seat: Seat, speakers: tuple[Seat, ...]) -> Role:
        if seat not in speakers or self.num_rounds == 0:
            return "answer"
        if self.name == "proposer_critic":
            return "proposer" if seat is Seat.A else "critic"
        if self.name == "bisection":
            return "examiner"
        return "consultant" if self.name.startswith("consultancy") else "debater"

    def slots(self, speakers: tuple[Seat, ...], draw: int = 0) -> tuple[Slot, ...]:
        """The slots in order. Answers are always given independently, whatever the order of the speeches. With
        consultancy_assigned and an even `draw`, speakers argue for their own answers and do not hear each other.
        """
        critical = self.name == "proposer_critic"
        hears = self.name != "consultancy_assigned" or draw % 2 == 1
        slots = [] if self.answers == "assigned" else [Slot(speakers[:1] if critical else speakers, 0, hears)]
        if self.name == "bisection":
            return (*slots, *(Slot(speakers, round_, False) for round_ in range(1, self.num_rounds + 1)))
        in_turn = speakers[::-1] if critical else speakers  # the critic begins
        for round_ in range(1, self.num_rounds + 1):
            sequential = self.order == "sequential"
            slots += [Slot((seat,), round_) for seat in in_turn] if sequential else [Slot(speakers, round_)]
        return tuple(slots)


def heard_before(slots: tuple[Slot, ...], seat: Seat, slot: int) -> tuple[Heard, ...]:
    """The turns that a seat has not heard before it speaks in this slot: everything that others said since, or while,
    it last spoke.
    """
    turns = [i for i in range(slot) if seat in slots[i].speakers]
    since = turns[-1] if turns else 0
    turns_heard = [(other, i) for i in range(since, slot) if slots[i].is_heard for other in slots[i].speakers]
    return tuple(Heard(other, i) for other, i in turns_heard if other is not seat)
