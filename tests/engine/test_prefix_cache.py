"""What the prefix cache claims to hold is really there, whatever happened to the rows, and no more memory than allowed."""

import random

import pytest
import torch

from tests.engine.devices import here
from tinker_local_backend.engine.kv_cache import KVCache
from tinker_local_backend.engine.lora import Adapter, LoraSpec
from tinker_local_backend.engine.prefix_cache import BLOCK, PrefixCache

LAYERS = 2
ADAPTERS: list[Adapter | None] = [None, *(Adapter(LoraSpec(1), {}, {}) for _ in range(2))]

HEADERS = [tuple(range(n, n + length)) for n, length in ((100, 16), (200, 37), (300, 64), (200, 20))]


def mark(adapter: Adapter | None, tokens: tuple[int, ...], start: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values that say whose they are: (token, position) and (adapter, layer + 1)."""
    which = float(ADAPTERS.index(adapter) + 1)
    keys = torch.tensor([[token, start + i] for i, token in enumerate(tokens)], dtype=torch.float32)
    values = torch.tensor([[which, layer + 1.0]] * len(tokens), dtype=torch.float32)
    return keys.reshape(1, -1, 2), values.reshape(1, -1, 2)


class Rows:
    """A small cache as a scheduler uses it: running rows first, a prompt admitted, extended by tokens, ended."""

    def __init__(self, budget: int):
        self.cache = KVCache(LAYERS, 1, 2, torch.float32, here().device, budget)
        self.prefixes = PrefixCache(self.cache)
        self.running: list[tuple[Adapter | None, tuple[int, ...], int]] = []
        """(adapter, tokens, most tokens)"""

    def admit(self, arriving: list[tuple[Adapter | None, tuple[int, ...], int]], spare: int = 4) -> list[int]:
        """Prompts with their number of samples; running rows end until these fit. Returns how much of each was found."""
        while True:
            rows = len(self.running) + sum(count for _, _, count in arriving)
            length = max(limit for *_, limit in [*self.running, *((None, (), len(t) + spare) for _, t, _ in arriving)])
            if self.cache.rows_that_fit(length) >= rows:
                break
            if not self.running:
                return []
            self.end(len(self.running) // 2)
        self.prefixes.make_room(rows, length)
        found: list[int] = []
        starts: list[int] = []
        for adapter, tokens, count in arriving:
            row = len(self.running)
            reuse = self.prefixes.find(adapter, tokens)
            if reuse is not None:
                assert BLOCK <= reuse[1] < len(tokens)
                self.check(reuse[0], adapter, tokens[: reuse[1]])
            for i in range(count):
                self.prefixes.claim(row + i, rows, reuse if i == 0 else None)
                self.running.append((adapter, tokens, len(tokens) + spare))
            found.append(reuse[1] if reuse else 0)
            starts.append(row)
        for (adapter, tokens, count), row, cached in zip(arriving, starts, found, strict=True):
            self.write(row, adapter, tokens, cached)
            for copy in range(row + 1, row + count):
                self.cache.copy_row(row, copy, len(tokens))
            self.prefixes.hold(row, adapter, tokens)
        return found

    def write(self, row: int, adapter: Adapter | None, tokens: tuple[int, ...], start: int) -> None:
        for layer in range(LAYERS):
            keys, values = mark(adapter, tokens[start:], start, layer)
            self.cache.write(layer, row, start, keys.to(here().device), values.to(here().device))

    def extend(self, row: int, token: int) -> None:
        adapter, tokens, limit = self.running[row]
        if len(tokens) < limit:
            self.running[row] = (adapter, (*tokens, token), limit)
            self.write(row, *self.running[row][:2], len(tokens))

    def end(self, row: int) -> None:
        """As a generator does it: the last running row fills the gap."""
        last = len(self.running) - 1
        adapter, tokens, _ = self.running[row]
        if row != last:
            self.prefixes.swap(row, last, len(tokens), len(self.running[last][1]))
            self.running[row] = self.running[last]
        self.running.pop()
        self.prefixes.hold(last, adapter, tokens)

    def check(self, row: int, adapter: Adapter | None, tokens: tuple[int, ...]) -> None:
        """This row really holds these tokens of this adapter, in every layer."""
        for layer in range(LAYERS):
            keys, values = self.cache.read(layer, row, len(tokens))
            expected_keys, expected_values = mark(adapter, tokens, 0, layer)
            assert torch.equal(keys[0].cpu(), expected_keys) and torch.equal(values[0].cpu(), expected_values)

    def check_all(self) -> None:
        for row, (adapter, tokens, _) in enumerate(self.running):
            self.check(row, adapter, tokens)
        for contents in self.prefixes._contents:
            if contents is not None:
                assert self.prefixes._contents[contents.row] is contents
                self.check(contents.row, contents.adapter, contents.tokens)
        assert self.cache.rows * self.cache.length <= self.cache.budget_tokens
        for slab in self.cache._slabs:
            assert slab.numel() == 2 * self.cache.rows * self.cache.length * 2


def some_prompt(rng: random.Random, rows: Rows) -> tuple[Adapter | None, tuple[int, ...]]:
    """Often one that goes on from what some row holds, under its own adapter or another."""
    tail = tuple(rng.choices([1, 2, 3], k=rng.randint(1, 24)))
    held = [contents for contents in rows.prefixes._contents if contents is not None]
    if held and rng.random() < 0.5:
        contents = rng.choice(held)
        return rng.choice([contents.adapter, *ADAPTERS]), (*contents.tokens[: rng.choice([30, 150])], *tail)
    return rng.choice(ADAPTERS), (*rng.choice(HEADERS), *rng.choice([(), rng.choice(HEADERS)]), *tail)


@pytest.mark.parametrize("budget", [150, 250, 400, 1500])
@pytest.mark.parametrize("seed", range(6))
def test_after_any_sequence_of_operations_everything_is_where_it_is_said_to_be(budget: int, seed: int) -> None:
    rng, rows, hits = random.Random(1000 * budget + seed), Rows(budget), 0
    for _ in range(120):
        match rng.choice(["admit"] * 3 + ["extend"] * 4 + ["end"] * 2 + ["crowd", "clear", "forget"]):
            case "admit":
                arriving = [(*some_prompt(rng, rows), rng.randint(1, 3)) for _ in range(rng.randint(1, 3))]
                hits += sum(rows.admit(arriving, rng.randint(1, 12)))
            case "crowd":  # the slab becomes shorter, where long rows are held
                rows.admit([(None, tuple(range(n, n + 8)), 1) for n in range(rng.randint(4, 12))], spare=1)
            case "extend":
                for row in range(len(rows.running)):
                    rows.extend(row, rng.randint(1, 3))
            case "end":
                for _ in range(rng.randint(0, len(rows.running))):
                    rows.end(rng.randrange(len(rows.running)))
            case "clear" if rows.cache.rows > len(rows.running):
                row = rng.randrange(len(rows.running), rows.cache.rows)
                rows.prefixes.clear(row)
                assert not any(slab[:, row].any() for slab in rows.cache._slabs)
            case "forget" if rng.random() < 0.3:
                rows.prefixes.forget(len(rows.running))
                assert not any(rows.prefixes._contents[len(rows.running) :])
        rows.check_all()
    assert hits > 0 or budget < 400  # with less, hardly a row is ever free


HEADER = HEADERS[2]


@pytest.mark.parametrize("adapter", ADAPTERS[:2], ids=["base", "adapter"])
def test_an_ended_sequence_is_found_by_what_goes_on_from_it_under_its_own_adapter_only(adapter: Adapter | None) -> None:
    rows = Rows(1000)
    rows.admit([(adapter, HEADER, 1)])
    rows.extend(0, 7)
    rows.end(0)
    held = (*HEADER, 7)
    assert rows.prefixes.find(adapter, (*held, 8, 9)) == (0, len(held))
    assert rows.prefixes.find(adapter, (*HEADER[:40], 5, 5)) == (0, 40)
    assert rows.prefixes.find(adapter, held) == (0, len(held) - 1)  # one token must be left to predict from
    for other in ADAPTERS:
        if other is not adapter:
            assert rows.prefixes.find(other, (*held, 8)) is None


def test_less_than_a_block_is_not_looked_for() -> None:
    rows = Rows(1000)
    rows.admit([(None, HEADER, 1)])
    assert rows.prefixes.find(None, (*HEADER[: BLOCK - 1], 5, 5)) is None
    assert rows.prefixes.find(None, HEADER[:BLOCK]) is None
    assert rows.prefixes.find(None, HEADER[: BLOCK + 1]) == (0, BLOCK)


def test_the_longest_of_several_prefixes_is_found() -> None:
    rows = Rows(2000)
    prompts = [(*HEADER[:n], *range(1, 6)) for n in (20, 50, 36, 49)]
    rows.admit([(None, tokens, 1) for tokens in prompts])
    assert rows.prefixes.find(None, (*HEADER, 9)) == (1, 50)


def test_what_was_used_last_is_kept_longest() -> None:
    """Room for four rows: of three ended conversations the one that nobody asked for gives way."""
    rows = Rows(4 * 40)
    prompts = [tuple(range(start, start + 30)) for start in (0, 100, 200)]
    rows.admit([(None, tokens, 1) for tokens in prompts], spare=10)
    while rows.running:
        rows.end(0)
    for tokens in (prompts[1], prompts[0]):
        assert rows.prefixes.find(None, (*tokens, 1)) is not None
    rows.admit([(None, tuple(range(300, 330)), 2)], spare=10)
    kept = [rows.prefixes.find(None, (*tokens, 1)) is not None for tokens in prompts]
    assert kept == [True, True, False]


def test_equal_hashes_of_different_blocks_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tinker_local_backend.engine.prefix_cache._block_keys",
        lambda adapter, tokens: iter(range(len(tokens) // BLOCK)),
    )
    rows = Rows(1000)
    rows.admit([(ADAPTERS[1], HEADERS[1], 1), (None, HEADER, 1)])
    assert rows.prefixes.find(None, (*HEADERS[1], 1)) is None
    assert rows.prefixes.find(None, (*HEADER, 1)) == (1, len(HEADER))
    assert rows.prefixes.find(ADAPTERS[1], (*HEADERS[1], 1)) == (0, len(HEADERS[1]))


def test_forgetting_with_nothing_running_gives_the_memory_back() -> None:
    rows = Rows(1000)
    rows.admit([(None, HEADER, 3)])
    rows.prefixes.forget(3)
    assert rows.cache.rows == 3
    for _ in range(3):
        rows.end(0)
    rows.prefixes.forget(0)
    assert sum(slab.untyped_storage().nbytes() for slab in rows.cache._slabs) == 0
    assert rows.prefixes.find(None, (*HEADER, 1)) is None
