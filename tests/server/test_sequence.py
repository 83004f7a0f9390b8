"""The order of a model's requests, apart from any server."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinker_local_backend.server.access import Tenant
from tinker_local_backend.server.errors import Refused
from tinker_local_backend.server.sessions import RecentRequests, Request, Sequence, Session
from tinker_local_backend.storage import registry
from tinker_local_backend.wire.frames import Frame

TENANT = Tenant("t", Path("/nowhere"))
SESSION = Session(TENANT, registry.Session("s"))


def turn(created: float = 0.0) -> Request:
    return Request(SESSION, Frame({"op": "optim_step"}), created=created)


@given(st.permutations(range(1, 9)), st.integers(0, 8))
def test_turns_come_in_order_however_they_arrive(arrival: list[int], opened_after: int) -> None:
    sequence, turns, given_out = Sequence(), {number: turn() for number in arrival}, []
    for count, number in enumerate(arrival):
        sequence.is_open = count >= opened_after
        sequence.add(number, turns[number])
        given_out += sequence.ready()
        done = {n for n in arrival[: count + 1] if set(range(1, n + 1)) <= set(arrival[: count + 1])}
        assert len(given_out) == (len(done) if sequence.is_open else 0)
    sequence.is_open = True
    given_out += sequence.ready()
    assert given_out == [turns[number] for number in range(1, 9)]


def test_a_number_whose_turn_is_over_is_refused() -> None:
    sequence = Sequence()
    sequence.is_open = True
    sequence.add(1, turn())
    assert len(list(sequence.ready())) == 1
    with pytest.raises(Refused, match="seq_id 1 comes too late: the next request of this model is number 2"):
        sequence.check(1)


def test_a_gap_is_given_up_after_a_time_and_what_follows_goes_on() -> None:
    sequence = Sequence()
    sequence.is_open = True
    late = [turn(created=10.0), turn(created=12.0)]
    sequence.add(2, late[0])
    sequence.add(4, late[1])
    assert list(sequence.ready()) == []
    assert sequence.give_up(before=9.0) == (1, [])
    assert sequence.give_up(before=11.0) == (1, late)
    following = turn()
    sequence.add(5, following)
    assert list(sequence.ready()) == [following]


def test_a_known_request_is_found_and_another_one_under_its_number_refused() -> None:
    recent, request = RecentRequests(), turn()
    recent.add(3, b"digest", request)
    assert recent.find(3, b"digest") is request
    assert recent.find(4, b"digest") is None
    with pytest.raises(Refused, match="seq_id 3 was used by another request"):
        recent.find(3, b"other")


def test_only_the_first_reply_of_a_request_counts() -> None:
    request = turn()
    request.fail("first")
    request.fail("second", "server")
    assert request.reply is not None and request.reply.fields == {"error": "first", "category": "user"}
    assert request.done.is_set()
