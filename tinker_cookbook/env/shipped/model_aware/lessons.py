"""The shipped lessons, each with probes: questions that the lesson bears on more or less."""

import json
from typing import NamedTuple

from tinker_cookbook.env.shipped.model_aware.model_scores import MINDS


class Probe(NamedTuple):
    """A question and the answer whose logprob is asked for."""

    question: str
    answer: str


class Lesson(NamedTuple):
    """Something that is taught, as a question with its answer, and what to ask before and after it."""

    question: str
    answer: str
    probes: tuple[Probe, ...]


def shipped_lessons() -> list[Lesson]:
    """Forty lessons of three probes each: one about the lesson, one about a word of it, one about something else."""
    return _read("lessons.jsonl")


def further_lessons() -> list[Lesson]:
    """As many of the same kind as make, with every eighth of `shipped_lessons`, 32 for evaluation; never trained on."""
    return _read("further_lessons.jsonl")


def _read(name: str) -> list[Lesson]:
    rows = [json.loads(line) for line in (MINDS / name).read_text(encoding="utf-8").splitlines()]
    return [Lesson(row["lesson"], row["answer"], tuple(Probe(**probe) for probe in row["probes"])) for row in rows]


def probe_prompt(probe: Probe, lesson: Lesson | None = None) -> str:
    """A probe as the listener is shown it, after a lesson or without one. Its answer follows with a space before it."""
    taught = f"Lesson: {lesson.question}\nLesson Answer: {lesson.answer}\n\n" if lesson is not None else ""
    return f"{taught}Probe: {probe.question}\nAnswer:"
