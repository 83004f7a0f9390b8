"""The types of PTX: how the bits of a register become numbers that numpy computes with, and how results become bits again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.compiled.ptx import Unsupported

Array = npt.NDArray[Any]
UNSIGNED = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
"""What holds the bits of a register of this width."""


def widened(bits: Array) -> Array:
    """bfloat16 as float32; the bits are those of its upper half."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrowed(numbers: Array) -> Array:
    """Rounded to the nearest bfloat16, ties to even; every NaN becomes the canonical one."""
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(numbers), np.uint16(0x7FFF), rounded.astype(np.uint16))


@dataclass(frozen=True)
class Type:
    """One type of PTX. Packed ones give two numbers a thread, along a last dimension."""

    bits: int
    numbers: Callable[[Array], Array]
    encoded: Callable[[Array], Array]
    floating: bool
    signed: bool = False


def _plain(dtype: type) -> Type:
    size = np.dtype(dtype).itemsize * 8
    holder = UNSIGNED[size]

    def encoded(numbers: Array) -> Array:
        return np.ascontiguousarray(numbers.astype(dtype, copy=False)).view(holder)

    kind = np.dtype(dtype).kind
    return Type(size, lambda bits: bits.view(dtype), encoded, kind == "f", kind == "i")


def _half(bits: Array) -> Array:
    return bits.view(np.float16).astype(np.float32)


def _to_half(numbers: Array) -> Array:
    return np.ascontiguousarray(numbers.astype(np.float16)).view(np.uint16)


def _packed(numbers: Callable[[Array], Array], encoded: Callable[[Array], Array], part: type, whole: type) -> Type:
    def both(bits: Array) -> Array:
        return numbers(np.ascontiguousarray(bits).view(part).reshape(*bits.shape, 2))

    def joined(values: Array) -> Array:
        return np.ascontiguousarray(encoded(values)).view(whole).reshape(values.shape[:-1])

    return Type(np.dtype(whole).itemsize * 8, both, joined, True)


_f32 = _plain(np.float32)
TYPES: dict[str, Type] = {
    "f32": _f32,
    "f64": _plain(np.float64),
    "f16": Type(16, _half, _to_half, True),
    "bf16": Type(16, widened, narrowed, True),
    "f16x2": _packed(_half, _to_half, np.uint16, np.uint32),
    "bf16x2": _packed(widened, narrowed, np.uint16, np.uint32),
    "f32x2": _packed(_f32.numbers, _f32.encoded, np.uint32, np.uint64),
    "pred": Type(1, lambda bits: bits, lambda numbers: numbers.astype(np.bool_), False),
}
for _size in (8, 16, 32, 64):
    TYPES[f"s{_size}"] = _plain(getattr(np, f"int{_size}"))
    TYPES[f"u{_size}"] = TYPES[f"b{_size}"] = _plain(getattr(np, f"uint{_size}"))


def type_of(name: str) -> Type:
    if name not in TYPES:
        raise Unsupported(f"no type {name!r}")
    return TYPES[name]


def resized(bits: Array, width: int) -> Array:
    """The same bits, cut off or filled up with zeros."""
    return bits if bits.dtype == UNSIGNED[width] else bits.astype(UNSIGNED[width])


def literal(text: str, width: int) -> Array:
    """The bits of a number that is written in an instruction."""
    if text.startswith(("0f", "0F", "0d", "0D")):  # the bits themselves
        return np.array(int(text[2:], 16), UNSIGNED[width])
    return np.array(int(text.rstrip("U"), 0) & ((1 << width) - 1), UNSIGNED[width])
