"""Exact arithmetic on expressions written by a model or a program.

The expression is parsed, never evaluated as code, and everything that could grow is bounded: the length of the text,
the digits of every intermediate result, and powers before they are computed. Errors are ExpressionErrors with a
message that a model can read.
"""

import ast
import decimal
import operator
import re
from collections.abc import Callable
from fractions import Fraction

from tinker_cookbook.exceptions import DataError

MAX_LENGTH = 200
MAX_DIGITS = 50
SHOWN_DIGITS = 12
"""Digits of a result that has no short exact form."""

_ALLOWED = re.compile(r"[0-9.+\-*/%() ]*")
_LIMIT = 10**MAX_DIGITS

_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: a / b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: operator.mod,
}


class ExpressionError(DataError):
    """Not an expression of numbers, or one whose value is undefined or too large."""


def evaluate(expression: str) -> Fraction:
    """The exact value. // and % round towards minus infinity, as in Python.

    Raises:
        ExpressionError: not an expression of numbers, or its value or an intermediate one is too large.
    """
    if len(expression) > MAX_LENGTH:
        raise ExpressionError(f"the expression has {len(expression)} characters; at most {MAX_LENGTH} are allowed")
    if not expression.strip():
        raise ExpressionError("the expression is empty; write something like (2 + 3) * 4")
    if not _ALLOWED.fullmatch(expression):
        strange = "".join(dict.fromkeys(_ALLOWED.sub("", expression)))
        raise ExpressionError(f"only numbers, + - * / // % ** and parentheses are allowed, not {strange!r}")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, MemoryError, RecursionError):
        raise ExpressionError(f"{expression!r} is not an arithmetic expression") from None
    return _value(tree.body, expression.strip())


def format_number(value: Fraction) -> str:
    """Exact if it is a whole number or a short decimal fraction, else rounded to SHOWN_DIGITS significant digits."""
    if value.denominator == 1:
        return str(value.numerator)
    with decimal.localcontext(decimal.Context(prec=SHOWN_DIGITS)):
        quotient = decimal.Decimal(value.numerator) / decimal.Decimal(value.denominator)
    return f"{quotient.normalize():f}"


def _value(node: ast.expr, source: str) -> Fraction:
    match node:
        case ast.Constant(value=int() | float()):
            return _bounded(Fraction(ast.get_source_segment(source, node) or ""))
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            value = _value(operand, source)
            return -value if isinstance(node.op, ast.USub) else value
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left, source), _value(right, source))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            a, b = _value(left, source), _value(right, source)
            if b == 0 and isinstance(op, ast.Div | ast.FloorDiv | ast.Mod):
                raise ExpressionError("division by zero")
            return _bounded(Fraction(_BINARY[type(op)](a, b)))
        case _:
            raise ExpressionError(f"{ast.get_source_segment(source, node)!r} is not arithmetic on numbers")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ExpressionError("the exponent of a power must be a whole number")
    if base == 0 and exponent < 0:
        raise ExpressionError("division by zero")
    if abs(base) not in (0, 1):
        # A lower bound of the number of digits, so that nothing large is ever computed.
        growth = max(abs(base.numerator), base.denominator).bit_length() - 1
        if growth * abs(exponent) > _LIMIT.bit_length():
            raise _too_large()
        return _bounded(base ** int(exponent))
    return Fraction(1) if exponent == 0 else base if exponent % 2 else abs(base)


def _bounded(value: Fraction) -> Fraction:
    if max(abs(value.numerator), value.denominator) >= _LIMIT:
        raise _too_large()
    return value


def _too_large() -> ExpressionError:
    return ExpressionError(
        f"the result or an intermediate value has more than {MAX_DIGITS} digits; use smaller numbers"
    )
