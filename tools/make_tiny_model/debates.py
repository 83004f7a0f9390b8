"""Simulated debates: two writers answer, argue and close, and a judge decides.

The tone of a speech depends on whether its writer is right, as in a real debate, but loosely: a judge that only reads the tone is
often wrong, and one that does the sum is mostly right.
"""

import dataclasses
import random

from tinker_cookbook.debate.prompts import (
    CLOSING,
    CONFIDENCE_REQUEST,
    JUDGE_SYSTEM,
    OPPONENT,
    REBUTTAL,
    judge_user_prompt,
)
from tinker_cookbook.debate.views import DebateView, SeatView
from tinker_cookbook.env.shipped.questions.summary import SUMMARY_SYSTEM
from tools.make_tiny_model import arithmetic
from tools.make_tiny_model.news import Article, Summary, write_article, write_summary

Turns = list[tuple[str, str]]
SUMMARY_CONFIDENCE_SYSTEM = f"{SUMMARY_SYSTEM} {CONFIDENCE_REQUEST}"
UNTAGGED_RATE = 0.03
JUDGE_CONTEXT_CHARS = 2000

SURE = (
    "{e} is {mine}, so {theirs} is wrong.",
    "I checked {e} again and got {mine}. Their {theirs} is too {side}.",
    "{e} makes {mine}. The other answer, {theirs}, is too {side}.",
    "My answer {mine} is right. {theirs} is not what {e} gives.",
)
UNSURE = (
    "I still say {mine}. I do not see how they got {theirs}.",
    "{mine} looks right to me. {theirs} seems too {side}.",
    "I keep {mine}. They gave no steps for {theirs}.",
)
AGREED = (
    "We both say {mine}, so I have nothing to correct.",
    "Our answers agree: {e} is {mine}.",
    "They also found {mine}. I keep my answer.",
)
SURE_CLOSING = (
    "Their reply does not change that {e} is {mine}.",
    "They did not show how {e} could be {theirs}. It is {mine}.",
    "I stay with {mine}. {theirs} is too {side}.",
)
UNSURE_CLOSING = (
    "I stay with {mine}, as before.",
    "They only repeat {theirs}. I keep {mine}.",
    "My final answer is {mine}. Their {theirs} was not explained.",
)
AGREED_CLOSING = (
    "We agree on {mine}. That is my final answer.",
    "Both of us have {mine}, so the case is closed.",
    "Nothing is left to argue: {e} is {mine}.",
)


@dataclasses.dataclass
class Seat:
    """One debater: the answer, whether it is right (or how good), and the decoded texts of its rounds."""

    answer: object
    worth: int
    rounds: list[str]

    @property
    def first(self) -> str:
        return self.rounds[0]


def sum_speech(item: arithmetic.Sum, mine: Seat, theirs: Seat, closing: bool, rng: random.Random) -> str:
    if mine.answer == theirs.answer:
        options = AGREED_CLOSING if closing else AGREED
    else:
        sure = rng.random() < (0.8 if mine.worth else 0.4)
        options = (SURE_CLOSING if sure else UNSURE_CLOSING) if closing else (SURE if sure else UNSURE)
    side = "high" if int(str(theirs.answer)) > int(str(mine.answer)) else "low"
    return rng.choice(options).format(e=item.expression, mine=mine.answer, theirs=theirs.answer, side=side)


def article_speech(article: Article, mine: Summary, theirs: Summary, closing: bool, rng: random.Random) -> str:
    mine_only = sorted(mine.details - theirs.details)
    theirs_only = sorted(theirs.details - mine.details)
    if mine.text == theirs.text:
        options = ["We wrote the same summary.", f"Both summaries tell what happened in {article.town}."]
    elif mine_only:
        label = article.labels[mine_only[0]]
        options = [f"My summary gives {label}. Theirs leaves it out.", f"Theirs does not name {label}; mine does."]
    elif theirs_only:
        label = article.labels[theirs_only[0]]
        options = ["My summary is shorter and keeps the main point.", f"I tell the main point; {label} is a side note."]
    else:
        options = ["Both name the same facts. Mine is closer to the article.", "My wording is closer to the article."]
    speech = rng.choice(options)
    if closing:
        speech = f"{rng.choice(('I stand by my summary.', 'They did not show a mistake.'))} {speech}"
    return speech


def maybe_untagged(answer: object, text: str, rng: random.Random) -> str:
    """The text, or rarely the answer without its tags."""
    if rng.random() >= UNTAGGED_RATE:
        return text
    return rng.choice((str(answer), f"The answer is {answer}", f"<SOLUTION>{answer}"))


@dataclasses.dataclass
class Debate:
    """A whole debate, from which the views of debaters and judge are made."""

    system: str
    question: str
    context: str
    a: Seat
    b: Seat

    def seen_by_a(self) -> Turns:
        """The conversation as debater A sees it."""
        rebuttal = REBUTTAL.replace(OPPONENT, self.b.rounds[0])
        closing = CLOSING.replace(OPPONENT, self.b.rounds[1])
        return [
            ("system", self.system),
            ("user", self.question),
            ("assistant", self.a.rounds[0]),
            ("user", rebuttal),
            ("assistant", self.a.rounds[1]),
            ("user", closing),
            ("assistant", self.a.rounds[2]),
        ]

    def swapped(self) -> "Debate":
        """The same debate with the seats exchanged: what B sees as A."""
        return dataclasses.replace(self, a=self.b, b=self.a)

    def seen_by_judge(self) -> Turns:
        """System and user turn of the judge, without the verdict."""
        return [
            ("system", JUDGE_SYSTEM),
            (
                "user",
                judge_user_prompt(DebateView(self.context, (SeatView(self.a.rounds), SeatView(self.b.rounds)), ())),
            ),
        ]


def sum_debate(rng: random.Random) -> tuple[Debate, arithmetic.Sum]:
    """Two answers to one question: one right and one wrong half of the time, else equal or both wrong."""
    item = arithmetic.draw(rng)
    case = rng.random()
    wrong = arithmetic.slip(item, rng)
    if case < 0.6:
        answers = [item.answer, wrong]
    elif case < 0.75:
        answers = [wrong, arithmetic.slip(item, rng)]
    elif case < 0.92:
        answers = [item.answer, item.answer]
    else:
        answers = [wrong, wrong]
    rng.shuffle(answers)
    seats = []
    for answer in answers:
        is_right = answer == item.answer
        text = arithmetic.tagged(answer, arithmetic.confidence(is_right, rng))
        seats.append(Seat(answer, int(is_right), [text]))
    a, b = seats
    b.rounds[0] = maybe_untagged(b.answer, b.rounds[0], rng)
    for closing in (False, True):
        speeches = [sum_speech(item, a, b, closing, rng), sum_speech(item, b, a, closing, rng)]
        a.rounds.append(speeches[0])
        b.rounds.append(speeches[1])
    return Debate(arithmetic.QA_CONFIDENCE_SYSTEM, item.question, item.question, a, b), item


def article_debate(rng: random.Random) -> tuple[Debate, Article]:
    article = write_article(rng)
    summaries = [write_summary(article, rng) for _ in range(2)]
    if rng.random() < 0.1:
        summaries[1] = summaries[0]
    seats = []
    for summary in summaries:
        text = arithmetic.tagged(summary.text, arithmetic.confidence(0 in summary.details, rng))
        seats.append(Seat(summary.text, summary.worth, [text]))
    a, b = seats
    b.rounds[0] = maybe_untagged(b.answer, b.rounds[0], rng)
    for closing in (False, True):
        a_says = article_speech(article, summaries[0], summaries[1], closing, rng)
        b_says = article_speech(article, summaries[1], summaries[0], closing, rng)
        a.rounds.append(a_says)
        b.rounds.append(b_says)
    return Debate(SUMMARY_CONFIDENCE_SYSTEM, article.text, article.text[:JUDGE_CONTEXT_CHARS], a, b), article


def verdict(a: Seat, b: Seat, judge_rate: float, rng: random.Random) -> str:
    """The better seat with probability `judge_rate`, else another verdict. Symmetric in A and B."""
    if a.worth == b.worth:
        favoured, others = "TIE", ["A", "B"]
    else:
        favoured, other = ("A", "B") if a.worth > b.worth else ("B", "A")
        others = [other, other, "TIE"]
    return favoured if rng.random() < judge_rate else rng.choice(others)


def judged(choice: str, reason: str) -> str:
    return f"<VERDICT>{choice}</VERDICT><REASONING>{reason}</REASONING>"


def judged_sum(judge_rate: float, rng: random.Random) -> Turns:
    debate, item = sum_debate(rng)
    if rng.random() < 0.5:
        debate.a, debate.b = debate.b, debate.a
    choice = verdict(debate.a, debate.b, judge_rate, rng)
    if choice == "TIE":
        same = debate.a.answer == debate.b.answer
        reason = f"Both answer {debate.a.answer}." if same else f"Neither shows what {item.expression} is."
    else:
        value = debate.a.answer if choice == "A" else debate.b.answer
        reason = rng.choice((f"{item.expression} is {value}.", f"Agent {choice} has the better answer, {value}."))
    return [*debate.seen_by_judge(), ("assistant", judged(choice, reason))]


def judged_article(judge_rate: float, rng: random.Random) -> Turns:
    debate, _ = article_debate(rng)
    if rng.random() < 0.5:
        debate.a, debate.b = debate.b, debate.a
    choice = verdict(debate.a, debate.b, judge_rate, rng)
    if choice == "TIE":
        reason = "Both summaries are about as good."
    else:
        reason = rng.choice((f"Agent {choice} names more of the facts.", f"Agent {choice} has the better summary."))
    return [*debate.seen_by_judge(), ("assistant", judged(choice, reason))]


def summary_turn(rng: random.Random) -> Turns:
    """An article and one writer's summary, with a confidence when the system prompt asks for it."""
    article = write_article(rng)
    summary = write_summary(article, rng)
    if rng.random() < 0.6:
        return [("system", SUMMARY_SYSTEM), ("user", article.text), ("assistant", arithmetic.tagged(summary.text))]
    reply = arithmetic.tagged(summary.text, arithmetic.confidence(0 in summary.details, rng))
    return [("system", SUMMARY_CONFIDENCE_SYSTEM), ("user", article.text), ("assistant", reply)]
