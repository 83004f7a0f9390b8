"""The panel of failures in a browser: the worst rollouts with their reasons, and the way to each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.conftest import Watched
from tests.report.made import write_run, write_step
from tinker_cookbook.report.page import write_page
from tinker_cookbook.report.runs import open_runs

pytestmark = pytest.mark.browser


def test_the_worst_rollouts_stand_with_their_reasons_and_open(watched: Watched, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {}, [{"step": 0, "a": 1.0}])
    write_step(folder, 0, [[("2 + 2?", "four", 1.0), ("2 + 2?", "<b>five</b>", -1.0)]])
    path = tmp_path / "report.html"
    path.write_bytes(write_page(open_runs([str(folder)]), "a report"))
    page = watched.page
    page.goto(path.as_uri())
    page.get_by_role("tab", name="Failures").click()
    first = page.locator("table.failures tbody tr").first
    assert "<b>five</b>" in first.inner_text() and "only its reward" in first.inner_text()
    first.get_by_role("button").click()
    assert page.get_by_role("tab", name="Rollouts").get_attribute("aria-selected") == "true"
    watched.check(path.as_uri())
