"""A calculator for policies: exact arithmetic on numbers that a model wrote. What cannot be done is said to the model."""

from typing import Annotated

from tinker_cookbook.tool_use.tools import ToolError
from tinker_cookbook.utils.arithmetic import ExpressionError, evaluate, format_number


def calculate(expression: Annotated[str, "numbers, + - * / // % ** and parentheses"]) -> str:
    """Compute an arithmetic expression."""
    try:
        return format_number(evaluate(expression))
    except ExpressionError as error:
        raise ToolError(str(error)) from None
