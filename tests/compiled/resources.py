"""What a compiled kernel takes of a GPU, read from its machine code with the disassembler that comes with Triton."""

from __future__ import annotations

import functools
import importlib
import re
import subprocess
import tempfile

from tests.compiled.launches import Launch
from tests.compiled.ptx import Instruction

TENSOR_CORES = r"\b(HMMA|HGMMA|UTCHMMA)\b"
LOCAL_MEMORY = r"\b(LDL|STL)\b"
"""Loads and stores of registers that were spilled."""


@functools.cache
def machine_code(cubin: bytes) -> str:
    """The disassembly."""
    tool = importlib.import_module("triton").knobs.nvidia.cuobjdump.path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout


def count(launch: Launch, pattern: str) -> int:
    """Instructions of the machine code that match."""
    code = machine_code(launch.cubin)
    assert re.search(r"\bEXIT\b", code), f"{launch.label}: no machine code was read"
    return len(re.findall(pattern, code))


def multiplies(instruction: Instruction) -> bool:
    return instruction.operation in ("mma", "wgmma", "tcgen05")


def waits_in_loops(launch: Launch) -> list[int]:
    """How many groups of copies may still be on their way at each wait of a loop that multiplies matrices."""
    found = []
    for loop in launch.program.loops:
        if any(multiplies(instruction) for instruction in loop):
            found += [
                int(instruction.operands[0], 0)
                for instruction in loop
                if instruction.operation in ("cp", "wgmma") and "wait_group" in ".".join(instruction.parts)
            ]
    return found
