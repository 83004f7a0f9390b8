"""A seccomp filter with the system calls that a program in bubblewrap is denied.

In a new user namespace a program could create mounts of any size and reach most of the kernel. The other denied calls reach
other processes, keys, or the kernel itself, and no task needs them.
"""

import os
import platform
import struct
from collections.abc import Sequence
from typing import NamedTuple

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_NEW_USER_NAMESPACE = 0x10000000
_MAP_SHARED, _MAP_ANONYMOUS = 0x01, 0x20
_OTHER_ABI = 0x40000000
"""First number of an x32 call."""


class _Calls(NamedTuple):
    """Numbers of system calls on one architecture."""

    architecture: int
    clone: int
    unshare: int
    mmap: int
    denied: tuple[int, ...]
    """mount, umount2, pivot_root, setns, ptrace, process_vm_readv, process_vm_writev, add_key, request_key, keyctl,
    kexec_load, init_module, finit_module, perf_event_open, bpf, userfaultfd"""
    unmapped: tuple[int, ...]
    """memfd_create, shmget, msgget, semget"""


_CLONE3, _MEMFD_SECRET = 435, 447
_EVERYWHERE = (425, 426, 427, 428, 429, 430, 431, 432, 433, 442)
"""io_uring_setup, io_uring_enter, io_uring_register, and the mount calls by file descriptor: the same on all architectures."""
_MACHINES = {
    "x86_64": _Calls(
        0xC000003E,
        clone=56,
        unshare=272,
        mmap=9,
        denied=(165, 166, 155, 308, 101, 310, 311, 248, 249, 250, 246, 175, 313, 298, 321, 323),
        unmapped=(319, 29, 68, 64),
    ),
    "aarch64": _Calls(
        0xC00000B7,
        clone=220,
        unshare=97,
        mmap=222,
        denied=(40, 39, 41, 268, 117, 270, 271, 217, 218, 219, 104, 105, 273, 241, 280, 282),
        unmapped=(279, 194, 186, 190),
    ),
}


class _Line(NamedTuple):
    """An instruction; jumps name their target, "" is the next instruction."""

    code: int
    operand: int
    if_true: str = ""
    if_false: str = ""
    name: str = ""


def seccomp_filter(machine: str = platform.machine(), unmapped_memory: bool = True) -> bytes | None:
    """The filter in the kernel's form (struct sock_filter); None on an unknown architecture.

    Args:
        unmapped_memory: whether to allow memory that outlives its mappings or is shared by processes: memfd, System V
            segments and queues, shared anonymous mappings. Per-process limits do not count it.
    """
    calls = _MACHINES.get(machine)
    if calls is None:
        return None
    denied = (*calls.denied, *_EVERYWHERE, *(() if unmapped_memory else (*calls.unmapped, _MEMFD_SECRET)))
    lines = [
        _Line(_LOAD, _ARCHITECTURE_AT),
        _Line(_JUMP_EQUAL, calls.architecture, if_false="denied"),
        _Line(_LOAD, _NUMBER_AT),
        _Line(_JUMP_AT_LEAST, _OTHER_ABI, if_true="denied"),
        *(_Line(_JUMP_EQUAL, number, if_true="denied") for number in denied),
        _Line(_JUMP_EQUAL, _CLONE3, if_true="absent"),
        _Line(_JUMP_EQUAL, calls.unshare, if_true="namespaces"),
        _Line(_JUMP_EQUAL, calls.clone, if_true="namespaces"),
        *([] if unmapped_memory else [_Line(_JUMP_EQUAL, calls.mmap, if_true="mapping")]),
        _Line(_RETURN, _ALLOW),
        _Line(_LOAD, _ARGUMENTS_AT, name="namespaces"),
        _Line(_JUMP_ANY_BIT, _NEW_USER_NAMESPACE, if_true="denied", if_false="allowed"),
        _Line(_LOAD, _ARGUMENTS_AT + 3 * 8, name="mapping"),
        _Line(_JUMP_ANY_BIT, _MAP_SHARED, if_false="allowed"),
        _Line(_JUMP_ANY_BIT, _MAP_ANONYMOUS, if_true="denied", if_false="allowed"),
        _Line(_RETURN, _ERRNO | _EPERM, name="denied"),
        _Line(
            _RETURN, _ERRNO | _ENOSYS, name="absent"
        ),  # the C library falls back to clone, whose flags can be checked
        _Line(_RETURN, _ALLOW, name="allowed"),
    ]
    return _assembled(lines)


def _assembled(lines: Sequence[_Line]) -> bytes:
    """The program's bytes, with jump targets as numbers of instructions to skip."""
    indices = {line.name: index for index, line in enumerate(lines) if line.name}

    def skipped(index: int, name: str) -> int:
        return indices[name] - index - 1 if name else 0

    return b"".join(
        struct.pack("<HBBI", line.code, skipped(index, line.if_true), skipped(index, line.if_false), line.operand)
        for index, line in enumerate(lines)
    )


def open_filter(filter_bytes: bytes) -> int:
    """A file descriptor with the filter, to be read once; the caller closes it."""
    file = os.memfd_create("seccomp")
    os.write(file, filter_bytes)
    os.lseek(file, 0, os.SEEK_SET)
    return file
