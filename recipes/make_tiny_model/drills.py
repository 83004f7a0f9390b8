"""Drills in plain text: tables of sums and graded answers, cheap practice for what chats need but rarely show.

A chat spends fifty tokens on one sum, a table ten. Tables and grades are always right: they are the textbook from which
careless writers have learnt, so the right answer stays known however noisy the chats are.
"""

import random

from recipes.make_tiny_model import arithmetic

# ("given", text) is not to be predicted, ("written", text) is.
Text = list[tuple[str, str]]


def sum_table(rng: random.Random, lines: int = 20) -> Text:
    """Lines such as "7 + 5 = 12"."""
    text: Text = []
    for _ in range(lines):
        item = arithmetic.draw(rng)
        text += [("given", f"{item.expression} ="), ("written", f" {item.answer}\n")]
    return text


def graded_answers(rng: random.Random, questions: int = 4) -> Text:
    """Questions with the tagged answers of two agents, each followed by "right" or "wrong": what a judge must see."""
    text: Text = []
    for _ in range(questions):
        item = arithmetic.draw(rng)
        text.append(("given", f"QUESTION\n{item.question}\n\n"))
        for name in ("A", "B"):
            answer = arithmetic.write_answer(item, 0.5, rng)
            grade = " right" if answer == item.answer else " wrong"
            text.append(("given", f"AGENT {name}\nRound 1: {arithmetic.tagged(answer)}"))
            text += [("written", grade), ("given", "\n\n")]
    return text
