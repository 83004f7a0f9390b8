"""Medians, paired ratios, disturbed repetitions, and what happens when a contender fails."""

import pytest

from benchmarks import harness
from benchmarks.config import ComparisonConfig
from benchmarks.harness import Contender, Measurement, Repetition, Spread, measure, paired_ratio


def repetition(number: int, seconds: float, tokens: int = 100, disturbed: bool = False) -> Repetition:
    return Repetition(number, seconds, tokens, own_cores=1.0, foreign_cores=0.0, disturbed=disturbed)


def config(**keys: object) -> ComparisonConfig:
    return ComparisonConfig(**{"quiet_seconds": 0.0, **keys})


def test_spread_is_median_and_extremes() -> None:
    assert Spread.of([5.0, 1.0, 3.0]) == Spread(3.0, 1.0, 5.0)


def test_ratio_is_taken_within_rounds() -> None:
    # The machine was ten times slower in round 2: the ratio of medians would hide that each round agrees on 2.
    ours = Measurement("ours", True, repetitions=[repetition(1, 1.0), repetition(2, 10.0), repetition(3, 1.0)])
    peer = Measurement("peer", False, repetitions=[repetition(1, 2.0), repetition(2, 20.0), repetition(3, 2.0)])
    assert paired_ratio(ours, peer, per_token=False) == Spread(2.0, 2.0, 2.0)


def test_ratio_per_token_accounts_for_different_lengths() -> None:
    ours = Measurement("ours", True, repetitions=[repetition(1, 1.0, tokens=100)])
    peer = Measurement("peer", False, repetitions=[repetition(1, 1.0, tokens=50)])
    assert paired_ratio(ours, peer, per_token=True).median == 2.0


def test_rounds_that_the_peer_missed_do_not_count() -> None:
    ours = Measurement("ours", True, repetitions=[repetition(1, 1.0), repetition(2, 1.0)])
    peer = Measurement("peer", False, repetitions=[repetition(2, 3.0)])
    assert paired_ratio(ours, peer, per_token=False) == Spread(3.0, 3.0, 3.0)


def test_contenders_take_turns_in_rotating_order() -> None:
    ran = []

    def contender(name: str) -> Contender:
        return Contender(name, lambda number: ran.append((number, name)) or 1, is_ours=True)

    measure([contender("a"), contender("b")], config(repetitions=2, max_foreign_cores=1e9))
    warm_up = [(0, "a"), (0, "b")]
    assert ran == [*warm_up, (1, "b"), (1, "a"), (2, "a"), (2, "b")]


def test_a_disturbed_repetition_is_done_again_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = iter([repetition(1, 9.0, disturbed=True), repetition(1, 1.0), repetition(2, 2.0)])
    monkeypatch.setattr(harness, "time_once", lambda *_: next(outcomes))
    (result,) = measure([Contender("ours", lambda number: 1, True)], config(repetitions=2, reruns=2))
    assert [r.seconds for r in result.repetitions] == [1.0, 2.0]
    assert [r.seconds for r in result.discarded] == [9.0]


def test_without_reruns_left_a_disturbed_repetition_counts_and_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "time_once", lambda *_: repetition(1, 9.0, disturbed=True))
    (result,) = measure([Contender("ours", lambda number: 1, True)], config(repetitions=1, reruns=3))
    assert (result.disturbed, len(result.discarded)) == (1, 3)


def test_a_failing_peer_is_reported_and_the_others_go_on() -> None:
    def fail(number: int) -> int:
        raise RuntimeError("out of cheese")

    ours, peer = measure(
        [Contender("ours", lambda number: 1, True), Contender("peer", fail)],
        config(repetitions=2, max_foreign_cores=1e9),
    )
    assert len(ours.repetitions) == 2
    assert peer.status == "failed: RuntimeError: out of cheese"


def test_ours_may_not_fail() -> None:
    def fail(number: int) -> int:
        raise RuntimeError("out of cheese")

    with pytest.raises(RuntimeError, match="out of cheese"):
        measure([Contender("ours", fail, is_ours=True)], config())
