"""The system calls that a program in bubblewrap is denied, as a filter for seccomp.

A user namespace of its own would give a program mounts without a size and most of the kernel to attack. The other calls are
those that no program of a task needs and that reach other processes, keys, or the kernel itself.
"""

import os
import platform
import struct
from typing import NamedTuple

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_NEW_USER_NAMESPACE = 0x10000000
_OTHER_ABI = 0x40000000
"""From here on, numbers are those of x32."""


class _Calls(NamedTuple):
    """Numbers of system calls on one architecture."""

    architecture: int
    clone: int
    unshare: int
    denied: tuple[int, ...]
    """mount, umount2, pivot_root, setns, ptrace, process_vm_readv, process_vm_writev, add_key, request_key, keyctl,
    kexec_load, init_module, finit_module, perf_event_open, bpf, userfaultfd"""


_CLONE3 = 435
_EVERYWHERE = (425, 426, 427, 428, 429, 430, 431, 432, 433, 442)
"""io_uring_setup, io_uring_enter, io_uring_register, and the calls that mount by file descriptor: the same everywhere."""
_MACHINES = {
    "x86_64": _Calls(
        0xC000003E, 56, 272, (165, 166, 155, 308, 101, 310, 311, 248, 249, 250, 246, 175, 313, 298, 321, 323)
    ),
    "aarch64": _Calls(
        0xC00000B7, 220, 97, (40, 39, 41, 268, 117, 270, 271, 217, 218, 219, 104, 105, 273, 241, 280, 282)
    ),
}


def seccomp_filter(machine: str = platform.machine()) -> bytes | None:
    """The filter in the kernel's form (struct sock_filter); None on a machine whose numbers are not known here."""
    calls = _MACHINES.get(machine)
    if calls is None:
        return None
    denied = (*calls.denied, *_EVERYWHERE)
    # Jumps skip forward over what follows: the lines behind the list of denied calls, then those of the four ends.
    body = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_JUMP_EQUAL, 1, 0, calls.architecture),
        (_RETURN, 0, 0, _ERRNO | _EPERM),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_JUMP_AT_LEAST, len(denied) + 6, 0, _OTHER_ABI),
        *((_JUMP_EQUAL, len(denied) + 5 - place, 0, number) for place, number in enumerate(denied)),
        (_JUMP_EQUAL, 6, 0, _CLONE3),
        (_JUMP_EQUAL, 2, 0, calls.unshare),
        (_JUMP_EQUAL, 1, 0, calls.clone),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
        (_JUMP_ANY_BIT, 0, 2, _NEW_USER_NAMESPACE),
        (_RETURN, 0, 0, _ERRNO | _EPERM),
        (_RETURN, 0, 0, _ERRNO | _ENOSYS),  # the C library then takes clone, whose flags can be read
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("<HBBI", *line) for line in body)


def open_filter(filter_bytes: bytes) -> int:
    """A file descriptor to read the filter from, once; the caller closes it."""
    file = os.memfd_create("seccomp")
    os.write(file, filter_bytes)
    os.lseek(file, 0, os.SEEK_SET)
    return file
