"""The reward of a seat in a finished debate: the verdict, the task's reward, and penalties, mixed as in
`judge:0.5,task:0.5`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tinker_cookbook.debate.transcript import Transcript
from tinker_cookbook.debate.views import Seat
from tinker_cookbook.env.rewards import Call, Weighted, finite_number, parse_weighted, weighted_sum
from tinker_cookbook.plugins import Kind, Registry, parameter_problem

Term = Callable[[Transcript, Seat], float]
"""Part of a seat's reward. The debate has its verdict."""

LENGTH_UNIT = 100
"""Words of speeches that cost a reward of 1."""

_CONCEDES = re.compile(
    r"\b(?:you are right|you're right|i was wrong|i am wrong|i'm wrong|my answer is wrong|my answer was wrong|i concede|"
    r"i agree with (?:you|the other|agent)|(?:their|the other|your) answer is (?:right|correct))\b",
    re.IGNORECASE,
)
_TAGGED = re.compile(r"<SOLUTION>([^<]*)</SOLUTION>")


def judge(transcript: Transcript, seat: Seat) -> float:
    """1 for the winner and -1 / (n - 1) for each other seat, so that a debate's rewards add up to 0; 0 for all in a tie."""
    if transcript.verdict is None or transcript.verdict.winner.seat is None:
        return 0.0
    return _zero_sum(transcript, float(transcript.won(seat)))


def soft(transcript: Transcript, seat: Seat) -> float:
    """Like `judge`, but with the probability that the seat wins, if the judge returns it."""
    share = transcript.share(seat)
    return 0.0 if share is None else _zero_sum(transcript, share)


def _zero_sum(transcript: Transcript, share: float) -> float:
    options = max(2, len(transcript.seats))
    return (options * share - 1) / (options - 1)


def win(transcript: Transcript, seat: Seat) -> float:
    """1 for the winner, 0 for all others."""
    return float(transcript.won(seat))


def task(transcript: Transcript, seat: Seat) -> float:
    """The task's reward of the seat's answer, as if there had been no debate; 0 if the answer is not the policy's. A critic
    has no answer: 1 if the task says that the criticised answer is wrong, else 0.
    """
    answer = transcript.answer(seat)
    if transcript.role(seat) == "critic":
        return float(bool(transcript.correct(seat)))
    return transcript.scores[seat].reward if answer is not None and answer.is_sampled else 0.0


def length(transcript: Transcript, seat: Seat) -> float:
    """Minus the words of the seat's speeches, in hundreds; -1 at most."""
    words = sum(len(turn.text.split()) for turn in transcript.sampled_turns(seat) if turn.kind == "speech")
    return -min(1.0, words / LENGTH_UNIT)


def format_(transcript: Transcript, seat: Seat) -> float:
    """Minus the fraction of the seat's turns that are truncated, or are an answer that cannot be parsed."""
    turns = transcript.sampled_turns(seat)
    bad = [not turn.stopped or (turn.kind == "answer" and transcript.solution(seat) is None) for turn in turns]
    return -sum(bad) / max(1, len(bad))


def concession(transcript: Transcript, seat: Seat) -> float:
    """-1 when a speech gives up the seat's answer: it says so, or puts another answer between the tags."""
    return -float(concedes(transcript, seat))


def concedes(transcript: Transcript, seat: Seat) -> bool:
    """Whether a speech says that the other side is right or its own answer is wrong, or gives another answer."""
    solution = transcript.solution(seat)
    return any(
        _CONCEDES.search(turn.text)
        or any(answer.strip() != solution for answer in _TAGGED.findall(turn.text) if solution is not None)
        for turn in transcript.sampled_turns(seat)
        if turn.kind == "speech"
    )


_NAMES = ("transcript", "seat")
TERMS: Registry[Term] = Registry(
    Kind(
        key="debate_reward",
        wanted="def term(transcript: Transcript, seat: Seat) -> float",
        example='''
def brevity(transcript, seat):  # a tinker_cookbook.debate.transcript.Transcript
    """Ten words less are worth 0.1 more."""
    return -sum(len(turn.text.split()) for turn in transcript.sampled_turns(seat)) / 100
''',
        problem=partial(parameter_problem, names=_NAMES),
    ),
    {
        "judge": judge,
        "soft": soft,
        "win": win,
        "task": task,
        "length": length,
        "format": format_,
        "concession": concession,
    },
)
"""Terms of a debate's reward, by name. Penalties are negative: give them positive weights."""


@dataclass(frozen=True)
class DebateReward:
    """A weighted sum of terms."""

    terms: tuple[Weighted[Term], ...]

    @classmethod
    def parse(cls, spec: str) -> DebateReward:
        """Parse `name:weight,name:weight` (the default weight is 1). A name is one of TERMS, `package.module:function`
        or `path/file.py:function`.

        Raises ConfigurationError: an unknown name, a bad weight, a duplicate name.
        """
        return cls(parse_weighted(spec, TERMS, noun="term"))

    @property
    def names(self) -> frozenset[str]:
        return frozenset(term.name for term in self.terms)

    def without(self, name: str) -> DebateReward:
        """All terms but this one."""
        return DebateReward(tuple(term for term in self.terms if term.name != name))

    def only(self, name: str) -> DebateReward:
        return DebateReward(tuple(term for term in self.terms if term.name == name))

    def __call__(self, transcript: Transcript, seat: Seat) -> float:
        """Raises RewardError for a term that fails, DataValidationError for one that does not return a finite number."""
        given = {"transcript": transcript, "seat": seat}
        values: list[tuple[float, float]] = []
        for term in self.terms:
            what = f"debate_reward {term.name}"
            value = Call(term.function, _NAMES).now(what, given)
            values.append((term.weight, finite_number(value, what)))
        return weighted_sum(values)
