"""Drills in plain text: sums, grades, verdicts and recall, cheap practice of skills that chats need but rarely show.

A chat spends fifty tokens on one sum, a table ten. Drills are always right, so that the model knows the right answer however
noisy the chats are. Recall teaches copying from the preceding text, which summaries and speeches need.
"""

import random

from tools.make_tiny_model import arithmetic
from tools.make_tiny_model.chat import WORDS
from tools.make_tiny_model.news_kinds import SLOTS

# Roles by loss weight: "given" is barely predicted, "written" is, "decided" has the largest weight.
Text = list[tuple[str, str]]
NAMES = (*WORDS, *SLOTS["first"], *SLOTS["last"], *SLOTS["town"], *SLOTS["day"], *SLOTS["month"], *SLOTS["job"])


def sum_table(rng: random.Random, lines: int = 20) -> Text:
    """Lines such as "7 + 5 = 12"."""
    text: Text = []
    for _ in range(lines):
        item = arithmetic.draw(rng)
        text += [("given", f"{item.expression} ="), ("written", f" {item.answer}\n")]
    return text


def thing(rng: random.Random) -> str:
    """A word, a name, a number or a sum."""
    luck = rng.random()
    if luck < 0.4:
        return str(rng.randrange(100))
    return arithmetic.draw(rng).expression if luck < 0.5 else rng.choice(NAMES)


def recall(rng: random.Random) -> Text:
    """A list repeated, or values looked up by name in another order."""
    if rng.random() < 0.5:
        line = ", ".join(thing(rng) for _ in range(rng.randint(8, 20)))
        return [("given", f"{line}\n"), ("written", f"{line}\n")]
    pairs = [(name, thing(rng)) for name in rng.sample(NAMES, rng.randint(4, 8))]
    text: Text = [("given", "".join(f"{name}: {value}\n" for name, value in pairs))]
    for name, value in rng.sample(pairs, len(pairs)):
        text += [("given", f"{name}:"), ("written", f" {value}\n")]
    return text


def graded_answers(rng: random.Random, questions: int = 4) -> Text:
    """Questions answered by two agents, each answer followed by "right" or "wrong", or both by a verdict."""
    text: Text = []
    grades = rng.random() < 0.5
    for _ in range(questions):
        item = arithmetic.draw(rng)
        answers = [arithmetic.write_answer(item, 0.5, rng) for _ in range(2)]
        if rng.random() < 0.1:
            answers[1] = answers[0]
        is_right = [answer == item.answer for answer in answers]
        text.append(("given", f"QUESTION\n{item.question}\n\n"))
        for name, answer, right in zip("AB", answers, is_right, strict=True):
            text.append(("given", f"AGENT {name}\nRound 1: {arithmetic.tagged(answer)}"))
            if grades:
                text.append(("decided", " right" if right else " wrong"))
            text.append(("given", "\n\n"))
        if not grades:
            choice = "TIE" if is_right[0] == is_right[1] else "A" if is_right[0] else "B"
            text += [("given", "<VERDICT>"), ("decided", choice), ("given", "</VERDICT>\n\n")]
    return text
