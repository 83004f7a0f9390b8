"""Runs a program on a CPU: many blocks of a launch at once, all their threads in step, in numpy.

What is real: the code that Triton emitted, in its real types, with the layout of its shared memory, and copies to it that land
when the program waits for them. What is not: time, and races between the threads of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import torch

from tests.compiled.bits import UNSIGNED, Array, literal, resized, type_of
from tests.compiled.memory import Shared, Tensors
from tests.compiled.ptx import Instruction, Program, Unsupported

WARP = 32
LANES = 1 << 14
"""Threads that run at once: enough that numpy's work outweighs Python's, and few enough for the processor's cache."""

Mask = Array | None
"""Threads that an instruction runs for; None for all."""

Step = Callable[["Group", Mask], None]
Decoder = Callable[[Instruction, Program], Step]


@dataclass
class Copies:
    """Asynchronous copies to shared memory that have not landed: addresses, values and whether the thread copies at all."""

    addresses: Array
    values: Array
    active: Array


@dataclass
class Group:
    """Blocks that have gone the same way so far."""

    blocks: Array
    """(blocks, 3)"""
    grid: tuple[int, int, int]
    program: Program
    memory: Tensors
    arguments: Mapping[str, int | float]
    """pointers and numbers, by the names of the program's parameters"""
    shared: Shared
    registers: dict[str, Array] = field(default_factory=dict)
    open: list[Copies] = field(default_factory=list)
    """copies since the last commit"""
    committed: list[list[Copies]] = field(default_factory=list)
    at: int = 0

    def __post_init__(self) -> None:
        self.lanes = len(self.blocks) * self.program.threads
        thread = np.arange(self.program.threads, dtype=np.uint32)
        self.thread = np.tile(thread, len(self.blocks))
        self.block = np.repeat(np.arange(len(self.blocks)), self.program.threads)

    def special(self, name: str) -> Array:
        """A register that only the machine writes."""
        kind, _, axis = name.partition(".")
        if axis:
            number = "xyz".index(axis)
            if kind == "%ctaid":
                return self.blocks[self.block, number].astype(np.uint32)
            whole = {"%nctaid": self.grid[number], "%ntid": self.program.threads if number == 0 else 1}
            if kind == "%tid":
                return self.thread if number == 0 else np.zeros(self.lanes, np.uint32)
            if kind in whole:
                return np.full(self.lanes, whole[kind], np.uint32)
        elif kind == "%laneid":
            return self.thread % np.uint32(WARP)
        elif kind == "%warpid":
            return self.thread // np.uint32(WARP)
        raise Unsupported(f"special register {name!r}")

    def get(self, name: str) -> Array:
        """(lanes,) bits. What was never written is NaN and true."""
        found = self.registers.get(name)
        if found is None:
            width = self.program.bits(name)
            found = self.registers[name] = np.full(self.lanes, (1 << width) - 1, UNSIGNED[width])
        return found

    def put(self, name: str, bits: Array, mask: Mask = None) -> None:
        if name == "_":
            return
        bits = resized(bits, self.program.bits(name))
        if bits.shape != (self.lanes,):  # the same for all
            bits = np.full(self.lanes, bits)
        self.registers[name] = bits if mask is None else np.where(mask, bits, self.get(name))

    def parted(self, taken: Array) -> Group:
        """Those of the blocks where a branch is taken, or is not."""
        kept = np.nonzero(taken)[0]
        threads, size = self.program.threads, len(self.blocks)

        def of(values: Array) -> Array:
            return values.reshape(size, threads, *values.shape[1:])[kept].reshape(-1, *values.shape[1:])

        def copies(group: list[Copies]) -> list[Copies]:
            return [Copies(of(c.addresses), of(c.values), of(c.active)) for c in group]

        return Group(
            self.blocks[kept],
            self.grid,
            self.program,
            self.memory,
            self.arguments,
            self.shared.of(kept),
            {name: of(bits) for name, bits in self.registers.items()},
            copies(self.open),
            [copies(group) for group in self.committed],
            self.at,
        )

    def guard(self, instruction: Instruction) -> Array | None:
        if instruction.guard is None:
            return None
        taken = self.get(instruction.guard)
        return ~taken if instruction.negated else taken


def source(operand: str, program: Program, width: int) -> Callable[[Group], Array]:
    """How an instruction reads an operand: the bits of a register, of a special one, of a number or of a name's address."""
    if operand.startswith("%"):
        name = operand
        if "." in name or name in ("%laneid", "%warpid"):
            return lambda group: resized(group.special(name), width)
        if program.bits(name) == width:
            return lambda group: group.get(name)
        return lambda group: resized(group.get(name), width)
    bits = np.array(0, UNSIGNED[width]) if operand in program.symbols else literal(operand, width)
    return lambda group: bits


def number(operand: str, program: Program, type_name: str) -> Callable[[Group], Array]:
    """The same as a number of a type."""
    kind = type_of(type_name)
    bits = source(operand, program, kind.bits)
    return lambda group: kind.numbers(bits(group))


class Machine:
    """One compiled kernel, ready to run."""

    def __init__(self, program: Program, shared: int, decoders: Mapping[str, Decoder]) -> None:
        self.program, self.shared = program, shared
        self._steps: list[Step | None] = []
        for instruction in program.instructions:
            if instruction.operation in ("bra", "ret", "exit"):
                self._steps.append(None)
                continue
            if instruction.operation not in decoders:
                raise Unsupported(f"{program.name}: {instruction.text!r}")
            self._steps.append(decoders[instruction.operation](instruction, program))

    def run(self, grid: Sequence[int], given: Sequence[tuple[str, torch.Tensor | int | float]]) -> Tensors:
        """All blocks of a launch; the tensors are read and written in place.

        Args:
            given: name and value of each parameter, in their order. Names are for messages and counts.
        """
        memory = Tensors({name: value for name, value in given if isinstance(value, torch.Tensor)})
        arguments = {
            parameter: memory.pointer(name) if isinstance(value, torch.Tensor) else value
            for (_, parameter), (name, value) in zip(self.program.parameters, given, strict=True)
        }
        x, y, z = (*grid, 1, 1)[:3]
        sizes = (x, y, z)
        every = np.array(list(product(*map(range, reversed(sizes)))), np.int64).reshape(-1, 3)[:, ::-1]
        together = max(1, LANES // self.program.threads)
        with np.errstate(all="ignore"):
            for start in range(0, len(every), together):
                blocks = every[start : start + together]
                shared = Shared(len(blocks), self.shared)
                waiting = [Group(blocks, sizes, self.program, memory, arguments, shared)]
                while waiting:
                    waiting.extend(self._run_until_parted(waiting.pop()))
        return memory

    def _run_until_parted(self, group: Group) -> Iterator[Group]:
        """Runs blocks to their end, or until they go two ways, which then come back."""
        instructions = self.program.instructions
        while group.at < len(instructions):
            instruction, step = instructions[group.at], self._steps[group.at]
            mask = group.guard(instruction)
            if step is not None:
                step(group, None if mask is None or mask.all() else mask)
                group.at += 1
                continue
            target = len(instructions)
            if instruction.operation == "bra":
                target = self.program.labels[instruction.operands[0]]
            if mask is None or mask.all():
                group.at = target
            elif not mask.any():
                group.at += 1
            else:
                taken = mask.reshape(-1, self.program.threads)
                if (taken.any(1) != taken.all(1)).any():
                    raise Unsupported(f"{self.program.name}: threads of one block part at {instruction.text!r}")
                stay, leave = group.parted(~taken[:, 0]), group.parted(taken[:, 0])
                stay.at, leave.at = group.at + 1, target
                yield stay
                yield leave
                return
