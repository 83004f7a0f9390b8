"""Several sources in one order: in proportion all along, nothing left out, and the same one from wherever it is resumed."""

import math
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinker_cookbook.data.epochs import Epochs, ShuffledItems
from tinker_cookbook.data.mixing import Mixer, apportion, blocks, check_weights, plan_quotas, source_order
from tinker_cookbook.exceptions import ConfigurationError, DataFormatError

weights_lists = st.lists(st.floats(0.01, 100), min_size=1, max_size=5)
sizes_and_weights = st.lists(
    st.tuples(st.integers(1, 30), st.sampled_from([0.1, 0.2, 0.25, 0.3, 0.5, 0.7, 1.0, 2.0, 3.0])),
    min_size=1,
    max_size=4,
)


def check_shares(order: Sequence[int], weights: Sequence[float]) -> None:
    """At every moment each source has had its share, give or take one slot per source."""
    counts = [0] * len(weights)
    for n, source in enumerate(order, start=1):
        counts[source] += 1
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - n * weight / sum(weights)) < len(weights) + 1e-9


class TestPlans:
    @given(weights_lists, st.integers(0, 200))
    def test_a_schedule_keeps_the_proportions_all_along(self, weights: list[float], slots: int) -> None:
        order = source_order(weights, slots)
        assert len(order) == slots
        check_shares(order, weights)

    def test_shares_are_exact_where_they_can_be(self) -> None:
        assert Counter(source_order([3, 1], 40)) == {0: 30, 1: 10}
        assert list(source_order([1, 1], 4)) == [0, 1, 0, 1]
        assert list(source_order([0.5, 0.25, 0.25], 8)) == [0, 1, 2, 0] * 2

    @given(sizes_and_weights)
    def test_an_epoch_has_every_row_and_is_the_shortest_such(self, drawn: list[tuple[int, float]]) -> None:
        sizes, weights = [size for size, _ in drawn], [weight for _, weight in drawn]
        quotas = plan_quotas(sizes, weights)
        order = source_order(quotas, sum(quotas))
        assert all(quota >= size for quota, size in zip(quotas, sizes, strict=True))
        assert Counter(order) == Counter(dict(enumerate(quotas)))
        shares = [weight / sum(weights) for weight in weights]
        assert len(order) == max(math.ceil(s / w - 1e-9) for s, w in zip(sizes, shares, strict=True))
        check_shares(order, weights)
        assert plan_quotas(sizes, None) == sizes

    @given(st.integers(1, 60), weights_lists)
    def test_shares_of_a_batch_sum_up_and_are_near_their_proportion(self, total: int, weights: list[float]) -> None:
        exact = [total * weight / sum(weights) for weight in weights]
        try:
            shares = apportion(total, weights)
        except ConfigurationError as error:
            assert "leave none for source" in str(error) and min(exact) < 1
            return
        assert sum(shares) == total and min(shares) >= 1
        assert all(abs(share - wanted) < 1 for share, wanted in zip(shares, exact, strict=True))

    def test_ties_go_to_the_earlier(self) -> None:
        assert apportion(5, [1.0, 1.0]) == [3, 2] and blocks([3, 2]) == [0, 0, 0, 1, 1]

    @pytest.mark.parametrize(
        ("weights", "sources", "message"),
        [
            ([], 0, "there is no source to mix"),
            (None, 0, "there is no source to mix"),
            ([0.5, 0.5], 1, "1 sources need as many weights"),
            ([1.0, 0.0], 2, r"weights\[1\]=0.0: must be greater than 0"),
            ([-1.0], 1, r"weights\[0\]=-1.0"),
            ([1.0, math.inf], 2, r"weights\[1\]=inf"),
            ([math.nan], 1, r"weights\[0\]=nan"),
        ],
    )
    def test_weights_that_cannot_be(self, weights: list[float] | None, sources: int, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            check_weights(weights, sources)


def mixer(sizes: Sequence[int], pattern: Sequence[int], seed: int) -> Mixer[tuple[int, int]]:
    """Item i of source s is (s, i); each source goes through epochs."""
    sources = [ShuffledItems([(s, i) for i in range(size)]) for s, size in enumerate(sizes)]
    return Mixer([Epochs(source, seed, "source", s) for s, source in enumerate(sources)], pattern)


patterns = st.integers(1, 4).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(1, 9), min_size=n, max_size=n),
        st.lists(st.integers(0, n - 1), min_size=1, max_size=12),
    )
)


class TestMixer:
    @given(patterns, st.integers(0, 3), st.integers(1, 4))
    def test_each_source_gives_every_item_once_per_epoch(
        self, drawn: tuple[list[int], list[int]], seed: int, rounds: int
    ) -> None:
        sizes, pattern = drawn
        mixed = mixer(sizes, pattern, seed)
        found: list[list[int]] = [[] for _ in sizes]
        for position in range(rounds * len(pattern)):
            source, (its_source, item) = mixed.draw(position)
            assert source == its_source == pattern[position % len(pattern)]
            found[source].append(item)
        for size, items in zip(sizes, found, strict=True):
            for start in range(0, len(items) - size + 1, size):
                assert sorted(items[start : start + size]) == list(range(size))
            assert len(set(items)) == min(size, len(items))

    @given(patterns, st.integers(0, 3), st.integers(1, 5), st.integers(0, 9))
    def test_resuming_anywhere_equals_going_on(
        self, drawn: tuple[list[int], list[int]], seed: int, size: int, start: int
    ) -> None:
        going_on = [mixer(*drawn, seed).get_batch(index, size) for index in range(start + 4)]
        resumed = mixer(*drawn, seed)
        assert [resumed.get_batch(index, size) for index in range(start, start + 4)] == going_on[start:]
        whole = mixer(*drawn, seed)
        assert [item for batch in going_on for item in batch] == [whole.draw(n) for n in range(size * (start + 4))]

    @given(weights_lists, st.integers(0, 3))
    def test_weights_are_respected_in_the_long_run(self, weights: list[float], seed: int) -> None:
        mixed = mixer([5] * len(weights), source_order(weights, 300), seed)
        check_shares([mixed.draw(n)[0] for n in range(300)], weights)

    def test_errors_name_the_source(self) -> None:
        class Broken:
            def draw(self, number: int) -> int:
                raise DataFormatError(f"row {number} is wrong")

        with pytest.raises(DataFormatError, match="source 1 of the mixture: row 0 is wrong"):
            Mixer([Broken(), Broken()], [1, 0]).draw(0)
