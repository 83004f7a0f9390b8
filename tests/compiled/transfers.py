"""Instructions that move numbers: to and from memory, between the threads of a warp, and through its matrix unit."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from tests.compiled.bits import UNSIGNED, Array, resized, type_of
from tests.compiled.machine import WARP, Copies, Decoder, Group, Mask, Step, source
from tests.compiled.memory import POISON
from tests.compiled.ptx import Instruction, Program, Unsupported, members

LANE = np.arange(WARP)
ROW, COLUMN = LANE // 4, 2 * (LANE % 4)
"""Where the two 16-bit numbers of a thread's register lie in a tile of 8 by 8, and the first two of a 16 by 8 sum."""


def address(operand: str, program: Program) -> Callable[[Group], Array]:
    """That of `[ %rd1 + 8 ]` or `[ name ]`, 64 bits wide."""
    found = re.fullmatch(r"\[\s*([%\w]+)\s*(?:\+\s*(-?\w+))?\s*\]", operand)
    if found is None:
        raise Unsupported(f"address {operand!r}")
    base, offset = source(found.group(1), program, 64), np.int64(int(found.group(2) or "0", 0))
    return lambda group: np.broadcast_to((base(group).view(np.int64) + offset).view(np.uint64), group.lanes)


def _lanes(group: Group, mask: Mask) -> Array:
    return np.arange(group.lanes) if mask is None else np.nonzero(mask)[0]


def _space(instruction: Instruction) -> str:
    spaces = {part.partition("@")[0] for part in instruction.parts} & {"param", "global", "shared"}
    if len(spaces) != 1 or {"shared@cluster", "volatile"} & set(instruction.parts):
        raise Unsupported(instruction.text)
    return spaces.pop()


def load(instruction: Instruction, program: Program) -> Step:
    space, kind, names = _space(instruction), type_of(instruction.type), members(instruction.operands[0])
    if space == "param":
        return _load_parameter(instruction)
    at = address(instruction.operands[1], program)

    def step(group: Group, mask: Mask) -> None:
        lanes = _lanes(group, mask)
        if not len(lanes):
            return
        if space == "global":
            found = group.memory.load(at(group)[lanes], kind.bits, len(names))
        else:
            found = group.shared.load(at(group)[lanes], group.block[lanes], kind.bits, len(names))
        for number, name in enumerate(names):
            width = program.bits(name)
            bits = np.ascontiguousarray(found[:, number])
            if kind.signed and width > kind.bits:
                bits = kind.numbers(bits).astype(f"i{width // 8}").view(UNSIGNED[width])
            every = np.zeros(group.lanes, UNSIGNED[width])
            every[lanes] = resized(bits, width)
            group.put(name, every, mask)

    return step


def _load_parameter(instruction: Instruction) -> Step:
    name, kind = instruction.operands[1].strip("[] "), type_of(instruction.type)

    def step(group: Group, mask: Mask) -> None:
        value = group.arguments[name]
        if isinstance(value, float):
            bits = np.array(value, np.float32 if kind.bits == 32 else np.float64).view(UNSIGNED[kind.bits])
        else:
            bits = np.array(value & ((1 << kind.bits) - 1), UNSIGNED[kind.bits])
        group.put(instruction.operands[0], bits, mask)

    return step


def store(instruction: Instruction, program: Program) -> Step:
    space, width = _space(instruction), type_of(instruction.type).bits
    at = address(instruction.operands[0], program)
    values = [source(operand, program, width) for operand in members(instruction.operands[1])]

    def step(group: Group, mask: Mask) -> None:
        lanes = _lanes(group, mask)
        if not len(lanes):
            return
        stored = np.stack([np.broadcast_to(value(group), group.lanes)[lanes] for value in values], axis=1)
        if space == "global":
            group.memory.store(at(group)[lanes], stored)
        else:
            group.shared.store(at(group)[lanes], group.block[lanes], stored)

    return step


def copy(instruction: Instruction, program: Program) -> Step:
    """cp.async: what it writes is poisoned at once, and arrives when its group is waited for."""
    if "commit_group" in instruction.parts:
        return _commit
    if "wait_group" in instruction.parts:
        return _wait(int(instruction.operands[0], 0))
    if instruction.parts[:2] != ("cp", "async") or not {"ca", "cg"} & set(instruction.parts):
        raise Unsupported(instruction.text)
    to, of = (address(operand, program) for operand in instruction.operands[:2])
    size = int(instruction.operands[2], 0)
    taken = source(instruction.operands[3] if len(instruction.operands) > 3 else str(size), program, 32)

    def step(group: Group, mask: Mask) -> None:
        lanes = _lanes(group, mask)
        if not len(lanes):
            return
        count = np.broadcast_to(taken(group), group.lanes)
        if not np.isin(count[lanes], (0, size)).all():
            raise Unsupported(f"a part of a copy: {instruction.text!r}")
        values = np.zeros((group.lanes, size // 4), np.uint32)  # what is not copied is filled with zeros
        reading = lanes[count[lanes] > 0]
        if len(reading):
            values[reading] = group.memory.load(of(group)[reading], 32, size // 4)
        active = np.zeros(group.lanes, bool)
        active[lanes] = True
        copies = Copies(to(group), values, active)
        _land(group, copies, np.full_like(values, POISON * 0x01010101))
        group.open.append(copies)

    return step


def _land(group: Group, copies: Copies, values: Array) -> None:
    lanes = np.nonzero(copies.active)[0]
    group.shared.store(copies.addresses[lanes], group.block[lanes], values[lanes])


def _commit(group: Group, mask: Mask) -> None:
    group.committed.append(group.open)
    group.open = []


def _wait(remaining: int) -> Step:
    def step(group: Group, mask: Mask) -> None:
        while len(group.committed) > remaining:
            for copies in group.committed.pop(0):
                if copies.active.any():
                    _land(group, copies, copies.values)

    return step


def shuffle(instruction: Instruction, program: Program) -> Step:
    """shfl: a register of another thread of the warp; a thread that would read beyond the warp reads its own."""
    how = instruction.parts[2]
    value, by, bounds, mask_bits = (source(operand, program, 32) for operand in instruction.operands[1:5])
    name = instruction.operands[0].partition("|")[0]
    chosen = {
        "bfly": lambda by: LANE ^ by,
        "idx": lambda by: by & (WARP - 1),
        "down": lambda by: LANE + by,
        "up": lambda by: LANE - by,
    }[how]

    def step(group: Group, mask: Mask) -> None:
        limits = bounds(group)
        if mask is not None or (mask_bits(group) != 0xFFFFFFFF).any() or (limits != (0 if how == "up" else 31)).any():
            raise Unsupported(f"a part of a warp: {instruction.text!r}")
        threads = np.broadcast_to(by(group), group.lanes).reshape(-1, WARP).astype(np.int64)
        of = np.broadcast_to(chosen(threads), threads.shape)
        of = np.where((of < 0) | (of >= WARP), LANE, of)
        values = np.broadcast_to(value(group), group.lanes).reshape(-1, WARP)
        group.put(name, np.take_along_axis(values, of, axis=1).reshape(-1))

    return step


REDUCED = {"add": np.add, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


def reduced(instruction: Instruction, program: Program) -> Step:
    """redux: one operation over a warp."""
    kind, how = type_of(instruction.type), instruction.parts[2]
    winning = "NaN" in instruction.parts or not kind.floating
    extremes = {"max": np.maximum if winning else np.fmax, "min": np.minimum if winning else np.fmin}
    compute = (REDUCED | extremes)[how]
    value, mask_bits = (source(operand, program, kind.bits) for operand in instruction.operands[1:])

    def step(group: Group, mask: Mask) -> None:
        if mask is not None or (mask_bits(group) != 0xFFFFFFFF).any():
            raise Unsupported(f"a part of a warp: {instruction.text!r}")
        result = compute.reduce(kind.numbers(value(group)).reshape(-1, WARP), axis=1)
        group.put(instruction.operands[0], np.repeat(kind.encoded(result), WARP))

    return step


def _tiles(group: Group, at: Callable[[Group], Array], number: int) -> tuple[Array, Array]:
    """Addresses and blocks, (warps * 8,), of the rows of a warp's tile of 8 by 8: eight of its threads name them."""
    chosen = slice(8 * number, 8 * number + 8)
    return at(group).reshape(-1, WARP)[:, chosen].reshape(-1), group.block.reshape(-1, WARP)[:, chosen].reshape(-1)


def matrix_transfer(instruction: Instruction, program: Program) -> Step:
    """ldmatrix and stmatrix: tiles of 8 by 8 numbers of 16 bits between shared memory and a warp's registers."""
    loads, turned = instruction.operation == "ldmatrix", "trans" in instruction.parts
    if "m8n8" not in instruction.parts or instruction.type != "b16":
        raise Unsupported(instruction.text)
    registers, place = instruction.operands if loads else reversed(instruction.operands)
    names, at = members(registers), address(place, program)
    row, column = (COLUMN, ROW) if turned else (ROW, COLUMN)
    second = (row + 1, column) if turned else (row, column + 1)

    def step(group: Group, mask: Mask) -> None:
        if mask is not None:
            raise Unsupported(f"a part of a warp: {instruction.text!r}")
        for number, name in enumerate(names):
            where = _tiles(group, at, number)
            if loads:
                tile = group.shared.load(*where, 32, 4).view(np.uint16).reshape(-1, 8, 8)
                low, high = (tile[:, r, c].astype(np.uint32) for r, c in ((row, column), second))
                group.put(name, (low | high << np.uint32(16)).reshape(-1))
                continue
            bits = group.get(name).reshape(-1, WARP)
            tile = np.empty((len(bits), 8, 8), np.uint16)
            tile[:, row, column], tile[:, *second] = bits.astype(np.uint16), (bits >> np.uint32(16)).astype(np.uint16)
            group.shared.store(*where, tile.view(np.uint32).reshape(-1, 4))

    return step


def _fragments(group: Group, names: tuple[str, ...], kind: str) -> Array:
    """(warps, registers, 32, 2) numbers."""
    pairs = type_of(kind + "x2").numbers(np.stack([group.get(name).reshape(-1, WARP) for name in names], axis=1))
    return pairs.astype(np.float32, copy=False)


def matrix_product(instruction: Instruction, program: Program) -> Step:
    """mma: a warp's product of 16 by K and K by 8 numbers of 16 bits, added to a float32 matrix of 16 by 8."""
    shape, types = instruction.parts[3], instruction.parts[-4:]
    kind = types[1]
    if shape not in ("m16n8k8", "m16n8k16") or types != ("f32", kind, kind, "f32") or kind not in ("bf16", "f16"):
        raise Unsupported(instruction.text)
    result, left, right, added = (members(operand) for operand in instruction.operands)
    inner = 8 * len(right)

    def step(group: Group, mask: Mask) -> None:
        if mask is not None:
            raise Unsupported(f"a part of a warp: {instruction.text!r}")
        of_left, of_right = _fragments(group, left, kind), _fragments(group, right, kind)
        a = np.empty((len(of_left), 16, inner), np.float32)
        b = np.empty((len(of_left), inner, 8), np.float32)
        for half in range(2):
            for number in range(len(left)):
                a[:, ROW + 8 * (number % 2), COLUMN + half + 8 * (number // 2)] = of_left[:, number, :, half]
            for number in range(len(right)):
                b[:, COLUMN + half + 8 * number, ROW] = of_right[:, number, :, half]
        products = a @ b
        sums = []
        for number, before in enumerate(added):
            found = products[:, ROW + 8 * (number // 2), COLUMN + number % 2].reshape(-1)
            sums.append(found + source(before, program, 32)(group).view(np.float32))
        for name, numbers in zip(result, sums, strict=True):
            group.put(name, np.ascontiguousarray(numbers).view(np.uint32))

    return step


def waits(instruction: Instruction, program: Program) -> Step:
    """Threads go in step, and memory is the same for all of them at once."""
    if "red" in instruction.parts:
        raise Unsupported(instruction.text)
    return lambda group, mask: None


def policy(instruction: Instruction, program: Program) -> Step:
    """What a cache should keep; there is none here."""
    return lambda group, mask: group.put(instruction.operands[0], np.array(0, np.uint64), mask)


DECODERS: dict[str, Decoder] = {
    "ld": load,
    "st": store,
    "cp": copy,
    "shfl": shuffle,
    "redux": reduced,
    "ldmatrix": matrix_transfer,
    "stmatrix": matrix_transfer,
    "mma": matrix_product,
    "createpolicy": policy,
    **dict.fromkeys(("bar", "barrier", "membar", "fence", "griddepcontrol"), waits),
}
