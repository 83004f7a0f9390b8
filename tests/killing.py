"""Runs killed with SIGKILL at a chosen instant and resumed, for tests that they become what they would have been.

A run is a recipe with its arguments, or any picklable function of the run's folder. It happens in a process of its own,
forked from a server that has the libraries loaded, so that a run costs seconds only for what it computes.

    RECIPE = Recipe("recipes.sl_basic", ("max_steps=6", "save_every=2", "eval_every=3"))

    def test_killed(tmp_path):
        whole = run_whole(RECIPE, tmp_path / "whole")
        killed = run_killed(RECIPE, tmp_path / "killed", [KillPoint(OPTIM_STEP, call=4)])
        assert_same(killed, whole)

`run_killed` starts the run once per kill point, each time as the command that resumes it, sees it die of SIGKILL (a kill
point that is never reached fails the test), and then lets it come to its end. `assert_same` compares all that a run
leaves: metrics.jsonl without what a clock measured, the final adapter and optimizer state bit for bit, the count of
optimizer steps in that state, and the cursor of the final checkpoint.

A kill point counts calls of one function from the start of its process. `before` dies when the call comes, `after` when it
has returned (a coroutine: when it has been awaited), `torn` is for functions that append a line: half of it is written.
The function is named `module:attribute` or `module:Class.method`, as seen from its caller: for `from x import f` in
module y it is `y:f`. For a loop of another kind, its own functions are named in the same way.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import re
import signal
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, BinaryIO, Literal

import pytest

from tests.child import preloaded
from tests.waiting import HANG_SECONDS
from tinker_cookbook.cli_utils import run_recipe

FORWARD_BACKWARD = "tinker_local_backend.engine.training.trainer:forward_backward"
OPTIM_STEP = "tinker_local_backend.engine.training.trainer:optim_step"
"""The update itself, in the engine's thread: `after` has changed the weights and told nobody."""
SUBMIT_OPTIM_STEP = "tinker_local_backend.training_client:TrainingClient.optim_step"
SAVE_STATE = "tinker_local_backend.training_client:TrainingClient.save_state"
SAVED_FILE = "tinker_local_backend.storage.checkpoints:write_json"
"""While a checkpoint is written, its tensors in a temporary folder: two calls for weights to sample from, two for state."""
METRICS_ROW = "tinker_cookbook.stores.training_store:TrainingRunStore.write_metrics"
CHECKPOINT_LINE = "tinker_cookbook.stores.training_store:TrainingRunStore.write_checkpoint"


def unless(kept: bool) -> list[pytest.MarkDecorator]:
    """Marks of a case that `make test` runs if it is `kept`, and `make test-faults` in any case."""
    return [] if kept else [pytest.mark.faults]


@dataclass(frozen=True)
class KillPoint:
    """Dies at the `call`-th call (from 1) of the function that `target` names."""

    target: str
    call: int = 1
    when: Literal["before", "after", "torn"] = "before"

    def __str__(self) -> str:
        return f"{self.when}-{self.target.rsplit('.', 1)[-1].replace(':', '.')}-{self.call}"


@dataclass(frozen=True)
class Recipe:
    """A recipe module with CLIConfig and main, and its `key=value` arguments but for log_path and resuming."""

    module: str
    arguments: tuple[str, ...] = ()

    def __call__(self, log_path: Path) -> None:
        recipe = importlib.import_module(self.module)
        keys = (f"log_path={log_path}", "behavior_if_log_dir_exists=resume")
        run_recipe(recipe.CLIConfig, recipe.main, argv=[*self.arguments, *keys])


Start = Callable[[Path], Any]
"""Starts or resumes a run in the folder it is given. Module-level functions and Recipes can be pickled."""


@dataclass(frozen=True)
class Outcome:
    """What a finished run leaves, without times and without the ids that differ between processes."""

    log_path: Path
    rows: list[dict[str, Any]]
    adapter: bytes = field(repr=False)
    """adapter_model.safetensors of the final state"""
    sampler: bytes = field(repr=False)
    """adapter_model.safetensors of the final sampler weights"""
    optimizer: bytes = field(repr=False)
    optimizer_steps: int
    final: dict[str, Any]
    """the final checkpoint's record without its paths; those of a reference without the name of the engine's run"""


def run_whole(start: Start, folder: Path) -> Outcome:
    """The run from beginning to end, in `folder`/log with `folder`/home as TINKER_LOCAL_HOME."""
    run_once(start, folder, None)
    return read_outcome(folder)


def run_killed(start: Start, folder: Path, kills: Sequence[KillPoint]) -> Outcome:
    """The run killed at each point in turn, going on from what is there each time, and then run to its end."""
    for kill in kills:
        run_once(start, folder, kill)
    return run_whole(start, folder)


def _unnamed(value: Any, but: Collection[str] = ()) -> Any:
    if isinstance(value, dict):
        return {key: _unnamed(item, but) for key, item in value.items() if key not in but}
    return re.sub(r"tinker://[^/]*/", "tinker://<run>/", value) if isinstance(value, str) else value


def assert_same(outcome: Outcome, expected: Outcome) -> None:
    """Both runs left the same. Raises AssertionError that names what differs."""
    assert [row.get("step") for row in outcome.rows] == [row.get("step") for row in expected.rows]
    for row, wanted in zip(outcome.rows, expected.rows, strict=True):
        assert row == wanted
    assert outcome.optimizer_steps == expected.optimizer_steps
    assert outcome.final == expected.final
    differing = [n for n in ("adapter", "sampler", "optimizer") if getattr(outcome, n) != getattr(expected, n)]
    assert not differing, f"not bit for bit the same: {differing}"


def read_outcome(folder: Path) -> Outcome:
    """The outcome of the finished run in `folder`."""
    log_path = folder / "log"
    record = checkpoints(folder)[-1]
    assert record.get("final"), f"the last checkpoint is not the final one: {record}"
    state, sampler = (_saved(folder, record[key]) for key in ("state_path", "sampler_path"))
    return Outcome(
        log_path=log_path,
        rows=[untimed_row(row) for row in _lines(log_path / "metrics.jsonl")],
        adapter=(state / "adapter_model.safetensors").read_bytes(),
        sampler=(sampler / "adapter_model.safetensors").read_bytes(),
        optimizer=(state / "optimizer.safetensors").read_bytes(),
        optimizer_steps=json.loads((state / "checkpoint.json").read_text())["optimizer_steps"],
        final=_unnamed({key: value for key, value in record.items() if not key.endswith("_path")}, but={"seconds"}),
    )


def forget_checkpoints(log_path: Path, after: int) -> None:
    """Leave a run's first `after` checkpoints, as if it had been killed before the next."""
    file = log_path / "checkpoints.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:after]))


def checkpoints(folder: Path) -> list[dict[str, Any]]:
    """The lines of checkpoints.jsonl."""
    return _lines(folder / "log" / "checkpoints.jsonl")


def optimizer_steps(folder: Path, record: dict[str, Any]) -> int:
    """How many optimizer steps the state of a checkpoint has seen."""
    return json.loads((_saved(folder, record["state_path"]) / "checkpoint.json").read_text())["optimizer_steps"]


def _saved(folder: Path, tinker_path: str) -> Path:
    return folder / "home" / "runs" / tinker_path.removeprefix("tinker://")


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def untimed_row(row: dict[str, Any]) -> dict[str, Any]:
    """A row of metrics.jsonl without what a clock measured."""
    return {key: value for key, value in row.items() if not key.startswith("time/") and key != "progress/seconds"}


def run_once(start: Start, folder: Path, kill: KillPoint | None) -> None:
    """One process: to its end without a kill point, else to its death there. AssertionError for anything else."""
    exitcode = run_process(start, folder, None if kill is None else functools.partial(_install, kill))
    expected = 0 if kill is None else -signal.SIGKILL
    assert exitcode == expected, f"exit code {exitcode} with kill point {kill}:\n{output(folder)[-4000:]}"


def run_process(start: Start, folder: Path, prepare: Callable[[], None] | None = None) -> int:
    """Start or resume the run in a process of its own, after `prepare` (picklable) there. Returns its exit code."""
    process = started(start, folder, prepare)
    process.join(HANG_SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
        raise AssertionError(f"still running after {HANG_SECONDS:g} seconds:\n{output(folder)[-4000:]}")
    assert process.exitcode is not None
    return process.exitcode


def started(start: Start, folder: Path, prepare: Callable[[], None] | None = None) -> BaseProcess:
    """The process of `run_process`, which goes on by itself."""
    folder.mkdir(parents=True, exist_ok=True)
    process = preloaded().Process(target=_in_child, args=(start, folder, prepare))
    process.start()
    return process


def output(folder: Path) -> str:
    """What the processes in this folder have printed so far."""
    return (folder / "output.txt").read_text()


def _in_child(start: Start, folder: Path, prepare: Callable[[], None] | None) -> None:
    printed = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(printed, stream)
    os.environ["TINKER_LOCAL_HOME"] = str(folder / "home")
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.pop("TINKER_BACKEND", None)
    if prepare is not None:
        prepare()
    start(folder / "log")


def resolve(target: str) -> tuple[Any, str]:
    """The module or class of a `module:Class.method`, and the name in it."""
    module_name, _, path = target.partition(":")
    *owners, name = path.split(".")
    return functools.reduce(getattr, owners, importlib.import_module(module_name)), name


def _install(kill: KillPoint) -> None:
    owner, name = resolve(kill.target)
    original = getattr(owner, name)
    calls = 0

    def reached() -> bool:
        nonlocal calls
        calls += 1
        return calls == kill.call

    @functools.wraps(original)
    def wrapper(*arguments: Any, **options: Any) -> Any:
        if not reached():
            return original(*arguments, **options)
        if kill.when == "before":
            _die()
        if kill.when == "torn":
            write_half(original, arguments, options)
            _die()
        result = original(*arguments, **options)
        return _die_after(result) if inspect.iscoroutine(result) else _die()

    setattr(owner, name, wrapper)


async def _die_after(coroutine: Any) -> None:
    await coroutine
    _die()


def write_half(write: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Call a function that appends a line, of which only half is written."""

    def half(file: BinaryIO, line: bytes, path: Path) -> None:
        file.write(line[: len(line) // 2])

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("tinker_cookbook.utils.files._append", half)
        write(*arguments, **options)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
