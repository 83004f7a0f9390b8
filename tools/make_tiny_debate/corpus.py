"""The training text of tiny_debate: facts and checks first, then answers, objections, consultants and verdicts.

The order matters: a model can only check a step that it knows, and object to a step that it can check. Training on all kinds at
once takes several times as many steps.
"""

import random
from dataclasses import dataclass

from tinker_cookbook.debate.prompts import CHECK_SYSTEM, JUDGE_SYSTEM, OPPONENT, judge_user_prompt
from tinker_cookbook.debate.views import DebateView, SeatView
from tinker_cookbook.env.shipped.questions.collatz import (
    OBJECTION_REQUEST,
    SUPPORT_REQUEST,
    labels_of,
    next_number,
    request_of,
)
from tools.make_tiny_debate.trails import (
    STEPS,
    WORLD,
    before,
    draw,
    is_misconceived,
    mistakes,
    slip,
    write,
    write_wrong,
)

Turns = list[tuple[str, str]]
OBJECTION_SKILL, SUPPORT_SKILL = 0.95, 0.9
"""Probability that writers name a wrong (right) step if there is one; else they name any step."""


@dataclass(frozen=True)
class Writers:
    """The writers of the text: length of their answers, and probability that an objection names a wrong step."""

    steps: int = STEPS
    objection_skill: float = OBJECTION_SKILL

    @property
    def labels(self) -> str:
        """The names of steps."""
        return labels_of(self.steps)


USUAL = Writers()


def answer_text(numbers: list[int]) -> str:
    steps = " ".join(f"{label}{number}" for label, number in zip(labels_of(len(numbers)), numbers, strict=True))
    return f"{steps} <SOLUTION>{numbers[-1]}</SOLUTION>"


def objection(start: int, numbers: list[int], rng: random.Random, by: Writers = USUAL) -> str:
    """An objection to an answer, which claims what a step should be. If that step is right, the claim is false."""
    wrong = mistakes(start, numbers)
    i = rng.choice(wrong) if wrong and rng.random() < by.objection_skill else rng.randrange(len(numbers))
    return objection_to(start, numbers, i, rng)


def objection_to(start: int, numbers: list[int], i: int, rng: random.Random) -> str:
    """As `objection`, to step i."""
    number = before(start, numbers, i)
    claimed = next_number(number)
    if claimed == numbers[i]:
        claimed = wrong_number(number, rng)
    return f"{labels_of(len(numbers))[i]} is wrong: {number} makes {claimed}."


def support(start: int, numbers: list[int], rng: random.Random, by: Writers = USUAL) -> str:
    wrong = mistakes(start, numbers)
    right = [i for i in range(len(numbers)) if i not in wrong]
    i = rng.choice(right) if right and rng.random() < SUPPORT_SKILL else rng.randrange(len(numbers))
    return f"{by.labels[i]} is right: {before(start, numbers, i)} makes {numbers[i]}."


def wrong_number(number: int, rng: random.Random) -> int:
    """A wrong successor of a number: that of the misconception, if it applies."""
    right = next_number(number)
    return right - 5 if is_misconceived(number) and right > 5 else slip(right, rng)


def facts(rng: random.Random, by: Writers = USUAL) -> Turns:
    text = []
    for _ in range(12):
        number = rng.choice(WORLD)
        text += [("given", f"{number} makes"), ("written", f" {next_number(number)}\n")]
    return text


def claims(rng: random.Random, by: Writers = USUAL) -> Turns:
    text = []
    for _ in range(8):
        number = rng.choice(WORLD)
        is_right = rng.random() < 0.5
        claimed = next_number(number) if is_right else wrong_number(number, rng)
        text += [
            ("given", f"{number} makes {claimed}"),
            ("decided", " right" if is_right else " wrong"),
            ("given", "\n"),
        ]
    return text


def right_answer(rng: random.Random, by: Writers = USUAL) -> Turns:
    start = draw(rng)
    return [("given", f"{start}\n"), ("written", f"{answer_text(write(start, rng, 0, 0, by.steps))}\n")]


def graded_steps(rng: random.Random, by: Writers = USUAL) -> Turns:
    """Answers that are cut off after a step, and whether that step is right."""
    text = []
    for _ in range(5):
        start = draw(rng)
        numbers = write(
            start, rng, slip_rate=0.2 * (by.steps / STEPS), steps=by.steps
        )  # at any length a fifth are wrong
        last = rng.randrange(by.steps)
        steps = " ".join(f"{label}{number}" for label, number in zip(by.labels[: last + 1], numbers, strict=False))
        verdict = " wrong" if last in mistakes(start, numbers) else " right"
        text += [("given", f"{start}\n{steps}"), ("decided", verdict), ("given", "\n")]
    return text


def found_mistakes(rng: random.Random, by: Writers = USUAL) -> Turns:
    """Answers with one mistake, and which step it is."""
    text = []
    while len(text) < 12:
        start = draw(rng)
        numbers = write(start, rng, slip_rate=0.06, misconception_rate=0.4, steps=by.steps)
        wrong = mistakes(start, numbers)
        if len(wrong) == 1:
            text += [
                ("given", f"{start}\n{answer_text(numbers)}\n"),
                ("decided", by.labels[wrong[0]]),
                ("given", " is wrong\n"),
            ]
    return text


def graded_speeches(rng: random.Random, by: Writers = USUAL) -> Turns:
    """The speeches of debates between a right and a wrong answer, and who won."""
    text = []
    for _ in range(5):
        start = draw(rng)
        against_wrong = objection(start, write_wrong(start, rng, by.steps), rng, by)
        speeches = [against_wrong, objection(start, write(start, rng, 0, 0, by.steps), rng, by)]
        winner = rng.choice("AB")
        if winner == "B":
            speeches.reverse()
        shown = f"AGENT A\nRound 2: {speeches[0]}\n\nAGENT B\nRound 2: {speeches[1]}\n\n<VERDICT>"
        text += [("given", shown), ("decided", winner), ("given", "</VERDICT>\n\n")]
    return text


def asked(start: int, steps: int = STEPS) -> Turns:
    """The request for an answer."""
    return [("system", request_of(steps)), ("user", str(start))]


def answer(rng: random.Random, by: Writers = USUAL) -> Turns:
    start = draw(rng)
    return [*asked(start, by.steps), ("assistant", answer_text(write(start, rng, steps=by.steps)))]


def debate(rng: random.Random, by: Writers = USUAL) -> Turns:
    start = draw(rng)
    mine = write(start, rng, steps=by.steps)
    theirs = write_wrong(start, rng, by.steps) if rng.random() < 0.85 else write(start, rng, steps=by.steps)
    request = OBJECTION_REQUEST.replace(OPPONENT, answer_text(theirs))
    return [
        *asked(start, by.steps),
        ("assistant", answer_text(mine)),
        ("user", request),
        ("assistant", objection(start, theirs, rng, by)),
    ]


def consultancy(rng: random.Random, by: Writers = USUAL) -> Turns:
    start = draw(rng)
    mine = write(start, rng, steps=by.steps)
    return [
        *asked(start, by.steps),
        ("assistant", answer_text(mine)),
        ("user", SUPPORT_REQUEST),
        ("assistant", support(start, mine, rng, by)),
    ]


def judged(start: int, numbers_a: list[int], numbers_b: list[int], speeches: tuple[str, str]) -> Turns:
    """The prompt of a judge of two rounds."""
    rounds = [[answer_text(numbers), speech] for numbers, speech in zip((numbers_a, numbers_b), speeches, strict=True)]
    view = DebateView(str(start), tuple(map(SeatView, rounds)), ())
    return [("system", JUDGE_SYSTEM), ("user", judge_user_prompt(view))]


def verdict(rng: random.Random, by: Writers = USUAL) -> Turns:
    """A debate between a right and a wrong answer, and its winner, whose speech is the reason."""
    start = draw(rng)
    right, wrong = write(start, rng, 0, 0, by.steps), write_wrong(start, rng, by.steps)
    said = {"right": objection(start, wrong, rng, by), "wrong": objection(start, right, rng, by)}
    winner = rng.choice("AB")
    reply = f"<VERDICT>{winner}</VERDICT><REASONING>{said['right']}</REASONING>"
    if winner == "A":
        shown = judged(start, right, wrong, (said["right"], said["wrong"]))
    else:
        shown = judged(start, wrong, right, (said["wrong"], said["right"]))
    return [*shown, ("assistant", reply)]


def check(rng: random.Random, by: Writers = USUAL) -> Turns:
    """One step, as a step judge is asked about it."""
    number = rng.choice(WORLD)
    is_right = rng.random() < 0.5
    claimed = next_number(number) if is_right else wrong_number(number, rng)
    reply = f"<VERDICT>{'RIGHT' if is_right else 'WRONG'}</VERDICT>"
    return [("system", CHECK_SYSTEM), ("user", f"{number} makes {claimed}"), ("assistant", reply)]


KINDS = {
    kind.__name__: kind
    for kind in (
        facts, claims, right_answer, graded_steps, found_mistakes, graded_speeches, answer, debate, consultancy, verdict, check,
    )
}  # fmt: skip
