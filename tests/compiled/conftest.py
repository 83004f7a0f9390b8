"""The launchers of the kernels, on GPUs that are not there."""

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest
import torch

from tests.compiled import launches


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test once for every GPU that the installed triton compiles for here."""
    if "capability" in metafunc.fixturenames:
        try:
            found = launches.capabilities()
        except (
            PackageNotFoundError
        ):  # the tests are collected, too, where they are left out; else they fail without triton
            found = (90,)
        metafunc.parametrize("capability", found, ids=lambda c: f"sm_{c}", scope="session")


@pytest.fixture
def launchers() -> SimpleNamespace:
    return launches.launchers()


@pytest.fixture
def kernels(
    launchers: SimpleNamespace, capability: int, nan_where_nothing_was_written: None
) -> Iterator[SimpleNamespace]:
    """The same, whose launches are compiled and run on the CPU."""
    with launches.executed_for(capability):
        yield launchers


@pytest.fixture
def nan_where_nothing_was_written() -> Iterator[None]:
    """What a launcher allocates and no kernel writes must not be read: it holds NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)
