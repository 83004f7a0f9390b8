"""The emitted code, run on the CPU at the shapes of real models, against float64."""

import pytest

from tests.compiled import launches
from tests.compiled.cases import CASES, KERNELS
from tests.compiled.memory import Tensors

pytestmark = [pytest.mark.compiled, pytest.mark.usefixtures("nan_where_nothing_was_written")]

LARGE_BYTES = 1 << 16
"""Size from which on a tensor must be read by 16 bytes: below, a launch takes its time whatever it reads."""

WIDE_SHARE = 0.9


@pytest.mark.parametrize("name", CASES)
def test_results(name: str, capability: int) -> None:
    with launches.executed_for(capability) as launched:
        error = CASES[name].error(launches.launchers())
    assert error() < CASES[name].bound
    narrow = {
        f"{launch.kernel} reads {tensor}": f"{share:.0%} by 16 bytes"
        for launch, memory in launched
        for tensor, share in wide_shares(memory).items()
        if share < WIDE_SHARE and tensor not in KERNELS[launch.kernel].narrow
    }
    assert narrow == {}


def wide_shares(memory: Tensors) -> dict[str, float]:
    """Of each large tensor that was read: the share of its bytes that came by 16 bytes or more a thread."""
    totals = {name: sum(count for (of, _), count in memory.read.items() if of == name) for name in memory.names}
    wide = {name: sum(n for (of, size), n in memory.read.items() if of == name and size >= 16) for name in totals}
    large = [name for name, count in totals.items() if count and memory.sizes[name] >= LARGE_BYTES]
    return {name: wide[name] / totals[name] for name in large}
