"""The page: whole in one file, and nothing that a run says can act in it."""

import base64
import gzip
import json
import re
from html.parser import HTMLParser
from pathlib import Path

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


def test_the_file_holds_everything_and_nothing_in_it_can_act(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {"num_groups_to_log": 1, "note": EVIL}, [{"step": 0, "a": 1.0, "t": EVIL}])
    write_step(folder, 0, [[("2 + 2?", EVIL, 1.0), ("2 + 2?", "no", 0.0)], [("not logged", "x", 1.0), ("x", "y", 0.0)]])
    found = parse(page.write_page(open_runs([str(folder)]), EVIL))
    assert found.addresses == []
    assert found.kinds == ["application/json", "application/octet-stream", *[None] * len(page.SCRIPTS)]
    content = json.loads(found.content["data"])
    (run,) = content["runs"]
    assert run["metrics"] == {"step": [0], "a": [1.0], "t": [EVIL]} and run["config"]["note"] == EVIL
    assert run["rollouts"]["group"] == [0, 0, 1, 1]  # all of them, the tokens of those that were logged
    packed = json.loads(gzip.decompress(base64.b64decode(found.content["run0-step0"])))
    assert set(packed["groups"]) == {"0"}
    assert "".join(packed["groups"]["0"][0]["turns"][0]["tokens"]) == EVIL


def test_secrets_of_a_config_do_not_reach_the_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {"api_key": "tml-abcdefghijklmnop"}, [])
    assert b"tml-abcdefghijklmnop" not in page.write_page(open_runs([str(folder)]), "x")


def test_a_page_keeps_within_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path / "run", {"num_groups_to_log": 1}, [])
    for step in range(9):
        write_step(folder, step, [[("2 + 2?", f"four {step}", 1.0), ("2 + 2?", "no", 0.0)]])
    whole = parse(page.write_page(open_runs([str(folder)]), "x"))
    steps = [name for name in whole.content if re.match("run0-step", name)]
    assert len(steps) == 9
    size = max(len(whole.content[name]) for name in steps)
    monkeypatch.setattr(page, "MOST_BYTES", 5 * size)
    found = parse(page.write_page(open_runs([str(folder)]), "x"))
    (run,) = json.loads(found.content["data"])["runs"]
    assert run["steps"] == [0, 2, 4, 6, 8] and run["steps_left_out"] == 4
    assert len(run["rollouts"]["step"]) == 18


def test_an_empty_run_has_a_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {}, [])
    content = json.loads(parse(page.write_page(open_runs([str(folder)]), "x")).content["data"])
    assert content["runs"][0]["metrics"] == {"step": []} and content["runs"][0]["health"] == []
