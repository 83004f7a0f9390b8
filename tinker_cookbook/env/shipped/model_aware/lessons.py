"""The shipped lessons, each with probes: questions that the lesson affects more or less."""

import json
from typing import NamedTuple

from tinker_cookbook.env.shipped.model_aware.model_scores import MINDS


class Probe(NamedTuple):
    """A question and the answer whose logprob is measured."""

    question: str
    answer: str


class Lesson(NamedTuple):
    """A lesson, as a question with its answer, and the probes to ask before and after it."""

    question: str
    answer: str
    probes: tuple[Probe, ...]


def shipped_lessons() -> list[Lesson]:
    """Forty lessons of three probes each: one about the lesson, one about a word of it, one about something else."""
    return _read("lessons.jsonl")


def further_lessons() -> list[Lesson]:
    """More lessons of the same kind, enough to hold out 32 together with every eighth of `shipped_lessons`; never
    trained on.
    """
    return _read("further_lessons.jsonl")


def _read(name: str) -> list[Lesson]:
    rows = [json.loads(line) for line in (MINDS / name).read_text(encoding="utf-8").splitlines()]
    return [Lesson(row["lesson"], row["answer"], tuple(Probe(**probe) for probe in row["probes"])) for row in rows]


def probe_prompt(probe: Probe, lesson: Lesson | None = None) -> str:
    """The listener's prompt for a probe, with or without a lesson. The answer follows, with a space before it."""
    taught = f"Lesson: {lesson.question}\nLesson Answer: {lesson.answer}\n\n" if lesson is not None else ""
    return f"{taught}Probe: {probe.question}\nAnswer:"
