"""Instructions that compute in registers. Results of approximate ones are exact ones here, and subnormal numbers are kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import numpy as np

from tests.compiled.bits import UNSIGNED, Array, Type, resized, type_of
from tests.compiled.machine import Decoder, Group, Mask, Step, number, source
from tests.compiled.ptx import Instruction, Program, Unsupported, members

UNARY: dict[str, Callable[[Array], Array]] = {
    "neg": np.negative,
    "abs": np.abs,
    "not": np.invert,
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": np.reciprocal,
    "sqrt": np.sqrt,
    "rsqrt": lambda a: 1 / np.sqrt(a),
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
}
BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
COMPARED: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}
WIDE = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}


def _step(instruction: Instruction, compute: Callable[[Group], Array]) -> Step:
    name = instruction.operands[0]

    def step(group: Group, mask: Mask) -> None:
        group.put(name, compute(group), mask)

    return step


def _check(instruction: Instruction, *refused: str) -> None:
    if found := set(refused) & set(instruction.parts):
        raise Unsupported(f"{sorted(found)} of {instruction.text!r}")


def _operands(instruction: Instruction, program: Program) -> list[Callable[[Group], Array]]:
    """Numbers of the instruction's type. Operations of two types (`fma.rn.f32.bf16`) take the narrow one in 16-bit registers."""
    types = [part for part in instruction.parts[-2:] if part in ("f32", "f16", "bf16")]

    def read(operand: str) -> Callable[[Group], Array]:
        narrow = len(types) < 2 or (operand.startswith("%") and program.bits(operand) == 16)
        return number(operand, program, instruction.type if narrow else types[0])

    return [read(operand) for operand in instruction.operands[1:]]


def _result(instruction: Instruction) -> Type:
    types = [part for part in instruction.parts[-2:] if part in ("f32", "f16", "bf16")]
    return type_of(types[0] if len(types) == 2 else instruction.type)


def unary(instruction: Instruction, program: Program) -> Step:
    kind, compute = type_of(instruction.type), UNARY[instruction.operation]
    (operand,) = _operands(instruction, program)
    return _step(instruction, lambda group: kind.encoded(compute(operand(group))))


def binary(instruction: Instruction, program: Program) -> Step:
    _check(instruction, "sat", "cc", "wide", "hi")
    kind, compute = _result(instruction), BINARY[instruction.operation]
    first, second = _operands(instruction, program)
    return _step(instruction, lambda group: kind.encoded(compute(first(group), second(group))))


def extreme(instruction: Instruction, program: Program) -> Step:
    """min and max of two or three numbers: a NaN loses, unless the operation says that it wins."""
    _check(instruction, "xorsign", "relu", "abs")
    kind = type_of(instruction.type)
    winning = "NaN" in instruction.parts or not kind.floating
    table = {"min": np.minimum if winning else np.fmin, "max": np.maximum if winning else np.fmax}
    compute, operands = table[instruction.operation], _operands(instruction, program)
    return _step(instruction, lambda group: kind.encoded(reduce(compute, [operand(group) for operand in operands])))


def product(instruction: Instruction, program: Program) -> Step:
    """mul, and mad and fma, which add to it."""
    _check(instruction, "sat", "relu", "cc")
    kind, added = _result(instruction), instruction.operation in ("mad", "fma")
    if "wide" in instruction.parts:
        kind = type_of(WIDE[instruction.type])
    operands = _operands(instruction, program)
    if added and "wide" in instruction.parts:
        operands[2] = number(instruction.operands[3], program, WIDE[instruction.type])
    high = "hi" in instruction.parts

    def compute(group: Group) -> Array:
        first, second, *rest = (operand(group) for operand in operands)
        if kind.floating:
            # A product of two float32 is exact in float64, so the sum is rounded once, as on the device.
            return kind.encoded(first.astype(np.float64) * second + rest[0] if rest else first * second)
        if high:
            result = _upper_half(first, second, kind)
        else:
            dtype = kind.numbers(np.zeros(1, UNSIGNED[kind.bits])).dtype
            result = first.astype(dtype) * second.astype(dtype)
        return kind.encoded(result + rest[0] if rest else result)

    return _step(instruction, compute)


def _upper_half(first: Array, second: Array, kind: Type) -> Array:
    """Of the product of two integers, which is twice as wide."""
    if kind.bits < 64:
        long = np.int64 if kind.signed else np.uint64
        return ((first.astype(long) * second.astype(long)) >> long(kind.bits)).astype(first.dtype)
    low, size = np.uint64((1 << 32) - 1), np.uint64(32)
    a, b = first.astype(np.uint64), second.astype(np.uint64)
    (a_low, a_high), (b_low, b_high) = (a & low, a >> size), (b & low, b >> size)
    middle = a_high * b_low + (a_low * b_low >> size)
    upper = a_high * b_high + (middle >> size) + ((middle & low) + a_low * b_high >> size)
    if kind.signed:  # -1 is 2 ** 64 - 1: one time the other factor too much
        upper = upper - np.where(first < 0, b, np.uint64(0)) - np.where(second < 0, a, np.uint64(0))
    return upper.astype(first.dtype)


def quotient(instruction: Instruction, program: Program) -> Step:
    kind = type_of(instruction.type)
    first, second = _operands(instruction, program)

    def compute(group: Group) -> Array:
        a, b = first(group), second(group)
        if kind.floating:
            return kind.encoded(a / b)
        b = np.where(b == 0, b.dtype.type(1), b)
        # Integers are divided towards zero, numpy rounds down.
        rest = np.fmod(a, b)
        return kind.encoded(rest if instruction.operation == "rem" else (a - rest) // b)

    return _step(instruction, compute)


def shift(instruction: Instruction, program: Program) -> Step:
    """shl and shr; all bits are out at a shift by the width or more."""
    kind = type_of(instruction.type)
    value = number(instruction.operands[1], program, instruction.type)
    amount = source(instruction.operands[2], program, 32)
    left = instruction.operation == "shl"

    def compute(group: Group) -> Array:
        a, by = value(group), amount(group)
        within = np.minimum(by, np.uint32(kind.bits - 1)).astype(a.dtype)
        moved = a << within if left else a >> within
        gone = (by >= kind.bits) & (left or not kind.signed)
        return kind.encoded(np.where(gone, a.dtype.type(0), moved))

    return _step(instruction, compute)


def funnel(instruction: Instruction, program: Program) -> Step:
    """shf: one half of two registers that are shifted together."""
    if "wrap" not in instruction.parts:
        raise Unsupported(instruction.text)
    low, high, amount = (source(operand, program, 32) for operand in instruction.operands[1:])
    left = "l" in instruction.parts

    def compute(group: Group) -> Array:
        both = low(group).astype(np.uint64) | (high(group).astype(np.uint64) << np.uint64(32))
        by = (amount(group) & np.uint32(31)).astype(np.uint64)
        moved = (both << by) >> np.uint64(32) if left else both >> by
        return moved.astype(np.uint32)

    return _step(instruction, compute)


def logic(instruction: Instruction, program: Program) -> Step:
    """lop3: any function of three bits, as a table of eight."""
    operands = [source(operand, program, 32) for operand in instruction.operands[1:4]]
    table = int(instruction.operands[4], 0)

    def compute(group: Group) -> Array:
        values = [operand(group) for operand in operands]
        result = np.zeros(1, np.uint32)
        for row in range(8):
            if table >> row & 1:
                terms = [value if row >> (2 - at) & 1 else ~value for at, value in enumerate(values)]
                result = result | (terms[0] & terms[1] & terms[2])
        return result

    return _step(instruction, compute)


def permute(instruction: Instruction, program: Program) -> Step:
    """prmt: four bytes chosen from two registers; the fourth bit of a choice repeats the byte's sign."""
    if instruction.parts != ("prmt", "b32"):
        raise Unsupported(instruction.text)
    low, high, chosen = (source(operand, program, 32) for operand in instruction.operands[1:])

    def compute(group: Group) -> Array:
        both = low(group).astype(np.uint64) | (high(group).astype(np.uint64) << np.uint64(32))
        selector = chosen(group).astype(np.uint64)
        result = np.zeros(1, np.uint64)
        for at in range(4):
            choice = selector >> np.uint64(4 * at)
            byte = (both >> ((choice & np.uint64(7)) * np.uint64(8))) & np.uint64(255)
            sign = np.where(byte >> np.uint64(7), np.uint64(255), np.uint64(0))
            result = result | (np.where(choice & np.uint64(8), sign, byte) << np.uint64(8 * at))
        return result.astype(np.uint32)

    return _step(instruction, compute)


def bit_field(instruction: Instruction, program: Program) -> Step:
    """bfe: some bits of a register, at its low end."""
    if instruction.type not in ("u32", "s32"):
        raise Unsupported(instruction.text)
    value, first, count = (source(operand, program, 32) for operand in instruction.operands[1:])
    signed = instruction.type == "s32"

    def compute(group: Group) -> Array:
        size = (count(group) & np.uint32(255)).astype(np.uint64)
        mask = (np.uint64(1) << size) - np.uint64(1)
        found = (value(group).astype(np.uint64) >> (first(group) & np.uint32(255)).astype(np.uint64)) & mask
        negative = signed & ((found >> np.maximum(size, np.uint64(1)) - np.uint64(1)) & np.uint64(1)).astype(bool)
        return np.where(negative, found | ~mask, found).astype(np.uint32)

    return _step(instruction, compute)


ROUNDED = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}


def convert(instruction: Instruction, program: Program) -> Step:
    _check(instruction, "sat", "satfinite", "relu")
    to, kind = type_of(instruction.parts[-2]), type_of(instruction.type)
    if instruction.parts[-2].endswith("x2"):  # the first operand goes to the upper half
        high, low = (number(operand, program, instruction.type) for operand in instruction.operands[1:])
        return _step(
            instruction, lambda group: to.encoded(np.stack(np.broadcast_arrays(low(group), high(group)), axis=-1))
        )
    value = number(instruction.operands[1], program, instruction.type)
    rounded = next((ROUNDED[part] for part in instruction.parts if part in ROUNDED), None)
    if kind.floating and not to.floating and rounded is None:
        raise Unsupported(instruction.text)
    destination = program.bits(instruction.operands[0])

    def compute(group: Group) -> Array:
        numbers = value(group)
        bits = to.encoded(numbers if rounded is None else rounded(numbers))
        return _extended(bits, to, destination)

    return _step(instruction, compute)


def _extended(bits: Array, kind: Type, width: int) -> Array:
    """As a wider register holds them: signed integers keep their sign."""
    if not kind.signed or width <= kind.bits:
        return resized(bits, width)
    return kind.numbers(bits).astype(f"i{width // 8}").view(UNSIGNED[width])


def move(instruction: Instruction, program: Program) -> Step:
    """mov: also of several registers into one and back."""
    to, operand = instruction.operands
    whole = type_of(instruction.type).bits
    if operand.startswith("{"):
        parts = members(operand)
        reads = [source(part, program, whole // len(parts)) for part in parts]

        def joined(group: Group) -> Array:
            pieces = [read(group).astype(UNSIGNED[whole]) for read in reads]
            moved = [piece << np.array(at * whole // len(parts), UNSIGNED[whole]) for at, piece in enumerate(pieces)]
            return reduce(np.bitwise_or, moved)

        return _step(instruction, joined)
    if not to.startswith("{"):
        if instruction.type == "pred" and not operand.startswith("%"):
            value = np.array(operand not in ("0", "false"))
            return _step(instruction, lambda group: value)
        return _step(instruction, source(operand, program, whole))
    read, parts = source(operand, program, whole), members(to)
    size = whole // len(parts)

    def divided(group: Group, mask: Mask) -> None:
        value = read(group)
        for at, name in enumerate(parts):
            piece = (value >> np.array(at * size, UNSIGNED[whole])).astype(UNSIGNED[size])
            group.put(name, piece, mask)

    return divided


def compare(instruction: Instruction, program: Program) -> Step:
    name = instruction.parts[1]
    first, second = (number(operand, program, instruction.type) for operand in instruction.operands[1:3])
    unordered = type_of(instruction.type).floating and name in ("nan", "num", "neu", "equ", "ltu", "leu", "gtu", "geu")

    def compared(a: Array, b: Array) -> Array:
        if not unordered:
            # An ordered comparison with a NaN is false, in numpy all but that for inequality.
            ordered = COMPARED[name](a, b)
            return ordered & ~(np.isnan(a) | np.isnan(b)) if name == "ne" and a.dtype.kind == "f" else ordered
        nan = np.isnan(a) | np.isnan(b)
        if name in ("nan", "num"):
            return nan if name == "nan" else ~nan
        return COMPARED[name[:2]](a, b) | nan

    combined = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}.get(instruction.parts[2])
    if (name not in COMPARED and not unordered) or "|" in instruction.operands[0]:
        raise Unsupported(instruction.text)
    if combined is None:
        return _step(instruction, lambda group: compared(first(group), second(group)))
    operand = instruction.operands[3]
    other = source(operand.lstrip("!"), program, 1)

    def compute(group: Group) -> Array:
        value = other(group)
        return combined(compared(first(group), second(group)), ~value if operand.startswith("!") else value)

    return _step(instruction, compute)


def select(instruction: Instruction, program: Program) -> Step:
    width = type_of(instruction.type).bits
    first, second = (source(operand, program, width) for operand in instruction.operands[1:3])
    condition = source(instruction.operands[3], program, 1)
    return _step(instruction, lambda group: np.where(condition(group), first(group), second(group)))


def population(instruction: Instruction, program: Program) -> Step:
    """popc: how many bits of a register of 32 or 64 are set, in 32."""
    read = source(instruction.operands[1], program, type_of(instruction.type).bits)
    return _step(instruction, lambda group: np.bitwise_count(read(group)).astype(np.uint32))


DECODERS: dict[str, Decoder] = {
    **dict.fromkeys(UNARY, unary),
    **dict.fromkeys(BINARY, binary),
    **dict.fromkeys(("mul", "mad", "fma"), product),
    **dict.fromkeys(("min", "max"), extreme),
    **dict.fromkeys(("div", "rem"), quotient),
    **dict.fromkeys(("shl", "shr"), shift),
    "shf": funnel,
    "lop3": logic,
    "prmt": permute,
    "bfe": bit_field,
    "popc": population,
    "cvt": convert,
    "mov": move,
    "setp": compare,
    "selp": select,
}
