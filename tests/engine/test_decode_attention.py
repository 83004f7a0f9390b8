"""Attention over pages against a softmax over the keys of each sequence, laid end to end in float64."""

import numpy as np
import pytest
import torch

from tests.engine.devices import here
from tests.engine.helpers import assert_near
from tinker_local_backend.engine.model import paged_attention as module
from tinker_local_backend.engine.model.kv_cache import KVCache, KVSlots, LayerShape
from tinker_local_backend.engine.model.paged_attention import (
    DecodePlan,
    LayerAttention,
    Table,
    Tables,
)
from tinker_local_backend.engine.sampling.pages import PAGE_TOKENS, pages_for

KV_HEADS, GROUP, DIM = 2, 3, 8


class Cache:
    """Sequences with random keys in pages at random places; some share their first pages."""

    def __init__(
        self,
        lengths: list[int],
        shared: list[int],
        seed: int,
        spread: int = 1,
        places: int = 0,
        value_dim: int = DIM,
    ):
        """Sequence i begins with the first `shared[i]` pages of sequence 0; there are `spread` times as many places as pages.

        `seed` draws what the pages hold, `places` where they lie.
        """
        self.rng, self.value_dim = np.random.default_rng(places), value_dim
        self.generator = torch.Generator().manual_seed(seed)
        needed = sum(pages_for(length + 1) for length in lengths)
        self.slots = self.rng.permutation(needed * spread).tolist()
        self.cache = KVCache({0: LayerShape(KV_HEADS, DIM, value_dim)}, here().dtype, here().device)
        self.cache.resize(needed * spread)
        self.lengths, self.tables = lengths, []
        self.keys: list[torch.Tensor] = []
        """(2, kv_heads, length, dim) of each sequence"""
        for length, beginning in zip(lengths, shared, strict=True):
            common = self.tables[0].slots[:beginning] if self.tables else []
            table = [*common, *(self.slots.pop() for _ in range(pages_for(length + 1) - len(common)))]
            keys = self.random(2, KV_HEADS, length, DIM)
            if common:
                keys[:, :, : beginning * PAGE_TOKENS] = self.keys[0][:, :, : beginning * PAGE_TOKENS]
            self.tables.append(Table(table))
            self.keys.append(keys)
            positions = torch.arange(length)
            slots = torch.tensor(table)[positions // PAGE_TOKENS].to(here().device)
            self.cache.write(
                0, KVSlots(slots, (positions % PAGE_TOKENS).to(here().device)), keys[0], keys[1][..., :value_dim]
            )

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(here().device, here().dtype)

    def make_tables(self) -> Tables:
        return Tables.of(self.tables, here().device)

    def attend_and_compare(
        self, tables: Tables, window: int | None = None, softcap: float | None = None, sinks: bool = False
    ) -> None:
        """One token more for each sequence."""
        rows = len(self.lengths)
        query = self.random(1, KV_HEADS * GROUP, rows, DIM)
        new = self.random(2, 1, KV_HEADS, rows, DIM)
        plan = DecodePlan(self.cache, tables, np.array(self.lengths))
        of_heads = self.random(KV_HEADS * GROUP) if sinks else None
        layer = LayerAttention(0, 0.7, softcap, window, of_heads)
        found = plan.attend(layer, query, new[0], new[1][..., : self.value_dim])
        assert found.shape == (1, rows, KV_HEADS * GROUP, self.value_dim) and found.dtype == here().dtype
        for row in range(rows):
            keys, values = torch.cat([self.keys[row], new[:, 0, :, row, None]], dim=2).double().cpu()
            first = 0 if window is None else max(0, self.lengths[row] - window + 1)
            keys, values = (x.repeat_interleave(GROUP, dim=0)[:, first:] for x in (keys, values))
            scores = (keys @ query[0, :, row].double().cpu()[:, :, None])[:, :, 0] * 0.7
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if of_heads is not None:
                scores = torch.cat([scores, of_heads.double().cpu()[:, None]], dim=-1)
            expected = (scores.softmax(dim=-1)[:, None, : keys.shape[1]] @ values[..., : self.value_dim])[:, 0]
            assert_near(found[0, row].double().cpu().numpy(), expected.numpy(), atol=1e-5)


LENGTHS = [70, 64, 31, 100, 1, 0, 32, 69, 68, 67, 66, 65]
SHARED = [2, 2, 0, 2, 0, 0, 1, 2, 2, 2, 1, 1]


@pytest.mark.parametrize(
    ("softcap", "sinks"), [(None, False), (2.0, False), (None, True)], ids=["plain", "capped", "sinks"]
)
@pytest.mark.parametrize("window", [None, 1, 20, 33, 90])
@pytest.mark.parametrize("shared", [[0] * 12, SHARED], ids=["alone", "shared"])
@pytest.mark.parametrize("spread", [1, 4])
def test_attention_over_pages_is_attention(
    shared: list[int], window: int | None, softcap: float | None, sinks: bool, spread: int
) -> None:
    cache = Cache(LENGTHS, shared, seed=1, spread=spread)
    cache.attend_and_compare(cache.make_tables(), window, softcap, sinks)


@pytest.mark.parametrize("value_dim", [1, 4])
def test_values_may_be_narrower_than_keys(value_dim: int) -> None:
    cache = Cache(LENGTHS, SHARED, seed=1, value_dim=value_dim)
    cache.attend_and_compare(cache.make_tables(), window=33, sinks=True)


@pytest.mark.parametrize(("padding", "widths"), [(0, [1, 12, 4, 2]), (10_000, [1, 12])])
def test_classes_of_many_and_of_few_readers(monkeypatch: pytest.MonkeyPatch, padding: int, widths: list[int]) -> None:
    """Pages with 12, 8, 4, 3 and 2 readers: in classes by their number, and all in one."""
    monkeypatch.setattr(module, "MAX_PADDING", padding)
    cache = Cache([200 + i for i in range(12)], [6, 1, 1, 1, 1, 2, 2, 2, 2, 3, 4, 5], seed=2)
    tables = cache.make_tables()
    shapes = [part.shape for part in tables.layout(None, (KV_HEADS, GROUP), np.array(cache.lengths)).classes]
    assert [width for _, width in shapes] == widths
    cache.attend_and_compare(tables)


def test_pages_that_lie_apart_are_brought_together_and_hold_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Afterwards each class is a view without holes; nothing is moved once more."""
    monkeypatch.setattr(module, "MAX_WASTE", 0)
    cache = Cache(LENGTHS, SHARED, seed=3, spread=5)
    tables = cache.make_tables()
    moves = tables.moves()
    sources, targets = zip(*moves, strict=True)
    assert sorted(sources) == sorted(targets)
    cache.cache.copy(sources, targets)
    cache.tables = [
        Table([targets[sources.index(slot)] if slot in sources else slot for slot in table.slots])
        for table in cache.tables
    ]
    arranged = cache.make_tables()
    assert arranged.moves() == []
    used = sorted({slot for table in cache.tables for slot in table.slots})
    assert used == list(range(len(used)))
    assert all(
        isinstance(part.pages, slice)
        for part in arranged.layout(None, (KV_HEADS, GROUP), np.array(cache.lengths)).classes
    )
    cache.attend_and_compare(arranged)


def test_not_a_bit_depends_on_where_pages_lie() -> None:
    results = []
    for places in range(3):
        cache = Cache(LENGTHS, SHARED, seed=3, spread=1 + places, places=places)
        query = cache.random(1, KV_HEADS * GROUP, len(LENGTHS), DIM)
        new = cache.random(2, 1, KV_HEADS, len(LENGTHS), DIM)
        plan = DecodePlan(cache.cache, cache.make_tables(), np.array(LENGTHS))
        results.append(plan.attend(LayerAttention(0, 0.7, None, None), query, new[0], new[1]))
    assert all(torch.equal(result, results[0]) for result in results)


def test_nothing_is_moved_while_little_is_wasted() -> None:
    cache = Cache([500], [0], seed=4)
    assert cache.make_tables().moves() == []


def test_tables_that_begin_later_have_the_same_result_within_the_window() -> None:
    """Pages outside every layer's window are freed."""
    cache = Cache([170, 40], [0, 0], seed=5)
    first = cache.tables[0]
    cache.tables[0] = Table(first.slots[3:], start=3 * PAGE_TOKENS)
    cache.attend_and_compare(cache.make_tables(), window=60)


def test_what_is_not_seen_may_be_anything_finite_and_what_one_reads_reaches_no_other() -> None:
    """NaN in the pages of one sequence, and in places that nobody reads, stays there."""
    cache = Cache([40, 50, 45], [0, 0, 0], seed=6, spread=2)
    used = {slot for table in cache.tables for slot in table.slots}
    keys, values = cache.cache.layer(0)
    for slot in set(range(cache.cache.pages)) - used | set(cache.tables[1].slots):
        keys[slot] = values[slot] = torch.nan
    query, new = cache.random(1, KV_HEADS * GROUP, 3, DIM), cache.random(2, 1, KV_HEADS, 3, DIM)
    plan = DecodePlan(cache.cache, cache.make_tables(), np.array(cache.lengths))
    found = plan.attend(LayerAttention(0, 1.0, None, None), query, new[0], new[1])
    assert found[0, [0, 2]].isfinite().all() and found[0, 1].isnan().any()
