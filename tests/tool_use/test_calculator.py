"""The calculator answers with a number, or with an error that tells the model why not."""

import pytest

from tinker_cookbook.tool_use.ready_made import calculate
from tinker_cookbook.tool_use.tools import ToolError


@pytest.mark.parametrize(("text", "shown"), [("2 / 3", "0.666666666667"), ("(2 + 3) * 4", "20"), ("-7 // 2", "-4")])
def test_what_the_model_reads(text: str, shown: str) -> None:
    assert calculate(text) == shown


@pytest.mark.parametrize(
    ("text", "message"), [("1 / 0", "division by zero"), ("9 ** 9 ** 9", "more than 50 digits"), ("", "is empty")]
)
def test_what_cannot_be_done_is_said_to_the_model(text: str, message: str) -> None:
    with pytest.raises(ToolError, match=message):
        calculate(text)
