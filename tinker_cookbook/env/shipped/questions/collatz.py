"""Collatz trails: twelve steps from a number, each right or wrong by itself. One step is easy to check, all take long."""

import re
from typing import ClassVar

from tinker_cookbook.env.qa import QATask
from tinker_cookbook.env.steps import Step, StepTask
from tinker_cookbook.env.task import TaskItem, parse_solution

LABELS = "abcdefghijkl"
COLLATZ_SYSTEM = (
    "Follow the number for twelve steps: half of an even one, three times an odd one and 1. "
    "The last goes between <SOLUTION> and </SOLUTION>."
)
OBJECTION_REQUEST = "Another agent wrote:\n{opponent}\nWhich step is wrong there?"
SUPPORT_REQUEST = "Which step may the judge check?"
ESTIMATE_REQUEST = "Another agent wrote:\n{opponent}\nWhich steps are wrong there?"

_STEP = re.compile(r"\b([a-z])(\d+)\b")
_NAMED = re.compile(r"\s*([a-l]) is (?:wrong|right)\b")


def next_number(n: int) -> int:
    """The Collatz step."""
    return n // 2 if n % 2 == 0 else 3 * n + 1


class CollatzTask(QATask, StepTask):
    """The question is a number; the answer is its trail, a82 b41 c124 ..., and the last number between the tags."""

    name = "collatz"
    system_prompt = COLLATZ_SYSTEM
    shipped: ClassVar = {
        "trails": ("collatz/train.jsonl", "collatz/test.jsonl"),
        "facts": ("collatz/facts_train.jsonl", "collatz/facts_test.jsonl"),
    }
    default_dataset = "trails"
    debate_prompts: ClassVar = {"confidence": "", "rebuttal": OBJECTION_REQUEST, "support": SUPPORT_REQUEST}
    objection_request = OBJECTION_REQUEST
    support_request = SUPPORT_REQUEST
    estimate_request = ESTIMATE_REQUEST

    def steps(self, item: TaskItem, text: str) -> list[Step] | None:
        steps = _STEP.findall(text.partition("<SOLUTION>")[0])
        if [label for label, _ in steps] != list(LABELS) or parse_solution(text) != steps[-1][1]:
            return None
        numbers = [int(item.question), *(int(number) for _, number in steps)]
        return [
            Step(label, f"{before} makes {after}", next_number(before) == after)
            for label, before, after in zip(LABELS, numbers[:-1], numbers[1:], strict=True)
        ]

    def named_step(self, speech: str) -> str | None:
        named = _NAMED.match(speech)
        return named.group(1) if named else None
