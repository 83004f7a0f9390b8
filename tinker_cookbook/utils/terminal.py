"""The terminal during a run: a live line at the bottom, or plain lines without a terminal.

Only one `StepDisplay` per process may be live; a parallel run, or one with a label, prints plain lines. Code far from
the loop reports a stage of a step with `reach`, which counts. A long step reports its progress every REPORT_SECONDS:
in `logs.log`, and on stderr if there is no live line.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich import get_console
from rich.console import Console

from tinker_cookbook.utils.run_logs import FILE_ONLY, label_prefix

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

logger = logging.getLogger(__name__)

REPORT_SECONDS = 30.0
"""Seconds between two lines about the same step."""

_current: ContextVar[StepDisplay | None] = ContextVar("step_display", default=None)
_alive: list[StepDisplay] = []


def reach(stage: str, count: int = 1) -> None:
    """Report that some item of the current step has reached a stage, e.g. "[debate] Round 2". Does nothing outside of
    a run.
    """
    display = _current.get()
    if display is not None:
        display.reach(stage, count)


class StepDisplay:
    """The progress of a run: step, phase, groups done and failed, tokens per second, estimated end.

    Args:
        quiet: show nothing.
        console: where to print; None: the process's console.
        clock: seconds.
    """

    def __init__(
        self, quiet: bool = False, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console if console is not None else get_console()
        self._quiet = quiet
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._stages: Counter[str] = Counter()
        self._phase, self._total, self._done, self._failed, self._tokens = "", 0, 0, 0, 0
        self._clock = clock
        self._begun = self._step_begun = clock()
        self._said = self._place = ""
        self._step = ""
        self._first: tuple[int, float] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        self._token = _current.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _current.reset(self._token)
        if self._timer is not None:
            self._timer.cancel()
        if self._progress is not None:
            self._progress.stop()
            _alive.remove(self)
            self._progress = None

    def begin_step(self, step: int, end: int) -> None:
        """A step begins; the run ends before step `end`."""
        self._stages.clear()
        if (
            self._progress is None
            and not self._quiet
            and self._console.is_terminal
            and not self._console.is_jupyter  # where redrawing a line would print another line
            and not _alive
            and not label_prefix()
        ):
            from rich.progress import BarColumn, Progress, TextColumn  # slow to import
            from rich.table import Column

            text = TextColumn("{task.fields[said]}", markup=False, table_column=Column(no_wrap=True, overflow="crop"))
            self._progress = Progress(BarColumn(bar_width=10), text, console=self._console, transient=True)
            self._task = self._progress.add_task("", total=end, completed=step, said="")
            self._progress.start()
            _alive.append(self)
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=step)
        self._step_begun = self._clock()
        self._first = self._first or (step, self._step_begun)
        first, begun = self._first
        left = (self._step_begun - begun) / (step - first) * (end - step) if step > first else None
        self._step = f"step {step}/{end}"
        self._place = self._step + (f", {_duration(left)} left" if left is not None else "")
        self._show()
        self._report_later()

    def _report_later(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        try:
            self._timer = asyncio.get_running_loop().call_later(REPORT_SECONDS, self._report)
        except RuntimeError:
            self._timer = None  # no event loop: nothing else happens during the step

    def _report(self) -> None:
        self._write(self.where())
        self._report_later()

    def where(self) -> str:
        """The progress of the current step: time, phase, groups done, and an estimate of when all will be."""
        parts = [f"{_duration(self._clock() - self._step_begun)} so far", self._phase, self._groups()]
        seconds = self._clock() - self._begun
        if self._phase and self._tokens and seconds > 0:
            parts.append(f"{self._tokens / seconds:,.0f} tokens/s")
        if self._phase and 0 < self._done < self._total:
            parts.append(f"about {_duration(seconds / self._done * (self._total - self._done))} to go")
        return f"{self._step}: " + ", ".join(part for part in parts if part)

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """The phase of the step in the body."""
        self._phase, self._total, self._done, self._failed, self._tokens = name, 0, 0, 0, 0
        self._begun = self._clock()
        self._show()
        try:
            yield
        finally:
            self._phase = self._said = ""
            self._show()

    def expect(self, groups: int) -> None:
        """Set how many groups the phase waits for."""
        self._total = groups
        self._show()

    def expect_more(self) -> None:
        """Another group replaces one that is done."""
        self.expect(self._total + 1)

    def advance(self, tokens: int = 0, failed: bool = False) -> None:
        """Another group of the phase is done, with this many sampled tokens, or was given up."""
        self._done += 1
        self._failed += failed
        self._tokens += tokens
        self._show()

    def reach(self, stage: str, count: int = 1) -> None:
        """As the function `reach`."""
        self._stages[stage] += count
        self._show()

    def say(self, text: str) -> None:
        """A message about the step: in the live line until the phase ends, or else a line on stderr. Also in
        `logs.log`.
        """
        self._write(text)
        if self._progress is not None:
            self._said = text
            self._show()

    def _write(self, text: str) -> None:
        """Write to the file, and to stderr unless there is a live line."""
        logger.info("%s", text, extra=FILE_ONLY)
        if self._progress is None and not self._quiet:
            print(f"{label_prefix()}{text}", file=sys.stderr)

    def say_stages(self, unit: str) -> None:
        """The stages that the step has reached, in order of first occurrence, on one line; empty if there are none."""
        if self._stages:
            parts = [f"{stage}: {count}" for stage, count in self._stages.items()]
            self.say(f"{parts[0]} {unit}" + "".join(f", {one}" for one in parts[1:]))
        self._stages.clear()

    def _show(self) -> None:
        if self._progress is None or self._task is None:
            return
        parts = [self._place, self._said or self._phase, self._groups()]
        if self._stages:
            parts.append(next(reversed(self._stages)))
        seconds = self._clock() - self._begun
        if self._tokens and seconds > 0:
            parts.append(f"{self._tokens / seconds:,.0f} tokens/s")
        self._progress.update(self._task, said="  ".join(part for part in parts if part))

    def _groups(self) -> str:
        if not self._total:
            return ""
        return f"{self._done}/{self._total} groups" + (f", {self._failed} failed" if self._failed else "")


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
