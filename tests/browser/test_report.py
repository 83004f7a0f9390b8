"""The report of real runs in a browser: what a reader does with it, without an error and without the network."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import Watched
from tests.report.made import said, write_run, write_step
from tests.waiting import HANG_SECONDS, start_serving
from tinker_cookbook.data.shipped import shipped_model
from tinker_cookbook.report.page import write_page
from tinker_cookbook.report.runs import open_runs
from tinker_cookbook.report.serve import Reports, Server
from tinker_cookbook.utils.files import append_jsonl

pytestmark = pytest.mark.browser

RealRun = Callable[[str], Path]

HOLDS = r"Verdict: (A: the answer holds|B: the answer does not hold)"
SPEECHES = {
    "script": "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>",
    "right to left": "שלום עולם מרחבא",
    "long": "word " * 40_000,
    "control": "a\x00b\x1b[31mc",
    "emoji": "🙂 漢字 e\u0301",
}


def report(tmp_path: Path, *folders: Path) -> str:
    path = tmp_path / "report.html"
    path.write_bytes(write_page(open_runs([str(folder) for folder in folders]), "a report"))
    return path.as_uri()


@contextmanager
def served(*folders: Path) -> Iterator[str]:
    with Server(Reports([str(folder) for folder in folders]), "served") as server:
        thread = start_serving(server)
        try:
            yield server.url
        finally:
            server.shutdown()
            thread.join()


def open_panel(page: Any, name: str) -> None:
    page.get_by_role("tab", name=name).click()


def test_a_debate_is_laid_out_as_a_debate(watched: Watched, real_run: RealRun, tmp_path: Path) -> None:
    page = watched.page
    url = report(tmp_path, real_run("debate"))
    page.goto(url)
    assert page.locator(".tile").count() >= 2 and page.get_by_text("sampler and trainer").first.is_visible()
    open_panel(page, "Rollouts")
    page.wait_for_selector(".list .row")
    rows = page.locator(".list .row")
    everything = page.locator(".count").text_content()
    rows.first.click()
    page.wait_for_selector(".debate")
    assert page.get_by_text("Speeches, round 2").is_visible() and page.get_by_text("Verdict:").count() == 1
    assert page.locator(".debate .turn").count() == 6
    page.get_by_label("steps (3 or 2-5)").fill("1-2")
    assert page.locator(".list .row span").first.text_content() == "1"
    page.get_by_label("verdict").select_option("A")
    assert page.locator(".count").text_content() != everything
    watched.check(url)


@pytest.mark.parametrize(
    ("name", "title", "columns", "heads", "turns", "verdict"),
    [
        ("proposer_critic", r"proposer critic of members 0 and 1", 2, ["A, proposer", "B, critic"], 5, HOLDS),
        ("consultancy", r"consultancy of member 0", 1, ["A, consultant"], 3, HOLDS),
        ("assigned", r"consultancy of member 0", 1, ["A, consultant"], 2, r"Verdict: ([AB]|INVALID)"),
        ("three_seats", r"debate of members 0 and 1 and 2", 3, ["A", "B", "C"], 9, r"Verdict: [ABC]"),
        ("oversight", r"debate of members 0 and 1", 2, ["A", "B"], 4, r"Verdict on A's answer: (accepted|rejected)"),
    ],
)  # fmt: skip
def test_each_protocol_is_laid_out_as_what_it_is(
    watched: Watched, real_run: RealRun, tmp_path: Path,
    name: str, title: str, columns: int, heads: list[str], turns: int, verdict: str,
) -> None:  # fmt: skip
    page = watched.page
    folder = real_run(name)
    url = report(tmp_path, folder / "debate_seed0" if name == "oversight" else folder)
    page.goto(url)
    open_panel(page, "Rollouts")
    page.wait_for_selector(".list .row")
    page.locator(".list .row").first.click()
    page.wait_for_selector(".debate")
    assert page.get_by_role("heading", name=re.compile(f"{title}$")).is_visible()
    shown = page.locator(".debate h2").all_text_contents()
    assert [text.removesuffix(", winner").partition(", answer")[0] for text in shown] == heads
    style = page.locator(".debate").evaluate("e => getComputedStyle(e).gridTemplateColumns")
    assert len(style.split()) == columns
    assert page.locator(".debate .turn").count() == turns
    assert page.get_by_text(re.compile(f"^{verdict}$")).is_visible()
    assert page.get_by_text("Assigned answers").count() == (name == "assigned")
    assert page.get_by_text("Only measured").count() == (name == "proposer_critic")
    if name == "assigned":  # the next one speaks for the other answer, and is a debate of its own
        page.locator(".list .row").nth(1).click()
        page.get_by_role("heading", name=re.compile("consultancy of member 1$")).wait_for()
        assert page.locator(".debate h2").first.text_content() in ("B, consultant", "B, consultant, winner")
    watched.check(url)


def test_tokens_take_the_colour_of_their_numbers(watched: Watched, real_run: RealRun, tmp_path: Path) -> None:
    page = watched.page
    url = report(tmp_path, real_run("tools"))
    page.goto(url)
    open_panel(page, "Rollouts")
    page.locator(".list .row").first.click()
    page.wait_for_selector(".said.reply")
    colours = {}
    for name in ("none", "advantage", "sampled", "trainer", "difference"):
        page.get_by_label("colour by").select_option(name)
        page.wait_for_selector(f".said.reply[data-coloured='{name}']")
        colours[name] = page.eval_on_selector_all(".said.reply span", "all => all.map(one => one.style.background)")
    assert not any(colours["none"]) and any(colours["sampled"])
    page.locator(".said.reply span").first.hover()
    assert "sampled" in (page.locator(".tip").text_content() or "")
    assert page.locator(".turn").count() >= 1
    watched.check(url)


def test_curves_of_supervised_fine_tuning(watched: Watched, real_run: RealRun, tmp_path: Path) -> None:
    page = watched.page
    url = report(tmp_path, real_run("sft"))
    page.goto(url)
    open_panel(page, "Curves")
    page.wait_for_selector(".chart canvas")
    before = page.locator(".chart[data-metric='train_mean_nll'] canvas").first.screenshot()
    page.get_by_label("smoothing").fill("0.9")
    page.wait_for_selector(".chart canvas")
    assert page.locator(".chart[data-metric='train_mean_nll'] canvas").first.screenshot() != before
    page.get_by_label("metric name contains").fill("no such metric")
    assert page.get_by_text("No metric has such a name.").is_visible()
    page.get_by_label("metric name contains").fill("optim/lr")
    assert page.locator(".chart").count() == 1
    open_panel(page, "Rollouts")
    assert page.get_by_text("This run has no records of rollouts").is_visible()
    watched.check(url)


def test_two_runs_of_a_sweep_are_compared(watched: Watched, real_run: RealRun, tmp_path: Path) -> None:
    page = watched.page
    url = report(tmp_path, real_run("sweep"))
    page.goto(url)
    open_panel(page, "Runs")
    assert page.locator("tbody tr.best").count() == 1
    assert page.locator("svg polyline").count() == 4
    names = [text.split(" (best)")[0] for text in page.locator("tbody tr td:first-child label").all_text_contents()[:4]]
    page.get_by_role("button", name="learning_rate", exact=True).click()
    sorted_names = [
        t.split(" (best)")[0] for t in page.locator("tbody tr td:first-child label").all_text_contents()[:4]
    ]
    assert sorted(names) == sorted(sorted_names) and [("0.001" in name) for name in sorted_names] in (
        [True, True, False, False],
        [False, False, True, True],
    )
    page.locator("label", has_text="which all have reached").locator("input").check()
    open_panel(page, "Curves")
    page.wait_for_selector("text=(2 seeds)")
    watched.check(url)


def made_run(folder: Path, values: list[float], config: dict[str, Any], **sweep: Any) -> Path:
    """A run with held-out accuracies and, at its last step, two groups of rollouts."""
    rows = [
        {
            "step": i,
            "test/env/all/correct": value,
            "test/env/all/total_episodes": 100,
            "env/all/reward/total": value / 2,
        }
        for i, value in enumerate(values)
    ]
    run = write_run(folder, {"num_groups_to_log": 9} | config, rows)
    group = [("2 + 2?", f"answer {i}", i / 4) for i in range(4)]
    write_step(run, len(values) - 1, [group, [("3 + 3?", "six", 1.0), ("3 + 3?", "no", 0.0)]])
    if sweep:
        (run / "sweep_run.json").write_text(json.dumps({"status": "finished", "config": config, "recipe": "x"} | sweep))
    return run


@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1400, 850), (400, 780)])
def test_the_result_stands_on_the_first_screen(
    watched: Watched, tmp_path: Path, width: int, height: int, colours: Any
) -> None:
    page = watched.page
    page.set_viewport_size({"width": width, "height": height})
    page.emulate_media(color_scheme=colours)
    made_run(tmp_path / "alone", [0.2, 0.4, 0.9], {})
    for rate in (1, 2, 3):
        for seed in (0, 1):
            point = {"rate": rate, "seed": seed}
            made_run(tmp_path / "sweep" / f"rate={rate},seed={seed}", [0.2, 0.2 * rate], point, name="x", point=point)
    for name, result in (("alone", ".tile .big"), ("sweep", ".ranking tr.best")):
        url = report(tmp_path, tmp_path / name)
        page.goto("about:blank")
        page.goto(url)
        page.wait_for_selector(".chart canvas")
        box = page.locator(result).first.bounding_box()
        assert box and box["y"] + box["height"] < height / 2, name
        canvas = page.locator(".chart canvas").first.bounding_box()
        assert canvas and canvas["y"] + canvas["height"] < height, name
        for panel in ("Overview", "Curves", "Runs", "Rollouts", "Chat", "Timing"):
            open_panel(page, panel)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (name, panel)
    open_panel(page, "Overview")
    best = page.locator(".ranking tr.best").text_content() or ""
    assert "rate=3" in best and "0.6" in best
    open_panel(page, "Runs")  # the same metric, the same order
    assert page.get_by_label("metric").input_value() == "test/env/all/correct"
    assert "rate=3" in (page.locator("tr.best").text_content() or "")
    watched.check(url)


def test_every_line_has_its_name_and_steps_are_whole(watched: Watched, tmp_path: Path) -> None:
    for rate in range(11):
        made_run(tmp_path / "runs" / str(rate), [0.1, rate / 20], {"rate": rate})
    page = watched.page
    url = report(tmp_path, tmp_path / "runs")
    page.goto(url)
    open_panel(page, "Curves")
    chart = page.locator(".chart[data-metric='test/env/all/correct']").first
    chart.locator("canvas").wait_for()
    names = chart.locator(".names button")
    assert names.count() == 11
    last = names.filter(has=page.get_by_text("10", exact=True))
    assert last.locator("b").text_content() == "0.5"
    strokes = chart.locator(".names line").evaluate_all(
        "all => all.map(one => one.getAttribute('stroke') + one.getAttribute('stroke-dasharray'))"
    )
    assert len(set(strokes)) == 11
    before = chart.locator("canvas").screenshot()
    last.click()
    assert last.get_attribute("aria-pressed") == "true" and chart.locator("canvas").screenshot() != before
    assert page.evaluate("axisOf([0, 1], {}).incrs.every(Number.isInteger)")
    assert page.evaluate("axisOf([0, 0.5], {}).incrs") is None
    watched.check(url)


def test_a_bar_of_the_histogram_opens_its_rollouts_and_a_group_stands_side_by_side(
    watched: Watched, tmp_path: Path
) -> None:
    page = watched.page
    url = report(tmp_path, made_run(tmp_path / "run", [0.2, 0.9], {}))
    page.goto(url)
    open_panel(page, "Rollouts")
    page.wait_for_selector(".said.reply")  # the first one is open
    assert page.locator(".list .row .excerpt").all_text_contents()[:2] == ["answer 0", "answer 1"]
    assert page.locator(".bin").count() == 5  # 0, 0.25, 0.5, 0.75, 1
    page.get_by_role("button", name="reward 0: 2 rollouts").click()
    page.wait_for_selector("text=2 of 6 rollouts")
    assert page.locator(".list .row .excerpt").all_text_contents() == ["answer 0", "no"]
    page.get_by_role("button", name="reward 0.75: 1 rollouts").press("Enter")
    page.wait_for_selector("h2:has-text('group 0, member 3')")
    page.get_by_title("all rewards again").click()
    page.wait_for_selector("text=6 of 6 rollouts")
    page.get_by_role("button", name="side by side").click()
    assert page.locator(".member").count() == 4 and page.locator(".detail .said.prompt").count() == 1
    assert page.locator(".member .said.reply").all_text_contents() == [f"answer {i}" for i in range(4)]
    lefts = [box["x"] for box in map(lambda one: one.bounding_box(), page.locator(".member").all()) if box]
    assert len(set(lefts)) > 1
    page.get_by_role("button", name="member 2").click()
    page.wait_for_selector("h2:has-text('group 0, member 2')")
    bins = page.evaluate("binsOf(Array.from({ length: 100 }, (_, i) => i / 10 + 0.1 * (i % 7)))")
    assert sum(one["count"] for one in bins) == 100 and len(bins) == 20
    watched.check(url)


def test_a_checkpoint_is_talked_to(watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_LOCAL_HOME", str(tmp_path / "home"))
    config = {"model_name": shipped_model("tiny_chat"), "backend": "local", "max_tokens": 16, "temperature": 0.0}
    folder = made_run(tmp_path / "run", [0.2, 0.9], config)
    page = watched.page
    with served(folder) as url:
        page.goto(url)
        open_panel(page, "Chat")
        assert page.get_by_label("checkpoint").input_value() == "base model"
        page.get_by_label("what to say").fill("What is 2 + 3?")
        page.get_by_label("what to say").press("Enter")
        page.locator(".words .said.reply").wait_for()
        assert page.locator(".words .said.reply span").count() > 0
        page.locator(".words .said.reply span").first.hover()
        assert "sampled" in (page.locator(".tip").text_content() or "")
        page.get_by_label("longest reply").fill("0")
        page.get_by_label("longest reply").press("Tab")
        watched.check(url)
        page.get_by_label("what to say").fill("again")
        page.get_by_role("button", name="Send").click()
        page.wait_for_selector("text=max_tokens=0")
        page.get_by_role("button", name="New conversation").click()
        assert page.locator(".words .said").count() == 0


def test_what_a_model_wrote_is_shown_as_text(watched: Watched, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {"num_groups_to_log": 9, "evil": SPEECHES["script"]}, [{"step": 0, "a": 1.0}])
    half = [*said("a").tokens, said("🙂").tokens[0], *said("b").tokens]  # the first token of several of a character
    assert len(said("🙂").tokens) > 1
    groups = [[(text, text, 1.0), (text, "", 0.0)] for text in SPEECHES.values()]
    write_step(folder, 0, [*groups, [("half", half, 1.0), ("half", "whole", 0.0)]])
    page = watched.page
    url = report(tmp_path, folder)
    page.goto(url)
    open_panel(page, "Rollouts")
    page.wait_for_selector(".list .row")
    for group, text in enumerate(SPEECHES.values()):
        page.locator(f".list .row[data-id='0-{group}-0']").click()
        page.wait_for_selector(f"h2:has-text('group {group}, member 0')")
        shown = page.locator(".said.reply").first.text_content() or ""
        wanted = text.replace("\x00", "\u2400").replace("\x1b", "\u241b")
        assert shown == wanted
    page.locator(".list .row[data-id='0-0-1']").click()
    page.wait_for_selector("h2:has-text('member 1')")
    assert page.get_by_text("(nothing)").is_visible()
    page.locator(".list .row[data-id='0-5-0']").click()
    page.wait_for_selector("h2:has-text('group 5, member 0')")
    assert page.locator(".said.reply").first.text_content() == "a\ufffdb"
    open_panel(page, "Config")
    assert page.get_by_text(SPEECHES["script"]).first.is_visible()
    assert page.evaluate("window.hacked") is None
    watched.check(url)


def test_a_step_of_a_run_that_goes_on_appears_after_two_looks_at_most(watched: Watched, tmp_path: Path) -> None:
    """Of which the page takes one a second."""

    def looks() -> int:
        return sum(request.endswith("/api/state") for request in watched.requests)

    folder = write_run(tmp_path / "run", {}, [{"step": 0, "env/all/reward/total": 0.25, "train_mean_nll": 1.0}])
    write_step(folder, 0, [[("2 + 2?", "four", 1.0), ("2 + 2?", "no", 0.0)]])
    page = watched.page
    with served(folder) as url:
        page.goto(url)
        page.wait_for_selector("text=What was measured")
        for _ in range(2):  # at the second the first one has been taken
            with page.expect_request("**/api/state"):
                pass
        before = looks()
        append_jsonl(folder / "metrics.jsonl", {"step": 1, "env/all/reward/total": 0.8125})
        page.wait_for_selector("text=0.8125")
        assert looks() <= before + 2
        open_panel(page, "Rollouts")
        page.wait_for_selector(".list .row")
        write_step(folder, 1, [[("2 + 2?", "five", 1.0), ("2 + 2?", "no", 0.0)]])
        append_jsonl(folder / "metrics.jsonl", {"step": 2, "env/all/reward/total": 0.5})
        page.wait_for_selector("text=4 of 4 rollouts")
        page.get_by_label("text in it").fill("five")
        page.get_by_label("text in it").press("Enter")
        page.wait_for_selector("text=1 of 4 rollouts")
        watched.check(url)


def test_64000_rollouts_are_usable_when_the_first_of_them_are_read_and_scroll(
    watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"step": step, "env/all/reward/total": step / 1000} for step in range(1000)]
    folder = write_run(tmp_path / "run", {}, rows)
    groups = [[(f"question {g}", f"answer {m}", float(m)) for m in range(8)] for g in range(8)]
    write_step(folder, 0, groups)
    first = folder / "iteration_000000" / "rollouts.parquet"
    for step in range(1, 1000):
        other = folder / f"iteration_{step:06d}"
        other.mkdir()
        (other / "rollouts.parquet").write_bytes(first.read_bytes())
    page, index, rest = watched.page, Reports.index, threading.Event()
    read: list[int] = []

    def slow_after_the_first(reports: Reports, number: int, steps: Sequence[int]) -> Any:
        if read:
            rest.wait(HANG_SECONDS)
        read.extend(steps)
        return index(reports, number, steps)

    monkeypatch.setattr(Reports, "index", slow_after_the_first)
    with served(folder) as url:
        page.goto(url + "#panel=rollouts")
        page.wait_for_selector(".list .row")
        page.locator(".list .row").first.click()
        page.wait_for_selector(".said.reply")
        assert len(read) <= 40 and read[0] == 999
        rest.set()
        page.wait_for_selector("text=64000 of 64000 rollouts")
        most = page.evaluate(
            """async () => {
                const list = document.querySelector(".list");
                let most = 0;
                for (let i = 0; i < 60; i++) {
                    list.scrollTop += 20000;
                    await new Promise((resume) => requestAnimationFrame(resume));
                    most = Math.max(most, list.querySelectorAll(".row").length);
                }
                return most;
            }"""
        )
        assert 0 < most < 200
        watched.check(url)
