"""Which of the finished groups a step takes, and which it drops, with no run around it."""

from typing import Any, cast

import pytest

from tinker_cookbook.rl.ahead import PendingGroups, _Open
from tinker_cookbook.rl.config import AsyncConfig

FINISHED: Any = object()
"""stands for what was sampled, which nothing here looks at"""


def opened(
    most_ahead: int, too_old: Any, versions: dict[tuple[int, int], int | None], finished: list[tuple[int, int]]
) -> PendingGroups:
    """With groups of these versions (None: not started), of which some have finished, in this order; batches of two groups."""
    ahead = object.__new__(PendingGroups)
    ahead._config = AsyncConfig(max_steps_off_policy=most_ahead, deterministic=False, too_old=too_old)
    ahead._most_ahead = most_ahead
    ahead._sizes = dict.fromkeys(range(20), 2)
    ahead._open = {
        key: _Open(cast(Any, None), version, FINISHED if key in finished else None) for key, version in versions.items()
    }
    ahead._finished = list(finished)
    return ahead


A, B, C, D, E, F = ((batch, place) for batch in (3, 4, 5) for place in (0, 1))


def test_those_whose_last_step_comes_first_are_taken_before_those_that_finished_first() -> None:
    """At step 5 with K = 2: E and F may be taken up to step 5, the others up to step 7."""
    versions: dict[tuple[int, int], int | None] = {A: 5, B: 5, C: 5, D: 5, E: 3, F: 3}
    assert opened(2, "wait", versions, [A, B, C, D, E, F])._first_finished(5, 2) == ([E, F], [])
    assert opened(2, "wait", versions, [F, A, B, C, D, E])._first_finished(5, 2) == ([E, F], [])


def test_what_the_next_steps_have_no_room_for_is_taken_now_and_the_rest_in_the_order_of_its_end() -> None:
    """Three groups end with step 6, which takes two: one of them now, the first that finished; then whatever finished first."""
    versions: dict[tuple[int, int], int | None] = {A: 5, B: 5, C: 4, D: 4, E: 4}
    assert opened(2, "wait", versions, [B, A, E, D, C])._first_finished(5, 2) == ([E, B], [])
    assert opened(2, "wait", versions, [B, C, A, E, D])._first_finished(5, 2) == ([C, B], [])
    assert opened(2, "wait", versions | {E: 5}, [B, A, D, C])._first_finished(5, 2) == ([A, B], [])


def test_what_is_taken_for_one_step_is_not_counted_for_the_next_one() -> None:
    """E ends with this step; of the four that end with step 6 or before, which takes two, one more is taken besides."""
    versions: dict[tuple[int, int], int | None] = {A: 5, C: 4, D: 4, E: 3, F: 4}
    assert opened(2, "wait", versions, [E, A, C, D, F])._first_finished(5, 2) == ([C, E], [])


def test_a_step_waits_for_those_that_end_with_it_and_drops_them_where_it_may() -> None:
    versions: dict[tuple[int, int], int | None] = {A: 5, B: 5, C: 3, D: 3}
    assert opened(2, "wait", versions, [A, B])._first_finished(5, 2) is None
    assert opened(2, "wait", versions, [A, B, D])._first_finished(5, 2) is None
    assert opened(2, "drop", versions, [A, B])._first_finished(5, 2) is None, "a step that drops all has nothing"
    assert opened(2, "drop", versions, [A, B, D])._first_finished(5, 2) == ([D], [C])
    assert opened(2, "drop", versions, [D])._first_finished(5, 2) == ([D], [C])
    assert opened(2, "drop", versions | {D: 4}, [B, A])._first_finished(5, 2) == ([B], [C])


def test_no_more_are_dropped_than_the_next_steps_have_no_room_for() -> None:
    versions: dict[tuple[int, int], int | None] = {A: 5, B: 5, C: 4, D: 4, E: 4}
    assert opened(2, "drop", versions, [B, A])._first_finished(5, 2) == ([B], [C])


def test_those_that_come_too_late_for_several_steps_are_all_dropped() -> None:
    """C ends with this step, D, E and F with the next one, which takes two of them."""
    versions: dict[tuple[int, int], int | None] = {A: 5, B: 5, C: 3, D: 4, E: 4, F: 4}
    assert opened(2, "drop", versions, [A, B])._first_finished(5, 3) == ([A], [C, D])
    late: dict[tuple[int, int], int | None] = {D: 3, C: 3, A: 5, B: 5}
    assert opened(2, "drop", late, [A, B])._first_finished(5, 3) == ([A], [C, D]), "in the order of the data"


def test_those_for_which_there_is_room_later_come_in_the_order_of_their_end() -> None:
    """Three end with step 7, and steps 6 and 7 take four."""
    versions: dict[tuple[int, int], int | None] = {A: 4, B: 4, C: 4, D: 5}
    assert opened(3, "wait", versions, [D, A, B, C])._first_finished(5, 2) == ([A, D], [])


def test_what_has_not_started_is_never_too_old() -> None:
    assert opened(0, "wait", {A: 5, B: 5, C: None, D: None}, [B, A])._first_finished(5, 2) == ([A, B], [])


def test_too_few_wait() -> None:
    assert opened(1, "wait", {A: 5, B: 5}, [A])._first_finished(5, 2) is None


@pytest.mark.parametrize("finished", [[A, B, C, D], [D, C, B, A], [C, A, D, B]])
def test_the_oldest_weights_come_first_where_none_is_too_old(
    finished: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    useless: set[tuple[int, int]] = set()
    monkeypatch.setattr(PendingGroups, "_is_unusable", lambda self, key: key in useless)
    ahead = opened(2, "train", {A: 4, B: 3, C: 2, D: 5}, finished)
    assert ahead._oldest_finished(2) == ([C, B], [])
    useless.add(B)
    assert ahead._oldest_finished(2) == ([A, C, B], []), "besides what cannot be trained on"


def test_whatever_its_age_a_step_waits_for_as_many_as_it_takes_while_others_may_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    useless: set[tuple[int, int]] = set()
    monkeypatch.setattr(PendingGroups, "_is_unusable", lambda self, key: key in useless)
    versions: dict[tuple[int, int], int | None] = {A: 4, B: 3, C: 2, D: 5}
    assert opened(2, "train", versions, [A])._oldest_finished(2) is None
    assert opened(2, "train", versions, [B, A])._oldest_finished(2) == ([A, B], []), (
        "the others are still being sampled"
    )
    assert opened(2, "train", {A: 4}, [A])._oldest_finished(2) == ([A], []), "the data has run out"
    assert opened(2, "train", {A: 1, B: 0}, [A, B])._oldest_finished(1) == ([B], []), "those of the first weights"
    useless.add(B)
    assert opened(2, "train", versions, [B, A])._oldest_finished(2) is None
    assert opened(2, "train", {A: 4, B: 3}, [B, A])._oldest_finished(2) == ([A, B], [])
