"""The failing rollouts of a run: which are the worst, why, and that the page and the terminal list them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from recipes import report
from tests.report.made import said, write_run
from tests.rl.handmade import trajectory, turn
from tinker_cookbook.cli_utils import parse
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.report.failures import ONLY_REWARD, flagged, latency, sentence, why, worst
from tinker_cookbook.report.rollouts import index_run, words_of
from tinker_cookbook.report.runs import open_runs
from tinker_cookbook.rl.rollout_files import StepRollouts, write_rollouts
from tinker_cookbook.rl.rollouts import FailedGroup
from tinker_cookbook.rl.types import RolloutError, TrajectoryGroup
from tinker_cookbook.runs.vocabulary import write_vocabulary
from tinker_cookbook.stores.training_store import TrainingRunStore
from tinker_cookbook.tokenizer_utils import get_tokenizer


def turn_row(
    metrics: Mapping[str, float] = {}, info: Any = None, stop: str = "stop", ended: str = "completed"
) -> dict[str, Any]:
    return {
        "metrics": json.dumps(metrics), "info": json.dumps(info or {}), "stop_reason": stop, "rollout_stop_reason": ended,
    }  # fmt: skip


class TestWhy:
    @pytest.mark.parametrize(
        ("row", "reason", "timeouts"),
        [
            (turn_row(), ONLY_REWARD, 0),
            (turn_row({"correct": 1.0, "timeout": 0.0}), ONLY_REWARD, 0),
            (turn_row({"timeout": 1.0}), "timeout", 1),
            (turn_row({"compile_error": 1.0}, ended="max_turns"), "ended by max_turns; does not compile", 0),
            (turn_row(ended="rollout_timeout"), "ended by rollout_timeout", 1),
            (turn_row(stop="length"), "a reply was cut off", 0),
            (turn_row({"max_tokens_reached": 1.0}, stop="length"), "a reply was cut off", 0),
        ],
    )
    def test_of_one_turn(self, row: dict[str, Any], reason: str, timeouts: int) -> None:
        assert why([row]) == (reason, timeouts, "")

    def test_of_several_turns_each_reason_once(self) -> None:
        turns = [turn_row({"tool_exceptions": 2.0, "timeout": 1.0}), turn_row({"tool_exceptions": 1.0, "timeout": 1.0})]
        assert why(turns) == ("timeout; a tool failed", 2, "")

    def test_a_monitor_comes_first(self) -> None:
        row = turn_row({"timeout": 1.0}, {"monitor": {"special_cases": "line 2: it knows 49"}})
        assert why([row]) == ("special_cases: line 2: it knows 49; timeout", 1, "special_cases")


def reply(text: str, length: bool = False) -> TokensWithLogprobs:
    made = said(text)
    return TokensWithLogprobs(made.tokens, made.maybe_logprobs, "length" if length else "stop")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two steps of two rollouts, a hack among them, and a group that was given up."""
    folder = write_run(tmp_path / "run", {}, [{"step": 0, "a": 1.0}])
    store = TrainingRunStore.in_folder(folder)
    write_vocabulary(store, get_tokenizer("tiny_chat"))
    for step, rewards in ((0, [0.5, -1.0]), (1, [-1.0, 2.0])):
        members = [
            trajectory(turn([5], reply("good")), turn([5, 6], reply("bad [/red]", length=step == 1))) for _ in rewards
        ]
        for member, seconds in zip(members, (0.5, 3.0), strict=True):
            member.transitions[0].env_seconds, member.transitions[1].env_seconds = seconds, 0.25
        group = TrajectoryGroup(members, rewards, [{} for _ in rewards])
        if step == 1:
            group.member_info_G = [{}, {"monitor": {"special_cases": "it knows <b>49</b>"}}]
        given_up = FailedGroup([RolloutError("SandboxError", "no [/i] answer\x1b[2J <i>at all</i>")])
        step_of = StepRollouts(
            [group, *([given_up] if step else [])], [0] * (1 + step), [[0.0, 0.0]], run={"step": step}
        )
        write_rollouts(store, step, step_of)
    return folder


def test_the_worst_come_first_and_of_equal_ones_the_newest(folder: Path) -> None:
    (run,) = open_runs([str(folder)])
    index = index_run(run, words_of(run))
    places = [(index["step"][i], index["member"][i]) for i in worst(index)]
    assert places == [(1, 0), (0, 1), (0, 0), (1, 1)] and worst(index, 1) == [2]
    assert [index["why"][i] for i in worst(index, 2)] == ["a reply was cut off", ONLY_REWARD]
    assert [(index["step"][i], index["member"][i]) for i in flagged(index)] == [(1, 1)]
    assert index["failed"] == [
        {"step": 1, "group": 1, "tags": [], "errors": [["SandboxError", "no [/i] answer\x1b[2J <i>at all</i>"]]}
    ]


def test_latency_is_that_of_the_slowest_answer_of_each_rollout(folder: Path) -> None:
    (run,) = open_runs([str(folder)])
    index = index_run(run, words_of(run))
    assert index["env_s"] == [0.75, 3.25, 0.75, 3.25]
    times = latency(index)
    assert times is not None and (times.median, times.longest) == (1.75, 3.0)
    assert sentence(index).startswith(
        "4 rollouts, 1 groups given up, 0 timeouts, 1 flagged by monitors; environments took 1.75 s"
    )
    assert latency({"slowest_s": [None, None]}) is None


def test_the_terminal_lists_them(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    report.main(parse(report.CLIConfig, [f"log_path={folder}", "failures=2"]))
    told = capsys.readouterr().out
    assert "1-0-0" in told and "0-1-1" not in told and "0-0-1" in told
    assert "special_cases: it knows <b>49</b>" in told and "SandboxError: no [/i] answer\ufffd[2J <i>at all</i>" in told
    assert "bad [/red]" in told and "\x1b" not in told
    report.main(parse(report.CLIConfig, [f"log_path={folder}", "failures=0"]))
    assert "worst" not in capsys.readouterr().out
