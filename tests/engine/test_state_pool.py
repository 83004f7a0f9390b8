"""Slots of states against a model of plain dictionaries: none is in two hands, and what a prompt goes on from is its own."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tinker_local_backend.engine.model.kv_cache import PAGE_TOKENS, KVCache
from tinker_local_backend.engine.model.states import StateCache, StateKey, StateShape
from tinker_local_backend.engine.sampling import state_pool
from tinker_local_backend.engine.sampling.pages import PagePool, PageStore, PageTable, pages_for
from tinker_local_backend.engine.sampling.prefix_cache import MIN_MATCH, Page, PrefixMatch
from tinker_local_backend.engine.sampling.state_pool import MIN_SLOTS, StatePool

OWNERS = [None, object(), object()]
HEADERS = [tuple(range(n, n + length)) for n, length in ((100, 16), (200, 69), (300, 64), (200, 40))]
PAGES, SLOTS, MOST_SAMPLES = 24, 10, 3
KEY = StateKey(0, "recurrent", 0)

Tokens = tuple[int, ...]


def new_store(pages: int = PAGES, slots: int = SLOTS) -> tuple[PageStore, StatePool]:
    """Whose states are one number each."""
    cpu = torch.device("cpu")
    states = StatePool(StateCache({KEY: StateShape((1,), torch.int64)}, cpu), slots)
    return PageStore(PagePool(pages, states=states), KVCache({}, torch.float32, cpu), states), states


def value(owner: object, tokens: Tokens) -> int:
    """The state after these tokens."""
    return hash((id(owner), tokens))


@dataclass
class Sequence:
    """What a sampler knows of one."""

    owner: object
    tokens: Tokens
    table: PageTable


class Slots(RuleBasedStateMachine):
    """Prompts begin, from what is cached, with one or more samples; sequences grow, end and break; caches are evicted."""

    def __init__(self) -> None:
        super().__init__()
        self.store, self.states = new_store()
        self.pool = self.store.pool
        self.running: list[Sequence] = []
        self.ended: list[tuple[object, Tokens]] = []
        self.most = 0
        """slots that were used and kept at once"""

    def stored(self, slot: int) -> int:
        return int(self.states.cache._stored[KEY][slot])

    def write(self, slot: int, owner: object, tokens: Tokens) -> None:
        self.states.cache.write(KEY, torch.tensor([slot]), torch.tensor([[value(owner, tokens)]]))

    @rule(data=st.data(), samples=st.integers(1, MOST_SAMPLES))
    def begin(self, data: st.DataObject, samples: int) -> None:
        owner = data.draw(st.sampled_from(OWNERS))
        tail = tuple(data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=40)))
        start = data.draw(st.sampled_from(HEADERS))
        if self.ended and data.draw(st.booleans()):
            owner, start = data.draw(st.sampled_from(self.ended))
            start = start[: data.draw(st.integers(1, len(start)))]
        tokens = (*start, *tail)
        match = self.pool.prefixes.lookup(owner, tokens)
        assert (match.state is None) == (match.tokens == 0) and match.tokens < len(tokens)
        if pages_for(len(tokens)) + samples > self.pool.available - len(match.all_pages):
            return
        self.pool.share(match.all_pages)
        if match.state is None:
            (slot,) = self.states.allocate()
        else:
            (slot,) = self.states.copies(match.state, 1)
            assert self.stored(slot) == value(owner, tokens[: match.tokens]), "a state of something else"
        table = PageTable([*match.pages], state=slot)
        table.pages.extend(self.pool.allocate(pages_for(len(tokens)) - len(match.pages)))
        if match.tail is not None:
            self.store.free([match.tail])
        kept: list[tuple[int, int]] = []
        if len(tokens) - 1 > match.tokens:
            (before,) = self.states.allocate()
            self.write(before, owner, tokens[:-1])
            kept.append((len(tokens) - 1, before))
        self.write(slot, owner, tokens)
        self.store.cache_prefix(owner, tokens, table.pages, kept, ())
        self.running.append(Sequence(owner, tokens, table))
        whole = table.pages[: len(tokens) // PAGE_TOKENS]
        for copy in self.states.copies(slot, samples - 1):
            self.pool.share(whole)
            more = self.pool.allocate(1) if len(tokens) % PAGE_TOKENS else []
            self.running.append(Sequence(owner, tokens, PageTable([*whole, *more], state=copy)))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.lists(st.integers(1, 3), min_size=1, max_size=35))
    def grow(self, data: st.DataObject, tokens: list[int]) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        longer = (*sequence.tokens, *tokens)
        missing = pages_for(len(longer)) - len(sequence.table.pages)
        if missing > self.pool.available:
            return
        sequence.table.pages.extend(self.pool.allocate(missing))
        sequence.tokens = longer
        assert sequence.table.state is not None
        self.write(sequence.table.state, sequence.owner, longer)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), how=st.sampled_from(["cached", "preempted", "diverged"]))
    def end(self, data: st.DataObject, how: str) -> None:
        sequence = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        owner, tokens, table = sequence.owner, sequence.tokens, sequence.table
        if how == "diverged":
            self.store.invalidate(table.pages)
        elif how == "cached":
            assert table.state is not None
            self.store.cache_prefix(owner, tokens, table.pages, [(len(tokens), table.state)], ())
            table.state = None
            self.ended.append((owner, tokens))
        self.store.end(table)
        assert table.state is None

    @rule()
    def forget(self) -> None:
        self.pool.evict()
        self.states.release()
        assert self.states.kept == 0
        for owner, tokens in self.ended:
            assert self.pool.prefixes.lookup(owner, (*tokens, 9)) == PrefixMatch()
        if not self.running:
            assert self.states.capacity == self.states.cache.slots == 0

    @rule()
    def fail(self) -> None:
        """As a pass that failed: everything is dropped."""
        self.states.reset()
        self.pool.reset()
        self.running.clear()
        assert self.states.capacity == self.states.used == self.states.kept == 0

    @invariant()
    def every_slot_is_in_one_hand(self) -> None:
        states = self.states
        used: list[int] = []
        for sequence in self.running:
            assert sequence.table.state is not None
            assert self.stored(sequence.table.state) == value(sequence.owner, sequence.tokens)
            used.append(sequence.table.state)
        kept = {(page, tokens): page.states[tokens] for page, tokens in states._kept}
        assert sorted([*used, *kept.values(), *states._free]) == list(range(states.capacity))
        assert (states.used, states.kept) == (len(used), len(kept))

    @invariant()
    def kept_states_are_those_of_cached_pages(self) -> None:
        roots = {id(root): owner for owner, root in self.pool.prefixes._roots.values()}
        for page, tokens in self.states._kept:
            path: list[Page] = [page]
            while (parent := path[0].parent) is not None:
                path.insert(0, parent)
            owner, before = roots[id(path[0])], [token for one in path[1:-1] for token in one.tokens]
            assert 0 < tokens <= len(page.tokens)
            assert self.stored(page.states[tokens]) == value(owner, (*before, *page.tokens[:tokens]))

    @invariant()
    def no_more_slots_than_are_needed(self) -> None:
        """Beyond the limit only what sequences use; a request for several may leave some of them free."""
        self.most = max(self.most, self.states.used)
        assert self.states.capacity <= max(SLOTS, self.most + 1) + MOST_SAMPLES


Slots.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestSlots = Slots.TestCase


LONG = tuple(range(1000, 1000 + 3 * PAGE_TOKENS + 7))


def cached(store: PageStore, states: StatePool, tokens: Tokens, at: list[int], owner: object = None) -> dict[int, int]:
    """A sequence that came and went, with states at these positions. Returns their slots."""
    pages = store.pool.allocate(pages_for(len(tokens)))
    slots = dict(zip(at, states.allocate(len(at)), strict=True))
    store.cache_prefix(owner, tokens, pages, [*slots.items()], ())
    store.free(pages)
    return slots


class TestLookup:
    """In a model with states a prefix ends where a state is kept."""

    @pytest.mark.parametrize("common", [15, 16, 31, 32, 33, 50, 64, 70, 96, len(LONG)])
    @pytest.mark.parametrize("at", [[20], [32], [16, 31, 64], [len(LONG) - 1, len(LONG)], [33, 64, 65]], ids=str)
    def test_at_the_last_state_within_what_is_common(self, common: int, at: list[int]) -> None:
        store, states = new_store()
        slots = cached(store, states, LONG, at)
        match = store.pool.prefixes.lookup(None, (*LONG[:common], 5, 6))
        expected = max((n for n in at if MIN_MATCH <= n <= common), default=0)
        assert (match.tokens, match.state) == (expected, slots.get(expected))
        assert len(match.pages) == expected // PAGE_TOKENS
        assert match.tail_tokens == expected % PAGE_TOKENS

    def test_one_token_is_left_to_compute(self) -> None:
        store, states = new_store()
        slots = cached(store, states, LONG[:40], [39, 40])
        match = store.pool.prefixes.lookup(None, LONG[:40])
        assert (match.tokens, match.state) == (39, slots[39])

    def test_without_states_nothing_is_found(self) -> None:
        store, states = new_store()
        cached(store, states, LONG, [])
        assert store.pool.prefixes.lookup(None, (*LONG, 5)) == PrefixMatch()

    def test_a_short_state_is_not_worth_a_copy(self) -> None:
        store, states = new_store()
        cached(store, states, LONG, [MIN_MATCH - 1])
        assert store.pool.prefixes.lookup(None, (*LONG, 5)) == PrefixMatch()

    def test_under_its_own_adapter_only(self) -> None:
        store, states = new_store()
        slots = [cached(store, states, LONG, [40], owner)[40] for owner in OWNERS[:2]]
        found = [store.pool.prefixes.lookup(owner, (*LONG[:50], 5)).state for owner in OWNERS]
        assert found == [*slots, None]

    def test_of_two_pages_with_one_beginning_the_one_with_the_longer_state(self) -> None:
        store, states = new_store()
        slots = cached(store, states, (*LONG[:25], 1), [25])
        cached(store, states, (*LONG[:30], 2), [18])
        match = store.pool.prefixes.lookup(None, (*LONG[:30], 5, 6))
        assert (match.tokens, match.state) == (25, slots[25])

    def test_a_state_is_kept_on_the_page_that_stays_longest(self) -> None:
        """Of two pages that begin alike that is the newer one."""
        store, states = new_store()
        cached(store, states, (*LONG[:25], 1), [])
        cached(store, states, (*LONG[:25], 2), [24])
        store.pool.prefixes.evict(next(iter(store.pool.prefixes.idle)))
        assert store.pool.prefixes.lookup(None, (*LONG[:25], 5)).tokens == 24


class TestLimits:
    def test_the_least_recently_used_states_are_evicted_and_their_pages_stay(self) -> None:
        store, states = new_store(slots=MIN_SLOTS)
        prompts = [tuple(range(1000 * n, 1000 * n + 20)) for n in range(1, MIN_SLOTS + 1)]
        for tokens in prompts:
            cached(store, states, tokens, [20])
        assert (states.kept, states.used, states.capacity) == (MIN_SLOTS, 0, MIN_SLOTS)
        store.pool.prefixes.lookup(None, (*prompts[0], 1))  # used again: the second is the oldest now
        slots = states.allocate(2)
        found = [store.pool.prefixes.lookup(None, (*tokens, 1)).tokens for tokens in prompts]
        assert found == [20, 0, 0, *[20] * (MIN_SLOTS - 3)]
        assert (states.capacity, store.pool.idle) == (MIN_SLOTS, MIN_SLOTS)
        states.free(slots)

    def test_sequences_may_have_more(self) -> None:
        _, states = new_store(slots=MIN_SLOTS)
        assert len(set(states.allocate(MIN_SLOTS + 5))) == MIN_SLOTS + 5
        assert states.used >= MIN_SLOTS + 5

    def test_a_growing_cache_keeps_what_is_in_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(state_pool, "MIN_GROWTH", 1)
        _, states = new_store(slots=100)
        for number in range(40):
            (slot,) = states.allocate()
            states.cache.write(KEY, torch.tensor([slot]), torch.tensor([[number]]))
        assert sorted(states.cache._stored[KEY][:, 0].tolist()[:40]) == list(range(40))

    def test_a_state_that_is_kept_already_is_not_kept_twice(self) -> None:
        store, states = new_store()
        first = cached(store, states, LONG[:40], [39])
        second = cached(store, states, LONG[:40], [39])
        assert (states.kept, states.used) == (1, 0) and first != second
        assert store.pool.prefixes.lookup(None, LONG[:40]).state == first[39]

    def test_a_model_without_states_has_no_pool(self) -> None:
        assert StatePool.of(StateCache({}, torch.device("cpu")), 1 << 20) is None

    @pytest.mark.parametrize(("available", "limit"), [(0, MIN_SLOTS), (8 * 100, 100), (8 * 100 + 7, 100)])
    def test_the_limit_is_what_the_memory_holds(self, available: int, limit: int) -> None:
        pool = StatePool.of(StateCache({KEY: StateShape((1,), torch.int64)}, torch.device("cpu")), available)
        assert pool is not None and pool.limit == limit
        assert pool.stats == {"states": 0, "states_idle": 0, "state_bytes": 8}
