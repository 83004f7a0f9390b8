"""Headless Chromium, and real runs to look at."""

# Packages of extras.
# pyright: reportMissingImports=false

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.waiting import HANG_SECONDS
from tools.screenshots import chromium

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).parents[2]

DEBATE = ["recipes.debate_rs_grpo", "max_steps=1", "eval_every=0"]
RUNS = {
    "debate": ["recipes.debate_rs_grpo", "max_steps=3", "enable_trace=true"],
    "proposer_critic": [*DEBATE, "protocol=proposer_critic", "judge=mock", "measure=no_debate"],
    "consultancy": [*DEBATE, "protocol=consultancy", "judge=mock"],
    "assigned": [*DEBATE, "protocol=consultancy", "protocol.answers=assigned", "debate_train=judge", "judge=mock"],
    "three_seats": [*DEBATE, "protocol.seats=3", "num_rollouts=48", "judge=mock"],
    "oversight": [
        "recipes.debate_study", "seeds=0", "protocols=debate", "tokens=2000", "samples=2", "num_test=6",
        "write_records=true", "num_groups_to_log=1",
    ],
    "sft": ["recipes.sl_basic", "max_steps=8"],
    "tools": ["recipes.tool_use", "max_steps=2", "warm_up_steps=20"],
    "sweep": [
        "recipes.sweep", "recipe=recipes.rl_basic", "grid.learning_rate=1e-4,1e-3", "seeds=0,1", "set.max_steps=3",
        "set.eval_every=0", "processes=0",
    ],
}  # fmt: skip


@pytest.fixture(scope="session")
def real_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a real run, which is made once."""
    root = tmp_path_factory.mktemp("runs")

    def make(name: str) -> Path:
        folder = root / name
        if not folder.exists():
            key = "sweep_dir" if name == "sweep" else "log_path"
            command = [sys.executable, "-m", *RUNS[name], f"{key}={folder}"]
            subprocess.run(command, cwd=ROOT, check=True, timeout=HANG_SECONDS, stdout=subprocess.DEVNULL)
        return folder

    return make


@dataclass
class Watched:
    """A page, and what it should not have done."""

    page: Page
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def check(self, *allowed: str) -> None:
        """No error on the console, and no request but for these beginnings of addresses."""
        assert self.errors == []
        assert [url for url in self.requests if not url.startswith(allowed)] == []


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def watched(browser: Browser) -> Iterator[Watched]:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.set_default_timeout(1000 * HANG_SECONDS)
    found = Watched(page)

    def on_console(message: Any) -> None:
        if message.type == "error":
            found.errors.append(message.text)

    page.on("console", on_console)
    page.on("pageerror", lambda error: found.errors.append(str(error)))
    page.on("request", lambda request: found.requests.append(request.url))
    yield found
    context.close()
