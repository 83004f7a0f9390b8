"""Answers are the same when they mean the same, whatever a model may write, and generated sums are what they say."""

import random
import sys
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.env.scoring import score
from tinker_cookbook.env.shipped.questions.math import (
    GRADERS,
    MathTask,
    generate_sums,
    last_boxed,
    read_number,
    same_mathematics,
    same_number,
    same_text,
)
from tinker_cookbook.env.task import TaskItem
from tinker_cookbook.env.tasks import get_task
from tinker_cookbook.exceptions import ConfigurationError


@pytest.mark.parametrize(
    ("text", "number"),
    [("12", 12), (" 12. ", 12), ("-3", -3), ("+3", 3), ("0.50", "1/2"), (".5", "1/2"), ("1/2", "1/2"), ("2/4", "1/2"),
     ("$1,234.50", "2469/2"), ("1,000,000", 1000000), ("007", 7), ("1.5/3", "1/2")],
)  # fmt: skip
def test_numbers(text: str, number: str | int) -> None:
    assert read_number(text) == Fraction(number)


@pytest.mark.parametrize(
    "text", ["", "x", "1,00", "1/0", "1e99", "12 apples", "1_000", "--1", "٣", "nan", "9" * 101, "1 2"]
)
def test_what_is_no_number(text: str) -> None:
    assert read_number(text) is None


def test_numbers_are_compared_as_numbers_and_other_references_as_text() -> None:
    assert same_number("0.5", "1/2") and same_number("1000", "$1,000.00") and not same_number("5", "6")
    assert same_number(" north ", "north") and not same_number("3", "north") and not same_number("north", "3")
    assert not same_text("0.5", "1/2")


@given(st.text(max_size=60), st.text(max_size=60))
def test_no_text_breaks_a_comparison(answer: str, reference: str) -> None:
    assert same_number(answer, reference) == same_number(answer.strip(), reference.strip())
    assert same_number(reference, reference)


@given(st.integers(-(10**20), 10**20))
def test_every_whole_number_equals_itself_with_commas(number: int) -> None:
    assert same_number(f"{number:,}", str(number)) and not same_number(str(number + 1), str(number))


@pytest.mark.parametrize(
    ("text", "answer"),
    [(r"so \boxed{12}.", "12"), (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"), (r"\boxed{ a }", "a"),
     (r"\boxed{1", None), ("12", None), (r"\boxed{}", "")],
)  # fmt: skip
def test_the_last_box(text: str, answer: str | None) -> None:
    assert last_boxed(text) == answer


@pytest.mark.parametrize(
    ("answer", "reference", "same"),
    [(r"\frac{1}{2}", "0.5", True), (r"x^2 + 2x + 1", r"(x+1)^2", True), (r"\sqrt{4}", "2", True), ("3", "4", False),
     (r"\{1, 2\}", r"\{2, 1\}", True), ("nonsense", "2", False)],
)  # fmt: skip
def test_latex(answer: str, reference: str, same: bool) -> None:
    pytest.importorskip("math_verify", reason="extra math")
    assert same_mathematics(answer, reference) is same


def test_without_the_package_the_fix_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'math-verify>=0.8'"):
        MathTask(grading="math_verify")
    assert score(MathTask(grading="number"), TaskItem("1", "?", "2"), "<SOLUTION>2.0</SOLUTION>").correct


@pytest.mark.parametrize("grading", sorted(set(GRADERS) - {"math_verify"}))
def test_scores(grading: str) -> None:
    item = TaskItem("1", "What is 6 * 7?", "42")
    tags = MathTask(grading=grading)  # pyright: ignore[reportArgumentType]
    replies = ("<SOLUTION>42</SOLUTION>", "42", "<SOLUTION>41</SOLUTION>")
    assert [score(tags, item, text).reward for text in replies] == [1, 0, 0]
    assert score(tags, item, "42").metrics["parsed"] == 0
    boxed = MathTask(grading=grading, answer_style="boxed")  # pyright: ignore[reportArgumentType]
    assert score(boxed, TaskItem("1", "?", r"Thus \boxed{42}"), r"It is \boxed{42}.").correct
    assert not score(boxed, item, "<SOLUTION>42</SOLUTION>").correct
    assert "boxed" in boxed.messages(item)[0]["content"] and len(boxed.messages(item)) == 2
    asks_itself = TaskItem("1", r"What is 6 * 7? Answer in \boxed{}.", "42")
    assert boxed.messages(asks_itself) == [{"role": "user", "content": asks_itself.question}]


def test_generated_sums_are_different_right_and_repeatable() -> None:
    items = generate_sums(50, 2, 9, random.Random(3), "+-*")
    assert items == generate_sums(50, 2, 9, random.Random(3), "+-*")
    assert len({item.question for item in items}) == 50
    for item in items:
        expression = item.question.removeprefix("What is ").removesuffix("?")
        assert eval(expression) == int(item.reference) >= 0  # three numbers and two signs


def test_sums_that_there_are_not_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="largest=1 with operations=1 gives fewer than 50 different sums"):
        generate_sums(50, 1, 1, random.Random(0))
    for operators in ("", "+/"):
        with pytest.raises(ConfigurationError, match="must be one or more of"):
            generate_sums(5, 1, 9, random.Random(0), operators)


def test_a_reward_of_another_kind_leaves_right_as_it_is() -> None:
    task = get_task("math", "length_penalty")
    assert isinstance(task, MathTask)
    scored = score(task, TaskItem("1", "What is 6 * 7?", "42"), "<SOLUTION>42.0</SOLUTION>")
    assert scored.correct and scored.reward == scored.metrics["reward/length_penalty"] == 4 / 50
