"""What a pass frees on a CPU stays with the process for the next one."""

import ctypes
import platform
import sys

import pytest
import torch

from tests.engine.devices import here
from tests.engine.helpers import cross_entropy_datum
from tinker_local_backend import TrainingClient
from tinker_local_backend.engine.model.memory import keep_freed_memory

pytestmark = [
    pytest.mark.cpu_promise,
    pytest.mark.skipif(
        platform.libc_ver()[0] != "glibc" or not here().is_reference, reason="these are settings of glibc, for CPUs"
    ),
]


def test_pages_are_not_taken_from_the_kernel_for_every_tensor(training: TrainingClient) -> None:
    if sys.platform != "linux":
        pytest.skip("page faults are counted on Linux")
    import resource

    training.forward([cross_entropy_datum(5, 0)], "cross_entropy").result()
    pages = 2048
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(40):
        torch.ones(pages * 4096 // 4)
    # A few more than those of the first: something small may have been put where the last one was.
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < 10 * pages


@pytest.mark.parametrize("variable", [None, "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_settings_of_the_environment_stay(variable: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []

    class Library:
        def mallopt(self, parameter: int, value: int) -> int:
            calls.append((parameter, value))
            return 1

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    for name in ("MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, "1")
    keep_freed_memory()
    assert len(calls) == (2 if variable is None else 0)


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    keep_freed_memory()
