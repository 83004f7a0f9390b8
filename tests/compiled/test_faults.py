"""Faults that are planted into kernels, their arguments and their tables: the run on the CPU notices every one."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.compiled import launches
from tests.compiled.cases import CASES, KERNELS
from tests.compiled.launches import Launch
from tests.compiled.memory import MemoryFault
from tests.engine.cuda.cases import BOUNDS, Shape, paged_case, relative_error

pytestmark = [pytest.mark.compiled, pytest.mark.usefixtures("nan_where_nothing_was_written")]

Fault = Callable[[Launch], dict[str, Any]]
"""What a faulty run of a launch is given."""


def noticed(name: str, capability: int, kernel: str, fault: Fault) -> bool:
    """Whether a case is wrong when one of its kernels has a fault."""

    def run(launch: Launch) -> None:
        launch.run(**(fault(launch) if launch.kernel == kernel else {}))

    try:
        with launches.compiled_for(capability, run):
            error = CASES[name].error(launches.launchers())
        # NaN is no number below the bound.
        return not error() < CASES[name].bound
    except MemoryFault:
        return True


PIPELINED = {"_partial_kernel": "Qwen3-0.6B attends", "_shrink_kernel": "rank 16, Qwen3-0.6B's down"}
"""A case for each kernel whose loop loads ahead."""


def test_each_kernel_that_loads_ahead_has_a_case() -> None:
    assert set(PIPELINED) == {name for name, expected in KERNELS.items() if expected.pipelined}


@pytest.mark.parametrize("kernel", PIPELINED)
def test_a_missing_wait(kernel: str, capability: int) -> None:
    """What a kernel multiplies has not arrived yet."""

    def fault(launch: Launch) -> dict[str, Any]:
        changed, count = re.subn(r"cp\.async\.wait_group\s+(?:0x)?\d+", "cp.async.wait_group 99", launch.ptx)
        assert count > 0
        return {"ptx": changed}

    assert noticed(PIPELINED[kernel], capability, kernel, fault)
    assert not noticed(PIPELINED[kernel], capability, kernel, lambda launch: {"ptx": launch.ptx})


def numbers_of(launch: Launch) -> list[str]:
    """Names of its arguments that are integers and not compiled into it: strides and sizes."""
    return [
        name
        for name, value in launch.arguments.items()
        if name not in launch.constants and isinstance(value, int) and not isinstance(value, bool)
    ]


BLOCKS = {"first_end": 128, "second_end": 128}
"""Numbers that are compared with the first columns of blocks alone, and so wrong by a block or not at all."""


@pytest.mark.parametrize(
    "name",
    [
        "Qwen3-0.6B attends",
        "Qwen3-4B stores",
        "rank 32, Qwen3-4B's q, k and v",
        "Qwen3-4B's SwiGLU",
        "Qwen3-4B's joined SwiGLU",
        "Qwen3-4B's residual sum",
        "Qwen3-4B's queries are rotated",
    ],
)
def test_a_wrong_stride_or_size(name: str, capability: int) -> None:
    """Every one that a kernel is given, smaller by as little as keeps what the compiler was told of it."""
    launched: list[Launch] = []
    with launches.compiled_for(capability, launched.append):
        CASES[name].error(launches.launchers())
    unnoticed = []
    for launch in launched:
        for argument in numbers_of(launch):
            value = launch.arguments[argument]
            step = BLOCKS.get(argument, math.gcd(value, 16))

            def fault(other: Launch, argument: str = argument, changed: int = value - step) -> dict[str, Any]:
                return {"changed": {argument: changed}}

            if not noticed(name, capability, launch.kernel, fault):
                unnoticed.append(f"{argument} of {launch.kernel}")
    assert unnoticed == []


@pytest.mark.parametrize("page", [-1, 10_000])
def test_a_page_that_is_not_there(page: int, capability: int) -> None:
    case = paged_case(Shape(), [100, 40], torch.bfloat16)
    case.tables[0, 2] = page
    with (
        launches.executed_for(capability),
        pytest.raises(MemoryFault, match=r"(load|store) of 16 bytes at byte .* of '(keys|values)', which has \d+"),
    ):
        launches.launchers().paged_attention(*case.arguments)


def test_a_page_of_another_row(capability: int) -> None:
    case = paged_case(Shape(), [100, 40], torch.bfloat16)
    expected = case.expected()
    case.tables[0, 2] = case.tables[1, 0]
    with launches.executed_for(capability):
        found = launches.launchers().paged_attention(*case.arguments)
    assert relative_error(found[1], expected[1]) < BOUNDS[torch.bfloat16] < relative_error(found[0], expected[0])
