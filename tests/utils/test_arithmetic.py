"""Expressions agree with exact arithmetic, and whatever a model may write ends in a number or a readable error."""

import ast
import re
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.drawn import examples
from tinker_cookbook.utils import arithmetic
from tinker_cookbook.utils.arithmetic import MAX_DIGITS, MAX_LENGTH, ExpressionError, evaluate, format_number

_OPERATORS = {"+": Fraction.__add__, "-": Fraction.__sub__, "*": Fraction.__mul__, "/": Fraction.__truediv__,
              "//": Fraction.__floordiv__, "%": Fraction.__mod__}  # fmt: skip
_numbers = st.one_of(st.integers(0, 10**6), st.decimals(0, 1000, places=3, allow_nan=False)).map(str)


@st.composite
def expressions(draw: st.DrawFn, depth: int = 3) -> tuple[str, Fraction | None]:
    """An expression and its exact value by fractions alone; None where it divides by zero."""
    if depth == 0 or draw(st.booleans()):
        text = draw(_numbers)
        return text, Fraction(text)
    (left, a), (right, b) = draw(expressions(depth - 1)), draw(expressions(depth - 1))
    sign = draw(st.sampled_from(sorted(_OPERATORS)))
    text = f"({left} {sign} {right})"
    if draw(st.booleans()):
        text, a, b, negate = f"-{text}", a, b, True
    else:
        negate = False
    if a is None or b is None or (b == 0 and sign in ("/", "//", "%")):
        return text, None
    value = Fraction(_OPERATORS[sign](a, b))
    return text, -value if negate else value


@examples(300)
@given(expressions())
def test_agrees_with_fractions(case: tuple[str, Fraction | None]) -> None:
    text, value = case
    if value is None:
        with pytest.raises(ExpressionError, match="division by zero"):
            evaluate(text)
    elif len(text) <= MAX_LENGTH:
        assert evaluate(text) == value


@given(st.integers(-50, 50), st.sampled_from(["+", "-", "*"]), st.integers(0, 50), st.sampled_from(["+", "-", "*"]),
       st.integers(0, 50))  # fmt: skip
def test_precedence_is_python_s(a: int, first: str, b: int, second: str, c: int) -> None:
    text = f"{a} {first} {b} {second} {c}"
    assert format_number(evaluate(text)) == str(eval(text))  # the text is made of five numbers and signs


@given(st.integers(-12, 12), st.integers(-12, 12))
def test_powers(base: int, exponent: int) -> None:
    if base == 0 and exponent < 0:
        with pytest.raises(ExpressionError, match="division by zero"):
            evaluate(f"({base}) ** ({exponent})")
    else:
        assert evaluate(f"({base}) ** ({exponent})") == Fraction(base) ** exponent


@pytest.mark.parametrize(
    ("text", "shown"),
    [("1 / 4", "0.25"), ("0.1 + 0.2", "0.3"), ("2 / 3", "0.666666666667"), ("10 / 5", "2"), ("-7 // 2", "-4"),
     ("-7 % 3", "2"), ("1 / 8000", "0.000125"), ("2 ** 10", "1024"), (" 3 ", "3"), ("-2 ** 2", "-4"), ("0 ** 0", "1"),
     ("10 ** 40 / 3", "3333333333330000000000000000000000000000")],
)  # fmt: skip
def test_what_the_model_reads(text: str, shown: str) -> None:
    assert format_number(evaluate(text)) == shown


@given(st.fractions(max_denominator=10**6))
def test_a_shown_number_is_exact_or_rounded_to_twelve_digits(value: Fraction) -> None:
    shown = Fraction(Decimal(format_number(value)))
    assert abs(shown - value) <= abs(value) * Fraction(1, 10**11)
    if value.denominator == 1:
        assert shown == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("9 ** 9 ** 9", "more than 50 digits"),
        ("9 ** (9 ** 9)", "more than 50 digits"),
        ("2 ** 99999999999999999999", "more than 50 digits"),
        ("(1/3) ** 9999", "more than 50 digits"),
        ("0.1 ** 9999999", "more than 50 digits"),
        ("9" * 60, "more than 50 digits"),
        ("1 / " + "9" * 60, "more than 50 digits"),
        ("*".join(["99999999"] * 20), "more than 50 digits"),
        ("2 ** 0.5", "exponent of a power must be a whole number"),
        ("0 ** -1", "division by zero"),
        ("1 / 0", "division by zero"),
        ("1 // (2 - 2)", "division by zero"),
        ("1 % 0", "division by zero"),
        ("__import__('os').system('ls')", "are allowed, not"),
        ("a + 1", "not 'a'"),
        ("(1).real", "not 'real'"),
        ("1 .__class__", "are allowed, not"),
        ("1e999", "not 'e'"),
        ("1_000", "not '_'"),
        ("1, 2", "not ','"),
        ("3 ^ 2", "not '^'"),
        ("1 < 2", "not '<'"),
        ("1\n2", "are allowed, not"),
        ("١ + ٢", "are allowed, not"),
        ("(1)(2)", "is not arithmetic on numbers"),
        ("()", "is not arithmetic on numbers"),
        ("1 +", "is not an arithmetic expression"),
        ("(((", "is not an arithmetic expression"),
        ("(" * 150, "is not an arithmetic expression"),
        ("007", "is not an arithmetic expression"),
        ("1.2.3", "is not an arithmetic expression"),
        ("*3", "is not"),
        ("", "is empty"),
        ("   ", "is empty"),
        ("1" + "+1" * 100, "has 201 characters; at most 200 are allowed"),
    ],
    ids=repr,
)
def test_what_cannot_be_done_is_said(text: str, message: str) -> None:
    with pytest.raises(ExpressionError, match=re.escape(message)):
        evaluate(text)


@examples(500)
@given(st.one_of(st.text(max_size=40), st.text(alphabet="0123456789.+-*/%() ", max_size=60)))
def test_any_text_gives_a_number_or_an_error_to_read(text: str) -> None:
    try:
        value = evaluate(text)
    except ExpressionError as error:
        assert str(error)
    else:
        assert max(abs(value.numerator), value.denominator) < 10**MAX_DIGITS
        Fraction(format_number(value))


@given(st.text(alphabet="-+ ", min_size=100, max_size=150))
def test_long_chains_of_signs_do_no_harm(signs: str) -> None:
    minus = signs.count("-")
    assert evaluate(f"{signs}1") == (-1) ** minus


def test_the_module_runs_no_code() -> None:
    with open(arithmetic.__file__) as file:
        tree = ast.parse(file.read())
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert not names & {"eval", "exec", "compile", "__import__"}
