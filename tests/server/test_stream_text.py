"""Text that is given out while it grows: never a half character, a stop string, or the begin of a call."""

from array import array

import pytest

pytest.importorskip("fastapi", reason="the extra `server` is not installed")

from hypothesis import given
from hypothesis import strategies as st

from tests.server.serving import TINY_CHAT
from tinker_local_backend.engine.sampling.sampler import SampledSequence
from tinker_local_backend.server.chat_text import ChatText
from tinker_local_backend.server.operations import Progress
from tinker_local_backend.server.text_stream import TextSoFar
from tinker_local_backend.wire.frames import Frame

TEXT = ChatText.of(TINY_CHAT)


def pieces(said: str, stops: list[str], with_tools: bool = False, at_a_time: int = 1) -> list[str]:
    """What is given out of a text's tokens, some at a time, before its end."""
    so_far = TextSoFar(TEXT, [], stops, with_tools)
    tokens = TEXT.tokenizer.encode(said, add_special_tokens=False)
    return [so_far.feed(tokens[i : i + at_a_time]) for i in range(0, len(tokens), at_a_time)]


@given(st.text(alphabet="abc é界🙂 \n<>", max_size=40), st.integers(1, 5))
def test_pieces_add_up_and_hold_whole_characters(said: str, at_a_time: int) -> None:
    so_far = TextSoFar(TEXT, [], [], False)
    tokens = TEXT.tokenizer.encode(said, add_special_tokens=False)
    given_out = [so_far.feed(tokens[i : i + at_a_time]) for i in range(0, len(tokens), at_a_time)]
    whole = TEXT.text(tokens)
    assert all("\ufffd" not in piece for piece in given_out)
    assert "".join(given_out) + so_far.end(whole) == whole


@given(st.text(alphabet="abx", max_size=30), st.lists(st.text(alphabet="abx", min_size=1, max_size=4), max_size=3))
def test_nothing_of_a_stop_string_is_given_out(said: str, stops: list[str]) -> None:
    """The engine draws no token after the one that completes a stop string."""
    so_far, shown, text = TextSoFar(TEXT, [], stops, False), "", ""
    for token in TEXT.tokenizer.encode(said, add_special_tokens=False):
        shown += so_far.feed([token])
        text += TEXT.piece(token)
        if any(stop in text for stop in stops):
            break
    cut = min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))
    assert text.startswith(shown) and len(shown) <= cut
    held_back = max(map(len, stops), default=1) - 1
    assert len(shown) == cut or (cut == len(text) and len(shown) >= cut - held_back)


def test_a_call_of_a_tool_is_held_back() -> None:
    said = 'I add. <tool_call>{"name": "add", "arguments": {}}</tool_call>'
    assert "".join(pieces(said, [], with_tools=True)) == "I add."
    assert "".join(pieces("a < b", [], with_tools=True)) == "a < b"
    assert "".join(pieces(said, [])).startswith("I add. <tool_call>")


def test_progress_tells_each_token_once() -> None:
    told: list[Frame] = []
    progress = Progress(told.append)
    samples = [SampledSequence([1], array("f", [-1.0])), SampledSequence()]
    progress(samples)
    progress(samples)
    samples[1] = SampledSequence([7, 8], array("f", [-1.0, -2.0]))
    progress(samples)
    progress([SampledSequence(), SampledSequence([7], array("f", [-1.0]))])  # both begin again
    progress([SampledSequence([1, 2], array("f", [-1.0, -3.0])), SampledSequence([7, 8], array("f", [-1.0, -2.0]))])
    news = [
        (entry["index"], entry["tokens"], entry["logprobs"]) for frame in told for entry in frame.fields["progress"]
    ]
    assert news == [(0, [1], [-1.0]), (1, [7, 8], [-1.0, -2.0]), (0, [2], [-3.0])]
