"""Environments of this library, which verifiers is to play."""

from random import Random
from types import SimpleNamespace
from typing import Any

from tinker_cookbook.env import Rubric, multi_turn_env, single_turn_env, tool_env

SUMS = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(4)]


def right(completion: str, answer: str) -> tuple[float, dict[str, float]]:
    return float(answer in completion) - 0.01 * len(completion), {"characters": float(len(completion))}


def stopped(state: dict[str, Any]) -> float:
    return float(state["stopped"])


def questions() -> Any:
    return SimpleNamespace(
        dataset=SUMS, eval_dataset=SUMS[:1], rubric=Rubric([right, stopped], [1.0, 0.25]), system_prompt="Add."
    )


def compared() -> Any:
    return SimpleNamespace(dataset=SUMS, rubric=Rubric([_shares]))


def _shares(completions: list[str]) -> list[float]:
    return [1 / len(completions)] * len(completions)


class Guess:
    max_turns = 3

    def __init__(self, rng: Random, highest: int = 9):
        self.number = rng.randint(1, highest)
        self.opening = [
            {"role": "system", "content": "Numbers only."},
            {"role": "user", "content": f"I think of a number from 1 to {highest}."},
        ]

    def step(self, message: Any) -> Any:
        said = message["content"].strip()
        if said == str(self.number):
            return 1.0
        return ("Higher." if said.isdigit() and int(said) < self.number else "Lower.", -0.125)


def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


def score(question: str, reply: str, answer: str) -> float:
    return float(reply.strip() == answer)


guess = multi_turn_env(Guess)
plain = single_turn_env(SUMS, score)
tools = tool_env(SUMS, score, [add], max_turns=3)
