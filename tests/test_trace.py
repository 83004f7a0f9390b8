"""Spans: nested, of tasks that overlap, as metrics and as a file for trace viewers."""

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tinker_cookbook.stores import LocalStorage, TrainingRunStore
from tinker_cookbook.utils import trace
from tinker_cookbook.utils.files import read_jsonl


@pytest.fixture
def events_file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "folder" / "trace_events.jsonl"
    trace.trace_init(output_file=str(path), flush_interval_sec=1e9)
    yield path
    trace.trace_shutdown()


def events(path: Path) -> list[dict[str, Any]]:
    trace.trace_shutdown()
    return [json.loads(line) for line in path.read_text().splitlines()]


def spans(found: list[dict[str, Any]]) -> list[tuple[str, str, int]]:
    return [(event["ph"], event["name"], event["tid"]) for event in found if event["ph"] != "M"]


@trace.scope
async def outer(turns: list[asyncio.Event]) -> str:
    """Waits for its turn."""
    async with trace.scope_span("waiting"):
        await turns[0].wait()
    inner("deep")
    turns[1].set()
    return "done"


@trace.scope
def inner(depth: str) -> None:
    trace.update_scope_context({"depth": depth})
    trace.get_scope_context().attributes["more"] = (1, 2)


async def two_tasks() -> list[str]:
    first, second, last = asyncio.Event(), asyncio.Event(), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        # The first waits for the second: their spans overlap and do not nest.
        tasks = [
            group.create_task(outer(turns), name=f"task-{i}")
            for i, turns in enumerate([[second, last], [first, second]])
        ]
        first.set()
    return [task.result() for task in tasks]


def test_tasks_that_overlap_have_rows_of_their_own(events_file: Path) -> None:
    assert asyncio.run(two_tasks()) == ["done", "done"]
    found = events(events_file)
    rows = {event["args"]["name"]: event["tid"] for event in found if event["name"] == "thread_name"}
    assert set(rows) == {"task-0", "task-1"} and len(set(rows.values())) == 2
    each = ["outer", "waiting", "waiting", "inner", "inner", "outer"]
    for row in rows.values():
        mine = [(phase, name) for phase, name, tid in spans(found) if tid == row]
        assert mine == list(zip("BBEBEE", each, strict=True))
    order = [(phase, name, row) for phase, name, row in spans(found) if name == "outer"]
    a, b = rows["task-0"], rows["task-1"]
    assert order == [("B", "outer", a), ("B", "outer", b), ("E", "outer", b), ("E", "outer", a)]
    times = [event["ts"] for event in found if event["ph"] != "M"]
    assert times == sorted(times)


def test_a_span_says_what_it_was_told_and_no_other_does(events_file: Path) -> None:
    asyncio.run(two_tasks())
    told = [event["args"] for event in events(events_file) if event["ph"] == "E"]
    assert told.count({"depth": "deep", "more": [1, 2]}) == 2
    assert told.count({}) == len(told) - 2


def test_threads_are_processes_of_the_viewer(events_file: Path) -> None:
    inner("here")
    thread = threading.Thread(target=inner, args=["there"], name="helper")
    thread.start()
    thread.join()
    found = events(events_file)
    names = {event["args"]["name"]: event["pid"] for event in found if event["name"] == "process_name"}
    assert names == {"MainThread": 0, "helper": 1}
    assert [(event["pid"], event["args"]["depth"]) for event in found if event["ph"] == "E"] == [
        (0, "here"),
        (1, "there"),
    ]
    assert {event["cat"] for event in found if event["ph"] == "E"} == {"sync"}


def test_the_span_of_an_error_ends(events_file: Path) -> None:
    with pytest.raises(ZeroDivisionError), trace.scope_span_sync("failing"):
        _ = 1 / 0
    with trace.scope_span_sync("after"):
        trace.update_scope_context({"mine": 1})
    found = events(events_file)
    assert [phase for phase, _, _ in spans(found)] == ["B", "E", "B", "E"]
    assert found[-1]["args"] == {"mine": 1}


def test_events_reach_the_disk_while_the_program_runs(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    trace.trace_init(flush_interval_sec=0.0, output_file=path)
    try:
        inner("x")
        assert len(path.read_text().splitlines()) == 3
    finally:
        trace.trace_shutdown()
    inner("after the end")
    assert len(path.read_text().splitlines()) == 3


def test_a_second_trace_goes_on_in_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for _ in range(2):
        trace.trace_init(output_file=path)
        inner("x")
        trace.trace_shutdown()
    assert [phase for phase, _, _ in spans(events(path))] == ["B", "E", "B", "E"]


def test_decorated_functions_stay_what_they_are(events_file: Path) -> None:
    assert outer.__doc__ == "Waits for its turn." and asyncio.iscoroutinefunction(outer)
    assert inner.__name__ == "inner" and not asyncio.iscoroutinefunction(inner)


def test_the_spans_of_a_step_become_metrics(tmp_path: Path) -> None:
    window = trace.IterationWindow()
    window.start = 10.0
    window.end = 14.0
    window.spans = [
        trace.SpanRecord("a", 10.0, 11.0),
        trace.SpanRecord("b", 11.0, 11.5),
        trace.SpanRecord("a", 11.0, 14.0),
    ]
    assert window.get_timing_metrics() == {
        "time/a:total": 4.0,
        "time/a:count": 2,
        "time/a:mean": 2.0,
        "time/a:max": 3.0,
        "time/b": 0.5,
        "time/total": 4.0,
    }
    window.write_spans_jsonl(tmp_path / "timing_spans.jsonl", 7)
    (row,) = [json.loads(line) for line in (tmp_path / "timing_spans.jsonl").read_text().splitlines()]
    assert row["step"] == 7
    assert row["spans"][1] == {"name": "b", "duration": 0.5, "wall_start": 1.0, "wall_end": 1.5}


def test_a_step_has_the_spans_that_ended_in_it() -> None:
    async def step() -> list[str]:
        inner("before")
        with trace.trace_iteration(step=7) as window:
            await two_tasks()
            await asyncio.to_thread(inner, "thread")
        inner("after")
        return [span.name for span in window.spans]

    names = asyncio.run(step())
    assert sorted(names) == ["inner"] * 3 + ["outer"] * 2 + ["waiting"] * 2
    assert names[-1] == "inner"


def test_viewers_get_one_array(events_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with trace.trace_iteration(step=3):
        inner("x")
    trace.trace_shutdown()
    with events_file.open("a") as file:
        file.write('{"torn": ')
    trace.main([str(events_file), str(tmp_path / "trace.json")])
    shown = json.loads((tmp_path / "trace.json").read_text())
    assert [(event["ph"], event["name"]) for event in shown] == [
        ("M", "process_name"),
        ("B", "iteration"),
        ("B", "inner"),
        ("E", "inner"),
        ("E", "iteration"),
    ]
    assert shown[-1]["args"] == {"step": 3}
    assert "wrote 5 events" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="usage"):
        trace.main([])


def test_a_step_is_drawn_with_a_row_for_each_name(tmp_path: Path) -> None:
    window = trace.IterationWindow()
    start = window.start = 100.0
    window.spans = [
        trace.SpanRecord("b<1>", start + 1, start + 3),
        trace.SpanRecord("a", start, start + 4),
        trace.SpanRecord("b<1>", start + 2, start + 4),
    ]
    window.end = start + 4
    trace.save_gantt_chart_html(window, 7, tmp_path / "folder" / "chart.html")
    page = (tmp_path / "folder" / "chart.html").read_text()
    assert "step 7: 4.000 s" in page and "<1>" not in page
    assert re.findall(r"<text [^>]*>([^<]*)<", page) == ["a", "b&lt;1&gt;"]
    bars = re.findall(r'<rect x="([\d.]+)" y="(\d+)" width="([\d.]+)"', page)
    width = trace._WIDTH
    assert [(float(x) - trace._LABELS, y, float(w)) for x, y, w in bars] == [
        (0, "2", width),
        (width / 4, "20", width / 2),
        (width / 2, "20", width / 2),
    ]


def test_spans_that_were_timed_elsewhere(tmp_path: Path) -> None:
    with trace.trace_iteration(3) as window:
        window.record_span("sample", 10.0, 12.5)
        window.merge_spans([trace.SpanRecord("sample", 20.0, 20.5), trace.SpanRecord("train", 1.0, 2.0)])
    found = {"time/sample:total": 3.0, "time/sample:count": 2, "time/sample:mean": 1.5, "time/sample:max": 2.5}
    assert window.aggregate() == {**found, "time/train": 1.0}
    assert window.get_timing_metrics().keys() == {*found, "time/train", "time/total"}
    store = TrainingRunStore(LocalStorage(tmp_path))
    window.save_timing(3, store=None)
    window.save_timing(3, store=store)
    (row,) = store.read_timing()
    assert row["step"] == 3 and [span["duration"] for span in row["spans"]] == [2.5, 0.5, 1.0]


def test_an_event_of_ones_own(tmp_path: Path) -> None:
    collector = trace.TraceCollector(output_file=tmp_path / "d" / "events.jsonl")
    start = collector.get_timestamp()
    collector.add_event(trace.TraceEvent("mine", trace.EventType.BEGIN, 1, 2, start, {"a": 1}))
    collector.shutdown()
    collector.add_event(trace.TraceEvent("late", trace.EventType.END, 1, 2, start))
    (event,) = read_jsonl(tmp_path / "d" / "events.jsonl")
    assert event == {"name": "mine", "ph": "B", "pid": 1, "tid": 2, "ts": start, "args": {"a": 1}}
