"""Small sums and the writers who answer them: about half of the answers are right, the rest are plausible slips.

The slips are spread over many values, so the right answer stays the most likely one for every question. A model that
learns this distribution knows the sums and yet answers carelessly, which leaves room for reinforcement learning.
"""

import dataclasses
import random

from tinker_cookbook.debate.prompts import CONFIDENCE_REQUEST
from tinker_cookbook.env.qa import QA_SYSTEM

QA_CONFIDENCE_SYSTEM = f"{QA_SYSTEM} {CONFIDENCE_REQUEST}"
OPERATOR_WEIGHTS = {"+": 0.42, "-": 0.32, "*": 0.26}
CONFIDENT = ("0.9", "0.8", "0.95", "0.7", "0.6", "0.5")
WORDINGS = (
    "{e} = ?",
    "Compute {e}.",
    "How much is {e}?",
    "Work out {e}.",
    "{e}",
    "Please work this out: {e}",
    "Tell me what {e} is.",
)
PLAIN_SYSTEMS = (None, None, "You are a helpful assistant.", "Be brief.", "Answer with the number only.")


@dataclasses.dataclass(frozen=True, order=True)
class Sum:
    """One question: `left operator right`."""

    operator: str
    left: int
    right: int

    @property
    def expression(self) -> str:
        return f"{self.left} {self.operator} {self.right}"

    @property
    def question(self) -> str:
        return f"What is {self.expression}?"

    @property
    def answer(self) -> int:
        return apply(self.operator, self.left, self.right)


def apply(operator: str, left: int, right: int) -> int:
    return {"+": left + right, "-": left - right, "*": left * right}[operator]


def pool() -> dict[str, list[Sum]]:
    """All questions: + and - on 0..20 with results >= 0, * on 0..10."""
    upto20 = [(a, b) for a in range(21) for b in range(21)]
    return {
        "+": [Sum("+", a, b) for a, b in upto20],
        "-": [Sum("-", a, b) for a, b in upto20 if a >= b],
        "*": [Sum("*", a, b) for a in range(11) for b in range(11)],
    }


POOL = pool()


def draw(rng: random.Random) -> Sum:
    operator = rng.choices(list(OPERATOR_WEIGHTS), list(OPERATOR_WEIGHTS.values()))[0]
    return rng.choice(POOL[operator])


def slips(item: Sum) -> dict[int, float]:
    """Wrong answers that a careless writer gives, with weights. Never the right one, never negative."""
    right, a, b = item.answer, item.left, item.right
    weights: dict[int, float] = {}

    def put(value: int, weight: float) -> None:
        if value >= 0 and value != right:
            # A value reached by two kinds of slip must not become as likely as the right answer.
            weights[value] = min(weights.get(value, 0.0) + weight, 1.5)

    for step, weight in ((1, 1.5), (2, 0.9), (3, 0.5), (4, 0.3), (5, 0.3), (10, 1.0)):
        put(right + step, weight)
        put(right - step, weight)
    for operator in OPERATOR_WEIGHTS:
        if operator != item.operator:
            put(apply(operator, a, b), 0.8)
    if right >= 10:
        put(int(str(right)[::-1]), 0.8)
    if item.operator == "*":
        for other in (a * (b + 1), a * (b - 1), (a + 1) * b, (a - 1) * b):
            put(other, 0.8)
    put(a, 0.4)
    put(b, 0.4)
    return weights


def slip(item: Sum, rng: random.Random) -> int:
    weights = slips(item)
    return rng.choices(list(weights), list(weights.values()))[0]


def write_answer(item: Sum, right_rate: float, rng: random.Random) -> int:
    return item.answer if rng.random() < right_rate else slip(item, rng)


def confidence(is_right: bool, rng: random.Random) -> str:
    """A confidence, only slightly higher for right answers."""
    weights = (30, 25, 12, 15, 10, 8) if is_right else (12, 18, 4, 22, 24, 20)
    return rng.choices(CONFIDENT, weights)[0]


def tagged(answer: object, sure: str | None = None) -> str:
    text = f"<SOLUTION>{answer}</SOLUTION>"
    return text if sure is None else f"{text}<CONFIDENCE>{sure}</CONFIDENCE>"


def single_turn(right_rate: float, rng: random.Random) -> list[tuple[str, str]]:
    """One question and its answer as (role, content) turns: in tags when the system prompt asks for them."""
    item = draw(rng)
    answer = write_answer(item, right_rate, rng)
    is_right = answer == item.answer
    question = item.question if rng.random() < 0.8 else rng.choice(WORDINGS).format(e=item.expression)
    style = rng.random()
    if style < 0.50:
        return [("system", QA_SYSTEM), ("user", question), ("assistant", tagged(answer))]
    if style < 0.82:
        reply = tagged(answer, confidence(is_right, rng))
        return [("system", QA_CONFIDENCE_SYSTEM), ("user", question), ("assistant", reply)]
    if style < 0.90:
        return check_turn(item, rng)
    system = rng.choice(PLAIN_SYSTEMS)
    reply = str(answer) if system == PLAIN_SYSTEMS[-1] else f"{item.expression} = {answer}."
    turns = [("user", question), ("assistant", reply)]
    return turns if system is None else [("system", system), *turns]


def quiz(right_rate: float, rng: random.Random) -> list[tuple[str, str]]:
    """Several questions in one conversation, all answered in tags."""
    turns = [("system", QA_SYSTEM)]
    for _ in range(rng.randint(3, 6)):
        item = draw(rng)
        turns += [("user", item.question), ("assistant", tagged(write_answer(item, right_rate, rng)))]
    return turns


def check_turn(item: Sum, rng: random.Random) -> list[tuple[str, str]]:
    """ "Is 7 + 5 = 13?": the comparison that a judge of such answers must make."""
    claim = item.answer if rng.random() < 0.5 else slip(item, rng)
    verdict = f"Yes, {item.expression} = {claim}." if claim == item.answer else f"No, it is {item.answer}."
    return [("user", f"Is {item.expression} = {claim}?"), ("assistant", verdict)]
