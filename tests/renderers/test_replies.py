"""A reply's text and ids without its stop, with every kind of stop that a renderer has."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.debate.arena import RENDERERS, make_renderer, reply_ids, stop_ids
from tests.drawn import examples
from tinker_cookbook.renderers.replies import decode_reply, strip_stop


@pytest.mark.parametrize("name", RENDERERS)
@examples(60)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<|>:\r\n"), min_size=1, max_size=8))
def test_only_the_stop_goes(name: str, text: str) -> None:
    renderer = make_renderer(name)
    cut, ended = reply_ids(renderer, text, stopped=False), reply_ids(renderer, text)
    assert strip_stop(renderer, ended) == strip_stop(renderer, cut) == cut
    assert decode_reply(renderer, ended) == decode_reply(renderer, cut) == text


@pytest.mark.parametrize("name", RENDERERS)
def test_a_reply_that_is_nothing_but_its_stop(name: str) -> None:
    renderer = make_renderer(name)
    assert strip_stop(renderer, stop_ids(renderer)) == [] and decode_reply(renderer, stop_ids(renderer)) == ""
    assert strip_stop(renderer, []) == [] and decode_reply(renderer, []) == ""
