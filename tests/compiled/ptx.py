"""Reads the PTX of one compiled Triton kernel into a program that `machine.py` can run and tests can ask about."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property


class Unsupported(Exception):
    """The program has an instruction, or a use of one, that the interpreter does not know."""


@dataclass(frozen=True)
class Instruction:
    """One statement, such as `@!%p1 ld.global.v2.b32 { %r1, %r2 }, [ %rd1 + 8 ]`."""

    text: str
    guard: str | None
    """the register of its predicate"""
    negated: bool
    """whether it runs where the predicate does not hold"""
    parts: tuple[str, ...]
    """the operation between its points: ("ld", "global", "v2", "b32")"""
    operands: tuple[str, ...]

    @property
    def operation(self) -> str:
        return self.parts[0]

    @property
    def type(self) -> str:
        return self.parts[-1]


@dataclass(frozen=True)
class Program:
    """A kernel."""

    name: str
    threads: int
    """of a block"""
    parameters: tuple[tuple[str, str], ...]
    """type and name of each, in order"""
    widths: dict[str, int]
    """bits of the registers, by the letters of their names; 1 for predicates"""
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    """the index of the instruction that follows each"""
    symbols: frozenset[str] = field(default_factory=frozenset)
    """names of shared memory, which begins at address 0"""

    def bits(self, register: str) -> int:
        prefix = re.match(r"%[a-z]+", register)
        if prefix is None or prefix.group() not in self.widths:
            raise Unsupported(f"{self.name}: register {register!r} is not declared")
        return self.widths[prefix.group()]

    @cached_property
    def loops(self) -> list[tuple[Instruction, ...]]:
        """The instructions of every loop that holds no other loop."""
        spans = [
            (self.labels[instruction.operands[0]], at + 1)
            for at, instruction in enumerate(self.instructions)
            if instruction.operation == "bra" and self.labels[instruction.operands[0]] <= at
        ]
        inner = [span for span in spans if not any(o != span and span[0] <= o[0] and o[1] <= span[1] for o in spans)]
        return [self.instructions[begin:end] for begin, end in inner]

    def find(self, *parts: str) -> list[Instruction]:
        """The instructions whose operation has all these parts."""
        return [i for i in self.instructions if set(parts) <= set(i.parts)]


def split_operands(text: str) -> tuple[str, ...]:
    """`{ %r1, %r2 }, [ %rd1 + 8 ], 4` -> ("{ %r1, %r2 }", "[ %rd1 + 8 ]", "4")"""
    return tuple(part.strip() for part in re.split(r",(?![^{\[]*[}\]])", text) if part.strip())


def members(operand: str) -> tuple[str, ...]:
    """The registers of `{ %r1, %r2 }`, or of one that stands alone."""
    return tuple(part.strip() for part in operand.strip("{} \t").split(","))


def parse_instruction(text: str) -> Instruction:
    found = re.fullmatch(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*)", text, re.DOTALL)
    if found is None:
        raise Unsupported(f"no instruction: {text!r}")
    negated, guard, operation, rest = found.groups()
    parts = tuple(operation.replace("::", "@").split("."))
    return Instruction(text, guard, negated == "!", parts, split_operands(rest))


def parse(text: str) -> Program:
    """The one kernel of a PTX file.

    Raises:
        Unsupported: it holds another function beside the kernel, or a form of statement that is not known.
    """
    text = re.sub(r"/\*.*?\*/", "", re.sub(r"//[^\n]*", "", text), flags=re.DOTALL)
    heads = re.findall(r"\.(?:entry|func)\s+(\w+)", text)
    if len(heads) != 1:
        raise Unsupported(f"expected one function, found {heads}")
    head, _, rest = text.partition(".entry")[2].partition("\n{")
    body = rest.partition("\n}")[0]
    threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", head)
    if threads is None:
        raise Unsupported(f"{heads[0]} does not say how many threads it has")
    parameters = tuple(re.findall(r"\.param\s+\.(\w+)(?:\s+\.\w+(?:\s+\.\w+)*(?:\s+\d+)?)?\s+(\w+)", head))
    widths, instructions, labels = {}, [], {}
    for statement in _statements(body):
        if declared := re.fullmatch(r"\.reg\s+\.(pred|[a-z]+(\d+))\s+(%[a-z]+).*", statement):
            widths[declared.group(3)] = int(declared.group(2) or 1)
        elif statement.endswith(":"):
            labels[statement[:-1]] = len(instructions)
        elif not statement.startswith("."):
            instructions.append(parse_instruction(statement))
    symbols = frozenset(re.findall(r"\.shared\s+(?:\.align\s+\d+\s+)?\.b8\s+(\w+)", text))
    return Program(heads[0], int(threads.group(1)), parameters, widths, tuple(instructions), labels, symbols)


def _statements(body: str) -> Iterator[str]:
    """Instructions and declarations without their semicolon, and labels with their colon."""
    kept = [line for line in body.splitlines() if not re.match(r"\s*\.(loc|file)\b", line)]
    for piece in "\n".join(kept).split(";"):
        while label := re.match(r"\s*(\$?[A-Za-z_$][\w$]*:)(?!:)", piece):
            yield label.group(1)
            piece = piece[label.end() :]
        if statement := " ".join(piece.split()):
            yield statement
