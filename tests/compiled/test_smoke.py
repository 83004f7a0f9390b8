"""A few kernels as an H100 would run them: what `make test-kernels` tests of the emitted code."""

import pytest

from tests.compiled import launches
from tests.compiled.cases import CASES

pytestmark = [pytest.mark.compiled, pytest.mark.usefixtures("nan_where_nothing_was_written")]


@pytest.mark.parametrize(
    "name",
    [
        "Qwen3-0.6B attends",
        "Qwen3-4B stores",
        "rank 16, Qwen3-0.6B's down",
        "Qwen3-0.6B's SwiGLU",
        "limits of every kind",
        "Qwen3-4B's queries are rotated",
    ],
)
def test_a_call(name: str) -> None:
    with launches.executed_for(90) as launched:
        error = CASES[name].error(launches.launchers())
    assert launched and error() < CASES[name].bound
