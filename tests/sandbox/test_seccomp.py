"""The filter of system calls, run by a small interpreter of its instructions."""

import struct

import pytest

from tinker_cookbook.sandbox.seccomp import _EVERYWHERE, _MACHINES, seccomp_filter

ALLOW, EPERM, ENOSYS = 0x7FFF0000, 0x50001, 0x50026
NEW_USER, NEW_PID = 0x10000000, 0x20000000


def answer(code: bytes, number: int, architecture: int, argument: int = 0, fourth: int = 0) -> int:
    """What the kernel would do with a call."""
    lines = [struct.unpack_from("<HBBI", code, start) for start in range(0, len(code), 8)]
    place = accumulator = 0
    while True:
        operation, if_true, if_false, operand = lines[place]
        place += 1
        if operation == 0x20:
            accumulator = {0: number, 4: architecture, 16: argument, 40: fourth}[operand]
        elif operation == 0x06:
            return operand
        else:
            holds = {
                0x15: accumulator == operand,
                0x35: accumulator >= operand,
                0x45: bool(accumulator & operand),
            }[operation]
            place += if_true if holds else if_false


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_what_is_denied(machine: str) -> None:
    calls, code = _MACHINES[machine], seccomp_filter(machine)
    assert code is not None
    for number in (*calls.denied, *_EVERYWHERE, 0x40000000 + 1):
        assert answer(code, number, calls.architecture) == EPERM
    for number in (calls.clone, calls.unshare):
        assert answer(code, number, calls.architecture, NEW_USER | NEW_PID) == EPERM
        assert answer(code, number, calls.architecture, NEW_PID) == ALLOW
    assert answer(code, 435, calls.architecture) == ENOSYS
    assert answer(code, 1, 0x40000003) == EPERM  # another architecture, whose numbers mean other calls


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_everything_else_is_allowed(machine: str) -> None:
    calls, code = _MACHINES[machine], seccomp_filter(machine)
    assert code is not None
    listed = {*calls.denied, *_EVERYWHERE, 435}
    assert {answer(code, number, calls.architecture) for number in range(600) if number not in listed} == {ALLOW}


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_memory_that_no_process_maps_alone(machine: str) -> None:
    calls, code = _MACHINES[machine], seccomp_filter(machine, unmapped_memory=False)
    assert code is not None
    denied = {*calls.denied, *_EVERYWHERE, *calls.unmapped, 447}
    for number in denied:
        assert answer(code, number, calls.architecture) == EPERM
    shared, private, anonymous = 1, 2, 32
    assert answer(code, calls.mmap, calls.architecture, fourth=shared | anonymous) == EPERM
    for flags in (shared, private, private | anonymous):
        assert answer(code, calls.mmap, calls.architecture, fourth=flags) == ALLOW
    assert answer(code, calls.clone, calls.architecture, NEW_USER) == EPERM
    assert answer(code, 435, calls.architecture) == ENOSYS
    assert {answer(code, number, calls.architecture) for number in range(600) if number not in denied | {435}} == {
        ALLOW
    }


def test_an_unknown_machine_has_none() -> None:
    assert seccomp_filter("riscv64") is None
