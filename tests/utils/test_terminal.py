"""The line at the bottom of a terminal, and plain lines where there is none."""

import io

import pytest
from rich.console import Console

from tinker_cookbook.utils import run_logs
from tinker_cookbook.utils.terminal import StepDisplay, reach


def terminal() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=80, force_terminal=True, color_system=None), out


def test_without_a_terminal_there_are_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    with StepDisplay(console=Console(file=out, force_terminal=False)) as display:
        display.begin_step(0, 2)
        with display.phase("sampling"):
            display.expect(2)
            for stage in ("[debate] Round 1", "[debate] Round 1", "[debate] Round 2"):
                reach(stage)
            display.advance(tokens=5)
        display.say_stages("replies")
        display.say("Training data: 3 datums")
    assert out.getvalue() == ""
    said = capsys.readouterr().err.splitlines()
    assert said == ["[debate] Round 1: 2 replies, [debate] Round 2: 1", "Training data: 3 datums"]


def test_a_terminal_shows_step_groups_failures_and_rate() -> None:
    console, out = terminal()
    with StepDisplay(console=console) as display:
        display.begin_step(3, 10)
        with display.phase("sampling"):
            display.expect(4)
            display.advance(tokens=100)
            display.advance(failed=True)
            reach("[debate] Round 2")
            assert display._progress is not None
            display._progress.refresh()
            shown = out.getvalue()
            assert "step 3/10" in shown and "sampling" in shown and "2/4 groups, 1 failed" in shown
            assert "[debate] Round 2" in shown and "tokens/s" in shown
    assert display._progress is None


def test_one_run_of_a_process_has_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    console, out = terminal()
    with StepDisplay(console=console) as first, StepDisplay(console=terminal()[0]) as second:
        first.begin_step(0, 1)
        second.begin_step(0, 1)
        assert first._progress is not None and second._progress is None
        second.say("plain")  # above the line of the first, which has taken stderr
        assert "plain" in out.getvalue()
    with run_logs.label("a run of a sweep"), StepDisplay(console=terminal()[0]) as labelled:
        labelled.begin_step(0, 1)
        assert labelled._progress is None
        labelled.say("plain too")
    assert capsys.readouterr().err.splitlines() == ["[a run of a sweep] plain too"]


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    console, out = terminal()
    with StepDisplay(quiet=True, console=console) as display:
        display.begin_step(0, 1)
        display.say("nothing")
    assert out.getvalue() == "" and capsys.readouterr().err == ""


def test_outside_of_a_run_nothing_happens() -> None:
    reach("[debate] Round 1")


def test_a_long_step_says_where_it_is() -> None:
    seconds = [0.0]
    with StepDisplay(clock=lambda: seconds[0], console=Console(file=io.StringIO())) as display:
        display.begin_step(3, 10)
        seconds[0] = 5.0
        with display.phase("sampling"):
            display.expect(8)
            seconds[0] = 35.0
            assert display.where() == "step 3/10: 0:00:35 so far, sampling, 0/8 groups"
            display.advance(tokens=900)
            display.advance(failed=True)
            seconds[0] = 65.0
            told = "step 3/10: 0:01:05 so far, sampling, 2/8 groups, 1 failed, 15 tokens/s, about 0:03:00 to go"
            assert display.where() == told
        assert display.where() == "step 3/10: 0:01:05 so far, 2/8 groups, 1 failed"


def test_a_notebook_has_plain_lines() -> None:
    console = Console(file=io.StringIO(), force_jupyter=True)
    with StepDisplay(console=console) as display:
        display.begin_step(0, 1)
        assert display._progress is None
