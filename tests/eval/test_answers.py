"""What must hold of graders: the answer that a reply gives is read, and nothing else is taken for one."""

import pytest

from tinker_cookbook.env.task import TaskItem
from tinker_cookbook.eval.benchmarks.aime import AIMEBenchmarkBuilder
from tinker_cookbook.eval.benchmarks.answers import (
    check_gsm8k,
    extract_gsm8k_answer,
    extract_mcq_answer,
    extract_number,
    same_integer,
)
from tinker_cookbook.eval.benchmarks.builder import Graded
from tinker_cookbook.eval.benchmarks.math500 import MATH500BenchmarkBuilder
from tinker_cookbook.eval.benchmarks.mbpp import extract_python_code


@pytest.mark.parametrize(
    ("reply", "letter"),
    [
        (r"So \boxed{C}.", "C"),
        (r"\boxed{\text{(B)}}", "B"),
        (r"\boxed{b}", "B"),
        (r"\boxed{D) none of these}", "D"),
        (r"First \boxed{A}, but no: \boxed{D}", "D"),
        (r"\boxed{42}. The answer is (B).", "B"),
        ("The answer is (C).", "C"),
        ("the answer is (c)", "C"),
        ("**Answer:** B", "B"),
        ("Answer: **D**", "D"),
        ("The answer is A at first sight. On reflection the answer is B.", "B"),
        ("The answer is B. That the answer is unclear to some changes nothing.", "B"),
        ("答案是B。", "B"),
        ("答案：C", "C"),
        ("因此选D", "D"),
        ("C", "C"),
        ("C.", "C"),
        ("(A)", "A"),
        ("Options (A) and (C) fail.\nB", "B"),
        ("It must be (D), since a force acts.", "D"),
        ("I think A force acts, hence B", "B"),
        ("The answer is a mystery.", ""),
        ("The answer is Boron.", ""),
        ("A force acts on it.", ""),
        ("I cannot say.", ""),
        ("", ""),
        ("B" + " and so on" * 60, ""),
    ],
)
def test_the_letter_of_a_reply(reply: str, letter: str) -> None:
    assert extract_mcq_answer(reply) == letter


def test_only_letters_of_choices_count() -> None:
    assert extract_mcq_answer("The answer is (G)") == ""
    assert extract_mcq_answer("The answer is (G)", "ABCDEFGHIJ") == "G"
    assert extract_mcq_answer("I would say J", "ABCDEFGHIJ") == "J"
    assert extract_mcq_answer("Certainly I do not know", "ABCDEFGHIJ") == ""


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1,234", "1234"),
        (r"\$18", "18"),
        (r"18\text{ dollars}", "18"),
        (r"1{,}000", "1000"),
        ("-3.5 m", "-3.5"),
        ("x", "x"),
    ],
)
def test_a_number_in_latex(text: str, number: str) -> None:
    assert extract_number(text) == number


@pytest.mark.parametrize(
    ("reply", "number"),
    [
        (r"It is \boxed{72}.", "72"),
        (r"\boxed{1} and then \boxed{\$1,200.50}", "1200.50"),
        ("Half is 24.\n#### 72", "72"),
        ("The answer is 5. No: the answer is $72.", "72"),
        ("Answer: **72** clips in 2 months", "72"),
        ("She sold **72** clips in 2 months", "72"),
        ("48 + 24 = 72 clips.", "72"),
        ("no idea", ""),
        ("#### ", ""),
    ],
)
def test_the_number_of_a_reply(reply: str, number: str) -> None:
    assert extract_gsm8k_answer(reply) == number


@pytest.mark.parametrize(
    ("reply", "expected", "right"),
    [
        ("#### 2,125", "2125", True),
        ("#### 2125", "2,125", True),
        ("#### 72.00", "72", True),
        ("#### 0.5", "0.5", True),
        ("#### -3", "3", False),
        ("#### 721", "72", False),
        ("I do not know", "72", False),
    ],
)
def test_numbers_are_compared_as_numbers(reply: str, expected: str, right: bool) -> None:
    assert check_gsm8k(reply, expected) is right


def test_whole_numbers() -> None:
    assert same_integer("042", "42") and same_integer("42.0", "42")
    assert not same_integer("42.5", "42") and not same_integer("", "42")


@pytest.mark.parametrize(
    ("reply", "right"),
    [(r"\boxed{042}", True), ("The answer is 42.", True), (r"\boxed{42.5}", False), (r"\boxed{x}", False), ("", False)],
)
def test_aime(reply: str, right: bool) -> None:
    assert AIMEBenchmarkBuilder().grade(TaskItem("i", "?", "42"), reply).correct is right


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        (r"\boxed{\frac{3}{4}}", True),
        (r"\boxed{\dfrac34}", True),
        (r"\boxed{0.75}", True),
        (r"\boxed{\frac{4}{3}}", False),
        (r"\frac{3}{4}", False),
        (r"\boxed{\frac{3}{4}", False),
        (r"\boxed{}", False),
    ],
)
def test_math500(reply: str, right: bool) -> None:
    pytest.importorskip("math_verify")
    graded = MATH500BenchmarkBuilder().grade(TaskItem("i", "?", r"\frac{3}{4}"), reply)
    assert isinstance(graded, Graded) and graded.correct is right


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        ("Here:\n```python\ndef f(): ...\n```\nUse:\n```python\nf()\n```", "def f(): ...\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```text\nno\n```\n```py\nx = 2\n```", "x = 2\n"),
        ("x = 3", "x = 3"),
    ],
)
def test_the_program_of_a_reply(reply: str, code: str) -> None:
    assert extract_python_code(reply) == code
