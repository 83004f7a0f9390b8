"""The device draws the numbers that the host draws, to the last bit."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.devices import here
from tinker_local_backend.engine.cuda import noise
from tinker_local_backend.engine.sampling import token_choice as on_host

seeds = st.integers(0, 2**64 - 1)
positions = st.integers(0, 2**40)


def on_device(seeds: list[int], positions: list[int]) -> np.ndarray:
    bits, at = noise.seed_bits(seeds), torch.tensor(positions, dtype=torch.int64)
    return noise.uniforms(bits.to(here().device), at.to(here().device)).cpu().numpy()


@given(st.lists(st.tuples(seeds, positions), min_size=1, max_size=20))
def test_any_seed_and_position(pairs: list[tuple[int, int]]) -> None:
    chosen, at = [seed for seed, _ in pairs], [position for _, position in pairs]
    expected = on_host.uniforms(np.array(chosen, dtype=np.uint64), np.array(at, dtype=np.uint64))
    assert np.array_equal(on_device(chosen, at), expected)


def test_seeds_at_the_ends_of_their_range() -> None:
    chosen = [0, 1, 2**63 - 1, 2**63, 2**64 - 1, 0x9E3779B97F4A7C15]
    drawn = on_device(chosen, [0] * len(chosen))
    assert np.array_equal(drawn, on_host.uniforms(np.array(chosen, dtype=np.uint64), np.zeros(6, dtype=np.uint64)))
    assert len(set(drawn.tolist())) == len(chosen)
    assert ((drawn >= 0) & (drawn < 1)).all()
