"""Insertion sort, written down: each step inserts one more number. Only a single step is quick to check."""

import re
from typing import ClassVar

from tinker_cookbook.env.qa import QATask
from tinker_cookbook.env.steps import Step, StepTask
from tinker_cookbook.env.task import TaskItem, parse_solution

SORTING_SYSTEM = (
    "Sort the numbers by insertion. After each number, in the order in which they are given, write a line with the count so "
    "far, a colon, and the numbers that are sorted, such as 2: 3 7. The last line's numbers go between <SOLUTION> and "
    "</SOLUTION>."
)
OBJECTION_REQUEST = "Another agent wrote:\n{opponent}\nWhich step is wrong there? Reply such as: step 2 is wrong"
SUPPORT_REQUEST = "Which step may the judge check? Reply such as: step 2 is right"

_LINE = re.compile(r"^\s*(\d{1,3}):([ \d]*)$", re.MULTILINE)
_NAMED = re.compile(r"\s*step (\d{1,3}) is (?:wrong|right)\b", re.IGNORECASE)


def trace(numbers: list[int]) -> str:
    """The right answer, as its lines and the tag."""
    lines = [f"{i}: {_text(sorted(numbers[:i]))}" for i in range(1, len(numbers) + 1)]
    return "\n".join([*lines, f"<SOLUTION>{_text(sorted(numbers))}</SOLUTION>"])


def _text(numbers: list[int]) -> str:
    return " ".join(map(str, numbers))


class SortingTask(QATask, StepTask):
    """The question is numbers, the answer is a line after each insertion, and the sorted numbers between the tags.

    A step holds if its line is the line before it with the next number in its place, whether that line was right or not.
    """

    name = "sorting"
    system_prompt = SORTING_SYSTEM
    shipped: ClassVar = {"numbers": ("sorting/train.jsonl", "sorting/test.jsonl")}
    default_dataset = "numbers"
    debate_prompts: ClassVar = {"confidence": "", "rebuttal": OBJECTION_REQUEST, "support": SUPPORT_REQUEST}
    objection_request = OBJECTION_REQUEST
    support_request = SUPPORT_REQUEST

    def is_right(self, item: TaskItem, solution: str) -> bool:
        return solution.split() == item.reference.split()

    def steps(self, item: TaskItem, text: str) -> list[Step] | None:
        numbers = [int(number) for number in item.question.split()]
        lines = _LINE.findall(text.partition("<SOLUTION>")[0])
        written = [[int(number) for number in line.split()] for _, line in lines]
        solution = parse_solution(text)
        if [int(label) for label, _ in lines] != list(range(1, len(numbers) + 1)) or solution is None:
            return None
        if solution.split() != lines[-1][1].split():
            return None
        steps: list[Step] = []
        before: list[int] = []
        for (label, _), number, after in zip(lines, numbers, written, strict=True):
            claim = f"{number} put into {_text(before) or 'nothing'} makes {_text(after) or 'nothing'}"
            steps.append(Step(label, claim, sorted([*before, number]) == after))
            before = after
        return steps

    def named_step(self, speech: str) -> str | None:
        named = _NAMED.match(speech)
        return str(int(named.group(1))) if named else None
