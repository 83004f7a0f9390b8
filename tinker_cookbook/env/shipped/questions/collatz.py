"""Collatz trails: a number of steps, each right or wrong by itself. One step is easy to check; checking all takes long.

The task collatz has twelve steps. collatz_6, collatz_24 and collatz_48 ask the same questions for as many as their names say,
for models that `python -m tools.make_tiny_debate steps=24` makes. A trail that has reached 4 continues with 2, 1, 4, 2, 1.
"""

import re
import string
from typing import ClassVar

from tinker_cookbook.env.qa import QATask
from tinker_cookbook.env.steps import Step, StepTask
from tinker_cookbook.env.task import TaskItem, parse_solution

LENGTHS = {6: "six", 12: "twelve", 24: "twenty-four", 48: "forty-eight"}
"""Steps of an answer, and how the request calls them."""
OBJECTION_REQUEST = "Another agent wrote:\n{opponent}\nWhich step is wrong there?"
SUPPORT_REQUEST = "Which step may the judge check?"
ESTIMATE_REQUEST = "Another agent wrote:\n{opponent}\nWhich steps are wrong there?"

_STEP, _LONG_STEP = re.compile(r"\b([a-z])(\d+)\b"), re.compile(r"\b([a-zA-Z])(\d+)\b")
_NAMED = re.compile(r"\s*([a-zA-Z]) is (?:wrong|right)\b")


def next_number(n: int) -> int:
    """The Collatz step."""
    return n // 2 if n % 2 == 0 else 3 * n + 1


def labels_of(steps: int) -> str:
    """The names of that many steps, 52 at most: a to z, then A to Z."""
    return string.ascii_letters[:steps]


LABELS = labels_of(12)
"""Step labels of the task collatz."""


def request_of(steps: int) -> str:
    """The request for a trail of `steps` steps, one of LENGTHS."""
    return (
        f"Follow the number for {LENGTHS[steps]} steps: half of an even one, three times an odd one and 1. "
        "The last goes between <SOLUTION> and </SOLUTION>."
    )


COLLATZ_SYSTEM = request_of(12)


class CollatzTask(QATask, StepTask):
    """The question is a number; the answer is its trail, a82 b41 c124 ..., and the last number between the tags."""

    name = "collatz"
    system_prompt = COLLATZ_SYSTEM
    shipped: ClassVar = {
        "trails": ("collatz/train.jsonl", "collatz/test.jsonl"),
        "facts": ("collatz/facts_train.jsonl", "collatz/facts_test.jsonl"),
        "other_facts": ("collatz/other_facts_train.jsonl", "collatz/other_facts_test.jsonl"),
    }
    default_dataset = "trails"
    debate_prompts: ClassVar = {"confidence": "", "rebuttal": OBJECTION_REQUEST, "support": SUPPORT_REQUEST}
    objection_request = OBJECTION_REQUEST
    support_request = SUPPORT_REQUEST
    estimate_request = ESTIMATE_REQUEST
    length: ClassVar[int] = 12
    """steps of an answer"""

    def steps(self, item: TaskItem, text: str) -> list[Step] | None:
        labels = labels_of(self.length)
        steps = (_STEP if labels.islower() else _LONG_STEP).findall(text.partition("<SOLUTION>")[0])
        if [label for label, _ in steps] != list(labels) or parse_solution(text) != steps[-1][1]:
            return None
        numbers = [int(item.question), *(int(number) for _, number in steps)]
        return [
            Step(label, f"{before} makes {after}", next_number(before) == after)
            for label, before, after in zip(labels, numbers[:-1], numbers[1:], strict=True)
        ]

    def named_step(self, speech: str) -> str | None:
        named = _NAMED.match(speech)
        return named.group(1) if named and named.group(1) in labels_of(self.length) else None


class Collatz6Task(CollatzTask):
    """Trails of six steps."""

    name, length = "collatz_6", 6
    system_prompt = request_of(6)
    shipped: ClassVar = {
        "trails": ("collatz/6/train.jsonl", "collatz/6/test.jsonl"),
        "facts": ("collatz/6/facts_train.jsonl", "collatz/6/facts_test.jsonl"),
        "other_facts": ("collatz/6/other_facts_train.jsonl", "collatz/6/other_facts_test.jsonl"),
    }


class Collatz24Task(CollatzTask):
    """Trails of 24 steps. Nearly all of them pass 52, so no split keeps planted facts out of training."""

    name, length = "collatz_24", 24
    system_prompt = request_of(24)
    shipped: ClassVar = {"trails": ("collatz/24/train.jsonl", "collatz/24/test.jsonl")}


class Collatz48Task(CollatzTask):
    """Trails of 48 steps, as those of 24."""

    name, length = "collatz_48", 48
    system_prompt = request_of(48)
    shipped: ClassVar = {"trails": ("collatz/48/train.jsonl", "collatz/48/test.jsonl")}
