"""The page: whole in one file, and nothing that a run says can act in it."""

import base64
import gzip
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.report.made import write_run, write_step
from tinker_cookbook.report import page
from tinker_cookbook.report.runs import open_runs

EVIL = "</script><script>alert(1)</script><!--"


class Elements(HTMLParser):
    """Scripts and addresses of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: list[str | None] = []
        self.addresses: list[str] = []
        self.content: dict[str, str] = {}
        self._inside: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.addresses += [value for name in ("src", "href") if (value := given.get(name)) is not None]
        if tag == "script":
            self.kinds.append(given.get("type"))
            self._inside = given.get("id")

    def handle_data(self, data: str) -> None:
        if self._inside is not None:
            self.content[self._inside] = self.content.get(self._inside, "") + data

    def handle_endtag(self, tag: str) -> None:
        self._inside = None


def parse(content: bytes) -> Elements:
    found = Elements()
    found.feed(content.decode())
    return found


def unpacked(found: Elements, name: str) -> Any:
    return json.loads(gzip.decompress(base64.b64decode(found.content[name])))


def held(content: bytes) -> tuple[dict[int, set[int]], str | None]:
    """The groups of each step whose tokens a page has, and its sentence about the others."""
    found = parse(content)
    (run,) = json.loads(found.content["data"])["runs"]
    steps = {step: {int(group) for group in unpacked(found, f"run0-step{step}")["groups"]} for step in run["steps"]}
    assert steps.keys() == {int(name[9:]) for name in found.content if re.match("run0-step", name)}
    assert len(unpacked(found, "run0-index")["step"]) == 9 * 4  # a line about every rollout, whatever the room
    return steps, run["left_out"]


def test_the_file_holds_everything_and_nothing_in_it_can_act(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {"num_groups_to_log": 1, "note": EVIL}, [{"step": 0, "a": 1.0, "t": EVIL}])
    write_step(folder, 0, [[("2 + 2?", EVIL, 1.0), ("2 + 2?", "no", 0.0)], [("not logged", "x", 1.0), ("x", "y", 0.0)]])
    found = parse(page.write_page(open_runs([str(folder)]), EVIL))
    assert found.addresses == []
    assert found.kinds == ["application/json", *["application/octet-stream"] * 2, *[None] * len(page.SCRIPTS)]
    content = json.loads(found.content["data"])
    (run,) = content["runs"]
    assert run["metrics"] == {"step": [0], "a": [1.0], "t": [EVIL]} and run["config"]["note"] == EVIL
    index = unpacked(found, "run0-index")
    assert index["group"] == [0, 0, 1, 1] and index["text"] == [EVIL, "no", "x", "y"]
    packed = unpacked(found, "run0-step0")
    assert set(packed["groups"]) == {"0", "1"} and run["left_out"] is None  # those that were not logged too
    assert "".join(packed["groups"]["0"][0]["turns"][0]["tokens"]) == EVIL


def test_secrets_of_a_config_do_not_reach_the_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {"api_key": "tml-abcdefghijklmnop"}, [])
    assert b"tml-abcdefghijklmnop" not in page.write_page(open_runs([str(folder)]), "x")


@pytest.fixture
def nine_steps(tmp_path: Path) -> Path:
    """Two groups a step, one of which was logged."""
    folder = write_run(tmp_path / "run", {"num_groups_to_log": 1}, [])
    for step in range(9):
        other = " ".join(str((step + 3) * n * 7919 % 1009) for n in range(40))  # takes several times the room
        write_step(
            folder,
            step,
            [[("2 + 2?", f"four {step}", 1.0), ("2 + 2?", "no", 0.0)], [("x", other, 1.0), ("x", "y", 0.0)]],
        )
    return folder


def test_a_page_has_the_tokens_of_every_rollout_that_fits(nine_steps: Path) -> None:
    steps, left_out = held(page.write_page(open_runs([str(nine_steps)]), "x"))
    assert steps == {step: {0, 1} for step in range(9)} and left_out is None


def test_where_not_all_fit_a_sentence_says_which(nine_steps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run,) = runs = open_runs([str(nine_steps)])
    logged, whole = (len(page.pack(page._groups(run, 0, page.rollouts.words_of(run), most))) for most in (1, -1))
    assert 2 * logged < whole < 9 * logged
    monkeypatch.setattr(page, "MOST_BYTES", 2 * 9 * (logged + 30))  # those that were logged, and some of the rest
    steps, left_out = held(page.write_page(runs, "x"))
    full = [step for step, groups in steps.items() if groups == {0, 1}]
    assert set(steps) == set(range(9)) and full == list(range(9 - len(full), 9)) and 0 < len(full) < 9
    assert left_out and f"of the last {len(full)} steps all, of {9 - len(full)} other steps the groups" in left_out
    monkeypatch.setattr(page, "MOST_BYTES", 2 * 5 * logged + 100)  # not even those that were logged
    steps, left_out = held(page.write_page(runs, "x"))
    full = [step for step, groups in steps.items() if groups == {0, 1}]
    assert {step: steps[step] for step in (0, 2, 4)} == {step: {0} for step in (0, 2, 4)} and 1 not in steps
    assert left_out and f"of {9 - len(steps)} steps none" in left_out and full == list(range(9 - len(full), 9))
    monkeypatch.setattr(page, "MOST_BYTES", 1)
    assert held(page.write_page(runs, "x"))[0] == {}


def test_an_empty_run_has_a_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {}, [])
    content = json.loads(parse(page.write_page(open_runs([str(folder)]), "x")).content["data"])
    assert content["runs"][0]["metrics"] == {"step": []} and content["runs"][0]["health"] == []
