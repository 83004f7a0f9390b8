"""Our renderers do what the reference package does, token for token, weight for weight and reply for reply, or the difference
is listed in differences.py with its reason."""

from pathlib import Path

import pytest

from tests.reference.compare import differences
from tests.reference.differences import DIFFERENCES, reason
from tests.reference.numbers import table
from tests.reference.subjects import FAMILIES
from tinker_cookbook.renderers import get_registered_renderer_names, known_renderer_names
from tinker_cookbook.renderers.registry import VERIFIED

EVERY = [(family, renderer) for family, what in FAMILIES.items() for renderer in what.renderers]


@pytest.mark.parametrize(("family", "renderer"), EVERY)
def test_what_differs_is_listed(family: str, renderer: str) -> None:
    found = differences(family, renderer)
    unlisted = {observation: pair for observation, pair in found.items() if reason(renderer, observation) is None}
    shown = "\n\n".join(f"{name}\nrecorded: {recorded}\nours: {ours}" for name, (recorded, ours) in unlisted.items())
    assert not unlisted, f"{renderer} differs from the recordings, and no reason is listed:\n{shown}"


def test_what_is_listed_differs() -> None:
    needed = {reason(renderer, name) for family, renderer in EVERY for name in differences(family, renderer)}
    assert [why for _, _, why in DIFFERENCES if why not in needed] == []


def test_the_page_says_how_many_prompts_differ() -> None:
    page = (Path(__file__).parents[2] / "docs" / "renderers.md").read_text(encoding="utf-8")
    assert table() in page, "write the table anew: python -m tests.reference.numbers"


def test_verified_are_those_that_are_compared() -> None:
    assert {renderer for _, renderer in EVERY} == VERIFIED
    assert set(known_renderer_names()) - set(get_registered_renderer_names()) > VERIFIED
