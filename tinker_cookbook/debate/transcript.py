"""The shared state of a debate: the turns of all seats, as soon as they are spoken, and finally the verdict."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tinker_cookbook.debate.protocols import Kind, ProtocolConfig
from tinker_cookbook.debate.quotes import mark_quotes
from tinker_cookbook.debate.views import DebateView, Role, Seat, SeatView, Verdict, Winner, denial
from tinker_cookbook.env.steps import Step
from tinker_cookbook.env.task import Score, Task, TaskItem, parse_confidence, parse_solution
from tinker_cookbook.utils.reward_threads import call_reward
from tinker_cookbook.utils.seeds import derive_seed


@dataclass(frozen=True)
class Turn:
    """One turn: its ids with the stop, if any; `text`, its content for rewards and judges; `raw`, the whole text for people.

    malformed: it contains a control token before its end, so that it looks like several turns.
    is_sampled: False for an assigned answer, which has no ids.
    """

    tokens: list[int]
    text: str
    raw: str
    malformed: bool = False
    kind: Kind = "answer"
    round: int = 0
    stopped: bool = True
    is_sampled: bool = True


class Transcript:
    """One debate. A seat hears what others said since it last spoke; seats that share a slot do not hear each other.

    Args:
        answers: the answer that each seat argues for, if answers are assigned.
        key: batch, group and debate; identifies it for judges that draw random numbers.
    """

    def __init__(
        self,
        task: Task,
        item: TaskItem,
        protocol: ProtocolConfig | None = None,
        key: tuple[int, ...] = (),
        answers: Sequence[str] = (),
    ):
        self.task, self.item, self.key = task, item, key
        self.protocol = protocol or ProtocolConfig()
        self.seats = self.protocol.verdict_seats
        self.speakers = self.protocol.speakers(key[-1] if key else 0)
        self.slots = self.protocol.slots(self.speakers, sum(key))
        self.turns: dict[Seat, list[Turn]] = {seat: [] for seat in self.seats}
        self.scores: dict[Seat, Score] = {}
        self.verdict: Verdict | None = None
        self.measured: dict[str, Verdict] = {}
        """verdicts for measurement only: held_out, no_debate, with_key"""
        self.checked: dict[Seat, list[Step]] = {}
        """oversight: the steps that the judge checked, by the seat of their answer"""
        self.answer_verdicts: dict[Seat, Verdict] = {}
        """oversight: the verdict on each answer; A: accepted, B: rejected"""
        self.speech_rewards: dict[Seat, float] = {}
        """oversight: the reward of a seat's speeches, if they do more than win or lose"""
        self.judge_seconds = 0.0
        self.fits: bool | None = None
        """whether the longest debate about this question fits the context window; None: not known yet"""
        self._spoken = {(seat, i): asyncio.Event() for i, slot in enumerate(self.slots) for seat in slot.speakers}
        for seat, answer in zip(self.seats if answers else (), answers, strict=True):
            text = f"<SOLUTION>{answer}</SOLUTION>"
            self.turns[seat].append(Turn([], text, text, is_sampled=False))

    async def prepare(self) -> None:
        """Score the assigned answers."""
        for seat in self.seats:
            if self.turns[seat]:
                self.scores[seat] = await call_reward(self.task.score, self.item, self.turns[seat][0].text)

    def next_slot(self, seat: Seat) -> int | None:
        """The slot where the seat speaks next; None when it has finished."""
        turns = [i for i, slot in enumerate(self.slots) if seat in slot.speakers]
        done = len(self.sampled_turns(seat))
        return turns[done] if done < len(turns) else None

    async def speak(self, seat: Seat, turn: Turn) -> None:
        """Add a seat's next turn. An answer fixes its solution and task reward."""
        slot = self.next_slot(seat)
        assert slot is not None, f"seat {seat.name} has no turn left"
        self.turns[seat].append(turn)
        if turn.kind == "answer":
            self.scores[seat] = await call_reward(self.task.score, self.item, turn.text)
        self._spoken[seat, slot].set()

    async def hear(self, seat: Seat, slot: int) -> Turn:
        """The turn of `seat` in this slot, once it is spoken."""
        await self._spoken[seat, slot].wait()
        before = sum(seat in earlier.speakers for earlier in self.slots[:slot])
        return self.sampled_turns(seat)[before]

    def sampled_turns(self, seat: Seat) -> list[Turn]:
        """The turns spoken by the policy, one for each transition of the seat's trajectory."""
        return [turn for turn in self.turns[seat] if turn.is_sampled]

    def role(self, seat: Seat) -> Role:
        return self.protocol.role(seat, self.speakers)

    def answer(self, seat: Seat) -> Turn | None:
        """None for a critic, and before the answer is given."""
        return next((turn for turn in self.turns[seat] if turn.kind == "answer"), None)

    def solution(self, seat: Seat) -> str | None:
        """The seat's answer, which never changes."""
        answer = self.answer(seat)
        return None if answer is None else parse_solution(answer.text)

    def confidence(self, seat: Seat) -> float | None:
        answer = self.answer(seat)
        return None if answer is None else parse_confidence(answer.text)

    def correct(self, seat: Seat) -> bool | None:
        """Whether the seat is right: its answer, or a critic who objects to a wrong one. None if the task does not
        know.
        """
        if seat in self.scores:
            return self.scores[seat].correct
        criticised = self.scores.get(Seat.A)
        return None if criticised is None or criticised.correct is None else not criticised.correct

    def is_malformed(self, seat: Seat) -> bool:
        return any(turn.malformed for turn in self.turns[seat])

    @property
    def was_held(self) -> bool:
        """Whether the debate was completed; a question that is too long is not debated."""
        return all(self.next_slot(seat) is None for seat in self.speakers)

    def accepted(self, seat: Seat) -> bool | None:
        """Under oversight, whether the seat's answer is accepted; None: there is no verdict."""
        verdict = self.answer_verdicts.get(seat)
        return None if verdict is None else {Winner.A: True, Winner.B: False}.get(verdict.winner)

    @property
    def speeches_object(self) -> bool:
        """Under oversight, whether speeches are about the other seat's answer, not the speaker's own."""
        return len(self.speakers) == 2 and self.slots[0].is_heard

    def request(self, seat: Seat, text: str) -> str:
        """The request to a seat, from the protocol's text."""
        return text

    def won(self, seat: Seat) -> bool:
        return self.verdict is not None and self.verdict.winner.seat is seat

    def share(self, seat: Seat) -> float | None:
        """How much the verdict favours the seat, from 0 to 1 (`Verdict.share`); None without a verdict."""
        return None if self.verdict is None else self.verdict.share(seat, max(2, len(self.seats)))

    def quotes(self, seat: Seat) -> tuple[int, int]:
        """Number of quotes in the seat's turns that the article contains, and of all quotes."""
        article = self.task.article(self.item)
        marked = [mark_quotes(turn.text, article) for turn in self.turns[seat]]
        return sum(text.verified for text in marked), sum(text.total for text in marked)

    def view(self, key: tuple[int, ...] | None = None) -> DebateView:
        """The judge's view. `key` replaces the debate's own."""
        return DebateView(
            context=self.task.judge_context(self.item),
            seats=tuple(self._seat_view(seat) for seat in self.seats),
            key=self.key if key is None else key,
            reference=self.reference if self.protocol.name == "key" else None,
        )

    @property
    def reference(self) -> str:
        """The answer key."""
        return self.task.reference_answer(self.item)

    def _seat_view(self, seat: Seat) -> SeatView:
        texts = [turn.text for turn in self.turns[seat]]
        if self.protocol.quotes:
            article = self.task.article(self.item)
            texts = [mark_quotes(text, article).text for text in texts]
        score = self.scores.get(seat)
        if score is None:  # a critic is right when the answer is wrong
            return replace(denial(self._seat_view(Seat.A)), rounds=texts)
        return SeatView(texts, self.confidence(seat), score.reward, score.correct, self.role(seat))


def assign_answers(num_seats: int, right: str, wrong: Sequence[str], key: tuple[int, ...], seed: int) -> list[str]:
    """The right answer and wrong ones in an order drawn from the debate's key, so that no seat is right more often."""
    answers = [right, *wrong[: num_seats - 1]]
    draw = derive_seed(seed, "assigned answers", *key)
    ordered: list[str] = []
    while answers:
        draw, index = divmod(draw, len(answers))
        ordered.append(answers.pop(index))
    return ordered


def invalid(reasoning: str) -> Verdict:
    return Verdict(Winner.INVALID, reasoning=reasoning)
