"""Sums as an environment of the load_environment contract: a dataset and a rubric."""

from types import SimpleNamespace

from tinker_cookbook.env import Rubric
from tinker_cookbook.env.task import parse_solution


def right(completion: str, answer: str) -> float:
    """1 for the sum between the tags."""
    return float(parse_solution(completion) == answer)


def brief(completion: str) -> float:
    """What each character costs, so that a right reply is not also a long one."""
    return -len(completion)


def load_environment(highest: int = 9) -> SimpleNamespace:
    """Sums of two numbers up to `highest`; every seventh is kept for evaluations."""
    rows = [
        {"question": f"What is {a} + {b}?", "answer": str(a + b)}
        for a in range(highest + 1)
        for b in range(highest + 1)
    ]
    return SimpleNamespace(
        dataset=[row for i, row in enumerate(rows) if i % 7],
        eval_dataset=rows[::7],
        rubric=Rubric([right, brief], [1.0, 0.001]),
        system_prompt="Answer the question. Put only the final answer between <SOLUTION> and </SOLUTION>.",
    )
