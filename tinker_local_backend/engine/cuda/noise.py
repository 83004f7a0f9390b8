"""The uniform numbers of engine/sampling/token_choice.py, bit for bit, computed on the device of the logits.

SplitMix64 works on unsigned numbers, which torch cannot shift, so the bits are in int64. Sums and products wrap around in the
same way; only right shifts must clear the sign bits.
"""

from collections.abc import Sequence

import numpy as np
import torch


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN, _MIX_1, _MIX_2 = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _finalize(z: torch.Tensor) -> torch.Tensor:
    z = (z ^ _shifted(z, 30)) * _MIX_1
    z = (z ^ _shifted(z, 27)) * _MIX_2
    return z ^ _shifted(z, 31)


def uniforms(seeds_R: torch.Tensor, positions_R: torch.Tensor) -> torch.Tensor:
    """One float64 number in [0, 1) per row. Both tensors are int64; seeds come from `seed_bits`."""
    bits = _finalize(_finalize(seeds_R) + (positions_R + 1) * _GOLDEN)
    return _shifted(bits, 12).double() * 2.0**-52


def seed_bits(seeds: Sequence[int]) -> torch.Tensor:
    """Unsigned 64-bit seeds as int64 with the same bits."""
    return torch.from_numpy(np.array(seeds, dtype=np.uint64).view(np.int64))
