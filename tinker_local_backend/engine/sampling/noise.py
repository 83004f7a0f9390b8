"""Counter-based random numbers: the draw for a token depends on (sequence seed, position) and on nothing else.

A shared generator would make a sequence's tokens depend on what else is in the batch, and on the order of requests. Here every
sequence has a 64-bit seed, and position i of its completion always gets the same uniform number. The mixer is SplitMix64
(Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators").
"""

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1


def _finalize(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


def uniforms(seeds_R: npt.NDArray[np.uint64], positions_R: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per row, float64 with 52 random bits, so that u * total < total also after rounding."""
    with np.errstate(over="ignore"):  # wrap-around is the point
        bits = _finalize(_finalize(seeds_R) + (positions_R + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52


def mix_seed(*parts: int) -> int:
    """A 64-bit seed from any number of integers; order matters. Used for sample i of a request with a given seed."""
    state = 0
    for part in parts:  # as _finalize; for a single number arrays take twenty times as long
        z = (state + int(_GOLDEN) + part) & _MASK
        z = ((z ^ (z >> 30)) * int(_MIX_1)) & _MASK
        z = ((z ^ (z >> 27)) * int(_MIX_2)) & _MASK
        state = z ^ (z >> 31)
    return state
