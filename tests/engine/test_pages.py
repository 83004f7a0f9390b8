"""The pool of pages against a model of plain dictionaries: nothing is in two hands, nothing is lost, what is found is equal."""

from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tinker_local_backend.engine.sampling import pages as pages_module
from tinker_local_backend.engine.sampling import prefix_cache
from tinker_local_backend.engine.sampling.pages import PAGE_TOKENS, PagePool, PageTable, PoolFullError, pages_for
from tinker_local_backend.engine.sampling.prefix_cache import CANDIDATES, MIN_MATCH, PrefixMatch

OWNERS = [None, object(), object()]
HEADERS = [tuple(range(n, n + length)) for n, length in ((100, 16), (200, 69), (300, 64), (200, 40))]
MOST = 24


@dataclass
class Sequence:
    """What a sampler knows of one: its adapter, its tokens and its table."""

    owner: object
    tokens: tuple[int, ...]
    table: PageTable


class Pool(RuleBasedStateMachine):
    """Sequences come, grow, end, break, and pages are moved about. A key is the adapter with all tokens up to its own."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(MOST)
        self.written: dict[int, list[object]] = {}
        """by slot: the keys that are there"""
        self.running: list[Sequence] = []
        self.ended: list[tuple[object, tuple[int, ...]]] = []

    def keys(self, owner: object, tokens: tuple[int, ...], page: int) -> list[object]:
        first = page * PAGE_TOKENS
        return [(id(owner), tokens[: i + 1]) for i in range(first, min(first + PAGE_TOKENS, len(tokens)))]

    def write(self, sequence: Sequence, start: int) -> None:
        for i, page in enumerate(sequence.table.pages):
            if (i + 1) * PAGE_TOKENS > start:
                assert page.readers == 1, "a shared page is written to"
                self.written[page.slot] = self.keys(sequence.owner, sequence.tokens, i)

    def forget_erased(self, slots: list[int]) -> None:
        for slot in slots:
            assert self.pool._by_slot[slot] is None, "a page that is read is erased"
            self.written[slot] = []

    def check_found(self, owner: object, tokens: tuple[int, ...], found: PrefixMatch) -> None:
        assert found.tokens == 0 or MIN_MATCH <= found.tokens < len(tokens)
        tails = () if found.tail is None else (found.tail,)
        for i, page in enumerate((*found.pages, *tails)):
            wanted = self.keys(owner, tokens[: found.tokens], i)
            assert self.written[page.slot][: len(wanted)] == wanted

    @rule(data=st.data(), samples=st.integers(1, 3))
    def begin(self, data: st.DataObject, samples: int) -> None:
        owner = data.draw(st.sampled_from(OWNERS))
        tail = tuple(data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=40)))
        start = data.draw(st.sampled_from(HEADERS))
        if self.ended and data.draw(st.booleans()):
            owner, start = data.draw(st.sampled_from(self.ended))
            start = start[: data.draw(st.integers(1, len(start)))]
        tokens = (*start, *tail)
        found = self.pool.prefixes.lookup(owner, tokens)
        self.check_found(owner, tokens, found)
        tails = [] if found.tail is None else [found.tail]
        self.pool.share([*found.pages, *tails])
        needed = pages_for(len(tokens)) - len(found.pages) + samples - 1
        try:
            taken = self.pool.allocate(needed)
        except PoolFullError:
            self.forget_erased(self.pool.free([*found.pages, *tails]))
            return
        own = taken[: needed - samples + 1]
        if found.tail is not None:
            self.written[own[0].slot] = list(self.written[found.tail.slot])
            self.forget_erased(self.pool.free(tails))
        first = Sequence(owner, tokens, PageTable([*found.pages, *own]))
        self.write(first, found.tokens)
        self.pool.prefixes.insert(owner, tokens, first.table.pages)
        self.running.append(first)
        for page in taken[len(own) :]:  # more samples: whole pages are shared, the last one is copied
            whole = first.table.pages[: len(tokens) // PAGE_TOKENS]
            self.pool.share(whole)
            other = Sequence(owner, tokens, PageTable([*whole, page]))
            self.write(other, len(whole) * PAGE_TOKENS)
            self.running.append(other)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.lists(st.integers(1, 3), min_size=1, max_size=35))
    def grow(self, data: st.DataObject, tokens: list[int]) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        length = len(sequence.tokens)
        missing = pages_for(length + len(tokens)) - len(sequence.table.pages)
        if missing > self.pool.available:
            return
        sequence.table.pages.extend(self.pool.allocate(missing))
        sequence.tokens = (*sequence.tokens, *tokens)
        self.write(sequence, length)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), held=st.booleans(), broken=st.booleans())
    def end(self, data: st.DataObject, held: bool, broken: bool) -> None:
        sequence = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        if broken:
            self.forget_erased(self.pool.invalidate(sequence.table.pages))
        elif held:
            self.pool.prefixes.insert(sequence.owner, sequence.tokens, sequence.table.pages)
            self.ended.append((sequence.owner, sequence.tokens))
        self.forget_erased(self.pool.free(sequence.table.pages))

    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.integers(0, max(0, self.pool.capacity - 1)), unique=True, max_size=8))
        if not self.pool.capacity:
            return
        moves = list(zip(slots, [*slots[1:], *slots[:1]], strict=True))
        self.pool.move(moves)
        before = dict(self.written)
        for source, target in moves:
            self.written[target] = before.get(source, [])

    @rule()
    def forget(self) -> None:
        self.pool.evict()
        for owner, tokens in self.ended:
            assert self.pool.prefixes.lookup(owner, (*tokens, 9)) == PrefixMatch()
        if not self.running:
            assert self.pool.capacity == 0

    @invariant()
    def every_page_is_in_its_place(self) -> None:
        pool = self.pool
        readers: dict[int, int] = {}
        for sequence in self.running:
            for i, page in enumerate(sequence.table.pages):
                readers[page.slot] = readers.get(page.slot, 0) + 1
                assert pool._by_slot[page.slot] is page
                wanted = self.keys(sequence.owner, sequence.tokens, i)
                assert self.written[page.slot][: len(wanted)] == wanted
        assert {page.slot: page.readers for page in pool._by_slot if page and page.readers} == readers
        idle = {page.slot for page in pool.prefixes.idle}
        assert all(page.readers == 0 and page.parent is not None for page in pool.prefixes.idle)
        assert sorted([*pool._free, *readers, *idle]) == list(range(pool.capacity))
        assert pool.read == len(readers) and pool.capacity <= MOST
        assert pool.available == MOST - len(readers)
        assert all(left < right for left, right in pairwise(sorted(pool._free)))


Pool.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestPool = Pool.TestCase


def ended(pool: PagePool, owner: object, tokens: tuple[int, ...]) -> None:
    """A sequence that came and went."""
    pages = pool.allocate(pages_for(len(tokens)))
    pool.prefixes.insert(owner, tokens, pages)
    pool.free(pages)


LONG = tuple(range(1000, 1000 + 3 * PAGE_TOKENS + 7))


@pytest.mark.parametrize("length", [MIN_MATCH, PAGE_TOKENS - 1, PAGE_TOKENS, PAGE_TOKENS + 1, len(LONG)])
@pytest.mark.parametrize("owner", OWNERS[:2], ids=["base", "adapter"])
def test_what_goes_on_from_an_ended_sequence_finds_all_of_it(owner: object, length: int) -> None:
    """Under its own adapter only; one token is always left to predict from."""
    pool = PagePool(MOST)
    ended(pool, owner, LONG[:length])
    assert pool.prefixes.lookup(owner, (*LONG[:length], 5, 6)).tokens == length
    assert pool.prefixes.lookup(owner, (*LONG[:length], 5)).tokens == length
    expected = length - 1 if length > MIN_MATCH else 0
    assert pool.prefixes.lookup(owner, LONG[:length]).tokens == expected
    for other in OWNERS:
        if other is not owner:
            assert pool.prefixes.lookup(other, (*LONG[:length], 5)) == PrefixMatch()


@pytest.mark.parametrize("common", [MIN_MATCH - 1, MIN_MATCH, 40, 2 * PAGE_TOKENS, 3 * PAGE_TOKENS + 3])
def test_the_common_beginning_is_found_to_the_token(common: int) -> None:
    pool = PagePool(MOST)
    ended(pool, None, LONG)
    found = pool.prefixes.lookup(None, (*LONG[:common], 5, 6, 7))
    assert found.tokens == (common if common >= MIN_MATCH else 0)


def test_the_longest_of_several_beginnings_is_found() -> None:
    pool = PagePool(MOST)
    for length in (20, 50, 36, 49):
        ended(pool, None, (*LONG[:length], *range(1, 6)))
    assert pool.prefixes.lookup(None, (*LONG[:60], 9)).tokens == 50


def test_what_was_used_last_is_kept_longest() -> None:
    """Of three ended conversations the one that nobody asked for gives way, and its end before its beginning."""
    pool = PagePool(6)
    conversations = [tuple(range(start, start + 2 * PAGE_TOKENS)) for start in (0, 1000, 2000)]
    for tokens in conversations:
        ended(pool, None, tokens)
    for tokens in (conversations[1], conversations[0]):
        found = pool.prefixes.lookup(None, (*tokens, 1))
        pool.share(found.pages)
        pool.free(found.pages)
    pool.allocate(1)
    assert [pool.prefixes.lookup(None, (*tokens, 1)).tokens for tokens in conversations] == [64, 64, 32]
    pool.allocate(1)
    assert [pool.prefixes.lookup(None, (*tokens, 1)).tokens for tokens in conversations] == [64, 64, 0]


def test_equal_hashes_of_different_pages_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    class Collides(int):
        def __hash__(self) -> int:
            return 7

    pool = PagePool(MOST)
    first, second = (tuple(map(Collides, range(n, n + PAGE_TOKENS))) for n in (0, 500))
    assert hash(first) == hash(second)
    ended(pool, None, first)
    assert pool.prefixes.lookup(None, (*second, 1)) == PrefixMatch()
    ended(pool, None, second)
    assert [pool.prefixes.lookup(None, (*tokens, 1)).pages[0].tokens for tokens in (first, second)] == [first, second]


def test_a_page_that_is_no_longer_findable_takes_along_what_is_behind_it() -> None:
    pool = PagePool(MOST)
    ended(pool, None, LONG)
    found = pool.prefixes.lookup(None, (*LONG, 1))
    pool.share(found.pages[:1])
    assert sorted(pool.invalidate(found.pages[:1])) == [page.slot for page in (*found.pages[1:], found.tail) if page]
    assert pool.prefixes.lookup(None, (*LONG, 1)) == PrefixMatch()
    assert pool.free(found.pages[:1]) == [found.pages[0].slot]
    assert pool.available == MOST and pool.read == 0


def test_an_adapter_is_kept_only_while_something_of_it_can_be_found() -> None:
    pool = PagePool(2)
    ended(pool, OWNERS[1], LONG[:40])
    assert [owner for owner, _ in pool.prefixes._roots.values()] == [OWNERS[1]]
    pool.allocate(2)
    assert not pool.prefixes._roots


def test_the_pool_takes_findable_pages_before_it_grows_beyond_its_eagerness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages_module, "MIN_GROWTH", 1)
    pool = PagePool(8)
    pool.soft_limit = 3
    ended(pool, None, LONG[: 3 * PAGE_TOKENS])
    assert (pool.capacity, pool.idle) == (3, 3)
    pool.allocate(2)
    assert (pool.capacity, pool.idle) == (3, 1)
    pool.allocate(4)
    assert (pool.capacity, pool.idle) == (6, 0)
    with pytest.raises(PoolFullError, match="3 pages requested, 2 of 8 available"):
        pool.allocate(3)
    assert pool.read == 6


def test_pages_before_a_position_leave_the_table_once() -> None:
    pool = PagePool(MOST)
    table = PageTable(pool.allocate(4))
    first = list(table.pages)
    assert table.drop_before(PAGE_TOKENS - 1) == [] and table.drop_before(-5) == []
    assert table.drop_before(2 * PAGE_TOKENS + 3) == first[:2]
    assert (table.start, table.end, table.pages) == (2 * PAGE_TOKENS, 4 * PAGE_TOKENS, first[2:])
    assert table.drop_before(2 * PAGE_TOKENS + 9) == []


def test_a_table_that_ends_before_the_position_is_empty_then() -> None:
    pool = PagePool(MOST)
    table = PageTable(pool.allocate(2))
    assert len(table.drop_before(9 * PAGE_TOKENS)) == 2
    assert (table.dropped, table.start, table.end, table.pages) == (2, 2 * PAGE_TOKENS, 2 * PAGE_TOKENS, [])
    table.pages = pool.allocate(1)
    assert table.drop_before(3 * PAGE_TOKENS - 1) == [] and len(table.drop_before(3 * PAGE_TOKENS)) == 1


def test_the_pool_grows_by_a_half_at_least_and_evicts_nothing_up_to_its_soft_limit() -> None:
    pool = PagePool(400)
    pool.soft_limit = 300
    pool.allocate(100)
    assert (pool.capacity, pool.unused, pool.available) == (100, 200, 300)
    pool.allocate(1)
    assert (pool.capacity, pool.unused, pool.available) == (150, 199, 299)


def test_a_fixed_pool_is_there_from_the_beginning_and_always() -> None:
    pool = PagePool(5, fixed=True)
    ended(pool, None, LONG[:40])
    pool.evict()
    assert (pool.capacity, pool.available, pool.idle) == (5, 5, 0)


class TestTails:
    """The last page of a sequence is as a rule not full."""

    def test_one_that_has_filled_up_is_found_as_what_it_is_now(self) -> None:
        """And by nobody as what it was, when it has gone."""
        pool = PagePool(1)
        pages = pool.allocate(1)
        for length in (20, 27, PAGE_TOKENS):
            pool.prefixes.insert(None, LONG[:length], pages)
        assert pool.prefixes.lookup(None, (*LONG[:PAGE_TOKENS], 5)) == PrefixMatch(tuple(pages))
        assert pool.prefixes.lookup(None, (*LONG[:20], 5, 6)) == PrefixMatch((), pages[0], 20)
        pool.free(pages)
        pool.allocate(1)
        assert pool.prefixes.lookup(None, (*LONG[:20], 5, 6)) == PrefixMatch() and not pool.prefixes._roots

    def test_of_many_the_newest_are_compared(self) -> None:
        pool = PagePool(4 * CANDIDATES)
        beginning = LONG[:PAGE_TOKENS]
        for number in range(CANDIDATES + 1):
            ended(pool, None, (*beginning, number, 7, 8))
        expected = {0: PAGE_TOKENS, 1: PAGE_TOKENS + 3, CANDIDATES: PAGE_TOKENS + 3}
        for number, tokens in expected.items():
            assert pool.prefixes.lookup(None, (*beginning, number, 7, 8, 9)).tokens == tokens

    def test_of_equal_ones_the_newest_is_found(self) -> None:
        """It is the one that stays longest."""
        pool = PagePool(MOST)
        for last in (1, 2):
            ended(pool, None, (*LONG[:20], last))
        found = pool.prefixes.lookup(None, (*LONG[:20], 3, 3))
        assert found.tail is not None and found.tail.tokens == (*LONG[:20], 2)

    def test_none_is_compared_where_the_prompt_has_nothing_left(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pool = PagePool(MOST)
        ended(pool, None, LONG)
        monkeypatch.setattr(prefix_cache, "shared_prefix", None)
        assert pool.prefixes.lookup(None, LONG[: PAGE_TOKENS + 1]).tokens == PAGE_TOKENS

    def test_one_that_is_written_to_is_found_no_more(self) -> None:
        pool = PagePool(MOST)
        ended(pool, None, LONG[:40])
        found = pool.prefixes.lookup(None, (*LONG[:40], 1))
        assert found.tail is not None
        pool.share([found.tail])
        pool.make_writable(found.tail)
        assert pool.prefixes.lookup(None, (*LONG[:40], 1)).tokens == PAGE_TOKENS
        assert pool.free([found.tail]) == [] and pool.idle == 1


def test_forgetting_some_leaves_the_others_and_what_is_read_is_free_when_it_is_released() -> None:
    pool = PagePool(MOST)
    alice, bob = ("alice", ""), ("bob", "")
    for scope in (alice, bob):
        pages = pool.allocate(2)
        pool.prefixes.insert(None, LONG[:40], pages, scope)
        pool.free(pages)
    read = pool.prefixes.lookup(None, (*LONG[:40], 1), alice).pages
    pool.share(read)
    pool.evict(lambda scope: scope[0] == "alice")
    assert [pool.prefixes.lookup(None, (*LONG[:40], 1), scope).tokens for scope in (alice, bob)] == [0, 40]
    assert pool.free(read) == [] and (pool.read, pool.idle) == (0, 2)
    read = pool.prefixes.lookup(None, (*LONG[:40], 1), bob).pages
    pool.share(read)
    pool.evict()
    assert pool.prefixes.lookup(None, (*LONG[:40], 1), bob) == PrefixMatch()
    assert pool.free(read) == [] and (pool.read, pool.idle) == (0, 0)


def test_moves_are_counted() -> None:
    pool = PagePool(MOST)
    first, second = pool.allocate(2)
    pool.move([(0, 1), (1, 0)])
    assert (pool.moves, first.slot, second.slot) == (1, 1, 0)


def test_what_goes_on_differently_behind_an_equal_page_is_found_behind_the_one_that_was_known() -> None:
    pool = PagePool(MOST)
    beginning = LONG[:PAGE_TOKENS]
    for number in (1, 2):
        ended(pool, None, (*beginning, *range(number, number + PAGE_TOKENS), 9))
    found = [pool.prefixes.lookup(None, (*beginning, *range(number, number + PAGE_TOKENS), 9, 5)) for number in (1, 2)]
    assert [one.tokens for one in found] == [2 * PAGE_TOKENS + 1] * 2
    assert found[0].pages[0] is found[1].pages[0] and found[0].pages[1] is not found[1].pages[1]
