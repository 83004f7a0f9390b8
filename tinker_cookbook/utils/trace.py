"""Where time goes: spans of functions and blocks, as metrics of a step and as a file that trace viewers open.

    trace_init(output_file="trace_events.jsonl")

    @scope
    async def sample(prompt):
        update_scope_context({"tokens": len(prompt)})
        async with scope_span("waiting"):
            ...

Each line of the file is an event of the Chrome trace format. Each asyncio task is a separate row, so that concurrent
spans do not hide each other. Perfetto and chrome://tracing open the result of this conversion:

    python -m tinker_cookbook.utils.trace trace_events.jsonl trace.json

Without `trace_init`, and outside of `trace_iteration`, a scope costs a comparison and a call.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import sys
import threading
import time
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, TextIO
from weakref import WeakKeyDictionary

from tinker_cookbook.utils.files import append_jsonl, iterate_jsonl, to_jsonable, write_text
from tinker_cookbook.utils.secrets import redactor
from tinker_cookbook.utils.wrapping import F, in_context

EVENTS_BASE_NAME = "trace_events.jsonl"


@dataclass
class ScopeContext:
    """Attributes of the innermost open span."""

    attributes: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class SpanRecord:
    """A finished span. Seconds of a monotonic clock with an arbitrary origin."""

    name: str
    start: float
    end: float


class IterationWindow:
    """The spans of one step of a loop, in the order in which they ended."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.end: float | None = None
        self.spans: list[SpanRecord] = []

    def record_span(self, name: str, start_time: float, end_time: float) -> None:
        """Add a span that was timed elsewhere, by `time.perf_counter()` of this process."""
        self.spans.append(SpanRecord(name, start_time, end_time))

    def merge_spans(self, spans: Sequence[SpanRecord]) -> None:
        """Add spans of another window."""
        self.spans.extend(spans)

    def get_timing_metrics(self) -> dict[str, float]:
        """The metrics of `aggregate`, and `time/total`: duration of the step in seconds."""
        return {**self.aggregate(), "time/total": (self.end or time.perf_counter()) - self.start}

    def aggregate(self) -> dict[str, float]:
        """Seconds: `time/NAME` for a span that occurred once, `time/NAME:{total,count,mean,max}` for others."""
        metrics: dict[str, float] = {}
        for span in self.get_span_dicts():
            add_span(f"time/{span['name']}", span["duration"], metrics)
        return metrics

    def get_span_dicts(self) -> list[dict[str, Any]]:
        """Name without secrets, duration, and start and end relative to the start of the step, in seconds."""
        without_secrets = redactor()
        return [
            {
                "name": without_secrets(span.name),
                "duration": span.end - span.start,
                "wall_start": span.start - self.start,
                "wall_end": span.end - self.start,
            }
            for span in self.spans
        ]

    def save_timing(self, step: int, *, store: Any) -> None:
        """Append the step and its spans to a store (`stores.TrainingRunStore`); None: they are dropped."""
        if store is not None:
            store.write_timing_spans(step, self.get_span_dicts())

    def write_spans_jsonl(self, path: str | Path, step: int) -> None:
        """Append a line with the step and its spans."""
        append_jsonl(Path(path), {"step": step, "spans": self.get_span_dicts()})


def add_span(key: str, seconds: float, metrics: dict[str, Any]) -> None:
    """Add a duration to metrics: the first under `key`; from the second on as `key:total`, `:count`, `:mean`, `:max`."""
    if key not in metrics and f"{key}:count" not in metrics:
        metrics[key] = seconds
        return
    first = metrics.pop(key, 0.0)
    count = metrics.get(f"{key}:count", 1) + 1
    total = metrics.get(f"{key}:total", first) + seconds
    longest = max(metrics.get(f"{key}:max", first), seconds)
    metrics |= {f"{key}:total": total, f"{key}:count": count, f"{key}:mean": total / count, f"{key}:max": longest}


class EventType(StrEnum):
    """Type of an event: start of a span, end of a span, or name of a row."""

    BEGIN = "B"
    END = "E"
    METADATA = "M"


@dataclass
class TraceEvent:
    """A line of the file, in Chrome's trace format. `ts` is in microseconds."""

    name: str
    ph: EventType
    pid: int
    tid: int
    ts: float
    args: dict[str, Any] = field(default_factory=dict[str, Any])
    cat: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; without a category if there is none."""
        values = {key: getattr(self, key) for key in ("name", "ph", "pid", "tid", "ts", "args", "cat")}
        return {key: value for key, value in values.items() if value is not None} | {"ph": self.ph.value}


class TraceCollector:
    """Writes events as they arrive, and flushes to disk at least every `flush_interval_sec` while they do."""

    def __init__(self, flush_interval_sec: float = 1.0, output_file: str | Path = EVENTS_BASE_NAME) -> None:
        path = Path(output_file).expanduser()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = path.open("a", encoding="utf-8")
        self._interval, self._flushed = flush_interval_sec, time.monotonic()
        self._lock = threading.Lock()
        self._without_secrets = redactor()
        self._threads: dict[int, int] = {}
        self._tasks: WeakKeyDictionary[asyncio.Task[Any], int] = WeakKeyDictionary()
        self._rows = 0

    def event(self, phase: EventType, name: str, timestamp: float, args: Mapping[str, Any]) -> None:
        """Record the start or end of a span in the calling task or thread. `timestamp`: seconds of
        `time.perf_counter()`.
        """
        with self._lock:
            if self._file.closed:
                return
            process, row, task = self._place()
            category = "async" if task else "sync"
            self._write(TraceEvent(name, phase, process, row, timestamp * 1e6, to_jsonable(dict(args)), category))

    def add_event(self, event: TraceEvent) -> None:
        """Add a custom event, unchanged."""
        with self._lock:
            if not self._file.closed:
                self._write(event)

    def get_timestamp(self) -> float:
        """The current time, in the microseconds of `TraceEvent.ts`."""
        return time.perf_counter() * 1e6

    def shutdown(self) -> None:
        """Flush, and write nothing more."""
        with self._lock:
            self._file.close()

    def _place(self) -> tuple[int, int, bool]:
        """Numbers of the thread and, within it, of the task; both are named on first use."""
        thread = threading.current_thread()
        if thread.ident not in self._threads:
            self._threads[thread.ident or 0] = len(self._threads)
            self._name("process_name", self._threads[thread.ident or 0], 0, thread.name)
        process = self._threads[thread.ident or 0]
        task = _current_task()
        if task is None:
            return process, 0, False
        if task not in self._tasks:
            self._rows += 1
            self._tasks[task] = self._rows
            self._name("thread_name", process, self._rows, task.get_name())
        return process, self._tasks[task], True

    def _name(self, kind: str, process: int, row: int, name: str) -> None:
        self._write(TraceEvent(kind, EventType.METADATA, process, row, 0, {"name": name}))

    def _write(self, event: TraceEvent) -> None:
        self._file.write(json.dumps(self._without_secrets(event.to_dict())) + "\n")
        if time.monotonic() - self._flushed >= self._interval:
            self._file.flush()
            self._flushed = time.monotonic()


_events: TraceCollector | None = None
_window: ContextVar[IterationWindow | None] = ContextVar("trace_window", default=None)
trace_context: ContextVar[ScopeContext | None] = ContextVar("trace_scope", default=None)
"""Context of the innermost open span."""


def trace_init(flush_interval_sec: float = 1.0, output_file: str | Path = EVENTS_BASE_NAME) -> None:
    """Append the spans of this process to `output_file` from now on, until `trace_shutdown` or exit."""
    global _events
    trace_shutdown()
    _events = TraceCollector(flush_interval_sec, output_file)
    atexit.register(trace_shutdown)


def trace_shutdown() -> None:
    """Flush and stop tracing. Does nothing without a trace."""
    global _events
    events, _events = _events, None
    if events is not None:
        atexit.unregister(trace_shutdown)
        events.shutdown()


def get_scope_context() -> ScopeContext:
    """The context of the innermost open span; outside of any span a dummy."""
    return trace_context.get() or ScopeContext()


def update_scope_context(values: Mapping[str, Any]) -> None:
    """Add attributes to the innermost open span; its end event has them as `args`."""
    get_scope_context().attributes.update(values)


def scope(func: F) -> F:
    """Record a span for each call of a function or coroutine function, under the function's name."""
    return in_context(func, partial(scope_span_sync, func.__name__))


@asynccontextmanager
async def scope_span(name: str) -> AsyncGenerator[None]:
    """A span for a block: `async with scope_span("waiting"):`."""
    with scope_span_sync(name):
        yield


@contextmanager
def scope_span_sync(name: str) -> Generator[None]:
    """A span for a block: `with scope_span_sync("parsing"):`."""
    events, window = _events, _window.get()
    if events is None and window is None:
        yield
        return
    context = ScopeContext()
    token = trace_context.set(context)
    start = time.perf_counter()
    if events is not None:
        events.event(EventType.BEGIN, name, start, {})
    try:
        yield
    finally:
        end = time.perf_counter()
        trace_context.reset(token)
        if events is not None:
            events.event(EventType.END, name, end, context.attributes)
        if window is not None:
            window.spans.append(SpanRecord(name, start, end))


@contextmanager
def trace_iteration(step: int) -> Generator[IterationWindow]:
    """Collect the spans of one step: those that end within the block, in it or in tasks and threads that it starts."""
    window = IterationWindow()
    with scope_span_sync("iteration"):
        update_scope_context({"step": step})
        token = _window.set(window)
        try:
            yield window
        finally:
            _window.reset(token)
            window.end = time.perf_counter()


def current_window() -> IterationWindow | None:
    """The window that collects the spans of the current step; None outside of `trace_iteration`."""
    return _window.get()


_BAR, _LABELS, _WIDTH = 18, 220, 900
"""pixels: row height, width of the labels, width of the chart"""


def save_gantt_chart_html(window: IterationWindow, step: int, path: str | Path) -> None:
    """Write the page of `gantt_chart_html`."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_text(path, gantt_chart_html(window, step))


def gantt_chart_html(window: IterationWindow, step: int) -> str:
    """The spans of a step drawn over time, one row per name, as a self-contained page. Overlapping spans of one name
    darken each other; hovering over one shows its times.
    """
    total = (window.end or time.perf_counter()) - window.start
    spans = sorted(window.get_span_dicts(), key=lambda span: (span["wall_start"], -span["duration"]))
    rows = {name: i for i, name in enumerate(dict.fromkeys(span["name"] for span in spans))}
    scale = _WIDTH / total if total else 0.0
    drawn = [
        f'<text x="{_LABELS - 8}" y="{_BAR * i + 13}" text-anchor="end">{escape(name)}</text>'
        for name, i in rows.items()
    ]
    for span in spans:
        label = f"{span['name']}: {span['duration']:.3f} s, from {span['wall_start']:.3f} to {span['wall_end']:.3f}"
        place = f'x="{_LABELS + scale * span["wall_start"]:.1f}" y="{_BAR * rows[span["name"]] + 2}"'
        size = f'width="{max(1.0, scale * span["duration"]):.1f}" height="{_BAR - 4}"'
        drawn.append(f"<rect {place} {size}><title>{escape(label)}</title></rect>")
    svg = f'<svg width="{_LABELS + _WIDTH}" height="{_BAR * len(rows)}">{"".join(drawn)}</svg>'
    style = "body{font:12px sans-serif}rect{fill:#36c;fill-opacity:.5}"
    title = f"step {step}: {total:.3f} s"
    return f"<!doctype html><meta charset=utf-8><title>{title}</title><style>{style}</style><h3>{title}</h3>{svg}\n"


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return None


def convert(events_file: str | Path, output_file: str | Path) -> int:
    """Convert the events of a JSONL file to the JSON array that trace viewers open; return the number of events."""
    events = [line.row for line in iterate_jsonl(events_file, tolerate_torn_tail=True)]
    write_text(output_file, json.dumps(events))
    return len(events)


def main(argv: Sequence[str]) -> None:
    """The command line: two paths."""
    if len(argv) != 2:
        raise SystemExit("usage: python -m tinker_cookbook.utils.trace trace_events.jsonl trace.json")
    print(f"wrote {convert(*argv)} events to {argv[1]}; open it at https://ui.perfetto.dev")


def convert_jsonl_to_json_main() -> None:
    """`main` with the arguments of the process, for an entry point."""
    main(sys.argv[1:])


if __name__ == "__main__":
    from tinker_cookbook.backends import check_command

    check_command()
    convert_jsonl_to_json_main()
