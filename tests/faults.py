"""Faults that strike a run: what happens, where, at which call, and what the run must say.

A fault strikes at the n-th call of one function in the run's process, as a kill point does (tests/killing.py). Most end the
process; the next start resumes the run, and must come to what an undisturbed run comes to.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import inspect
import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from tests.killing import (
    CHECKPOINT_LINE,
    FORWARD_BACKWARD,
    METRICS_ROW,
    OPTIM_STEP,
    SAVED_FILE,
    SUBMIT_OPTIM_STEP,
    resolve,
    write_half,
)
from tests.rl.arena import hang, limit_of_who_hangs
from tests.waiting import until
from tinker_cookbook.rl import rollout_strategy

SAVED_TENSORS = "tinker_local_backend.storage.checkpoints:save_file"
RECORD = "tinker_cookbook.stores.training_store:TrainingRunStore.write_record"
ENV_STEP = "tinker_cookbook.debate.env:DebateEnv.step"
TASK_SCORE = "tinker_cookbook.env.qa:QATask.score"
JUDGE = "tinker_cookbook.debate.judges:MockJudge.__call__"

LINES = (METRICS_ROW, CHECKPOINT_LINE)
FILES = (*LINES, SAVED_FILE, SAVED_TENSORS, RECORD)
ANYWHERE = (*FILES, FORWARD_BACKWARD, OPTIM_STEP, SUBMIT_OPTIM_STEP, ENV_STEP, JUDGE)

Function = Callable[..., Any]
Strike = Callable[[Function, tuple, dict[str, Any]], Any]
"""(the function, its arguments) -> what the caller gets instead."""


@dataclass(frozen=True)
class Kind:
    """`exitcodes` are those with which the struck process may end; `says` must be in what it prints."""

    strike: Strike
    targets: tuple[str, ...]
    exitcodes: tuple[int, ...]
    says: str = ""
    is_tolerated: bool = False
    """the run goes on without what failed and counts it, so that its result is another"""


def _kill(function: Function, arguments: tuple, options: dict[str, Any]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_after(function: Function, arguments: tuple, options: dict[str, Any]) -> Any:
    result = function(*arguments, **options)
    if not inspect.iscoroutine(result):
        os.kill(os.getpid(), signal.SIGKILL)

    async def awaited() -> None:
        await result
        os.kill(os.getpid(), signal.SIGKILL)

    return awaited()


def _tear(function: Function, arguments: tuple, options: dict[str, Any]) -> None:
    write_half(function, arguments, options)
    os.kill(os.getpid(), signal.SIGKILL)


def _terminate(function: Function, arguments: tuple, options: dict[str, Any]) -> Any:
    os.kill(os.getpid(), signal.SIGTERM)
    return function(*arguments, **options)


def _no_space(function: Function, arguments: tuple, options: dict[str, Any]) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _short_write(function: Function, arguments: tuple, options: dict[str, Any]) -> None:
    write_half(function, arguments, options)
    _no_space(function, arguments, options)


def _raise(function: Function, arguments: tuple, options: dict[str, Any]) -> None:
    raise RuntimeError("the sandbox is gone")


def _hang(function: Function, arguments: tuple, options: dict[str, Any]) -> Any:
    return hang()


def _nan(function: Function, arguments: tuple, options: dict[str, Any]) -> Any:
    return dataclasses.replace(function(*arguments, **options), reward=float("nan"))


def _time_out(function: Function, arguments: tuple, options: dict[str, Any]) -> None:
    raise TimeoutError("the judge did not answer")


KINDS = {
    "SIGKILL": Kind(_kill, ANYWHERE, (-signal.SIGKILL,)),
    "SIGKILL afterwards": Kind(_kill_after, ANYWHERE, (-signal.SIGKILL,)),
    "SIGKILL within a line": Kind(_tear, LINES, (-signal.SIGKILL,)),
    "SIGTERM": Kind(_terminate, ANYWHERE, (143,), "behavior_if_log_dir_exists=resume"),
    "full disk": Kind(_no_space, FILES, (1, 2), "No space left on device"),
    "short write": Kind(_short_write, LINES, (1, 2), "No space left on device"),
    "environment raises": Kind(_raise, (ENV_STEP,), (1,), "the sandbox is gone"),
    "environment hangs": Kind(_hang, (ENV_STEP,), (0,), is_tolerated=True),
    "environment returns NaN": Kind(_nan, (TASK_SCORE,), (1, 2), "nan"),
    "judge times out": Kind(_time_out, (JUDGE,), (1,), "the judge did not answer"),
}


@dataclass(frozen=True)
class Fault:
    """Strikes at the `call`-th call (from 1) of the function that `target` names. Picklable."""

    kind: str
    target: str
    call: int

    def __str__(self) -> str:
        return f"{self.kind} at call {self.call} of {self.target.rpartition(':')[2]}"

    def install(self) -> None:
        """In the run's process, before it starts."""
        _wrap(self.target, self._strike)
        if KINDS[self.kind].is_tolerated:
            rollout_strategy.time_limit = limit_of_who_hangs

    def _strike(self, calls: int, function: Function, arguments: tuple, options: dict[str, Any]) -> Any:
        if calls != self.call:
            return function(*arguments, **options)
        return KINDS[self.kind].strike(function, arguments, options)


def count_calls(file: Path) -> None:
    """In the run's process, before it starts: how often each target is called is written to `file` at its end."""
    counts: dict[str, int] = dict.fromkeys((*ANYWHERE, TASK_SCORE), 0)

    def counted(target: str, calls: int, function: Function, arguments: tuple, options: dict[str, Any]) -> Any:
        counts[target] = calls
        return function(*arguments, **options)

    for target in counts:
        _wrap(target, functools.partial(counted, target))
    Finalize(None, lambda: file.write_text(json.dumps(counts)), exitpriority=0)  # atexit is not for such children


@dataclass(frozen=True)
class Pause:
    """Waits at the `call`-th call of `target` until the file `go` exists, after it has made the file `here`."""

    target: str
    call: int
    here: Path
    go: Path

    def install(self) -> None:
        _wrap(self.target, self._wait)

    def _wait(self, calls: int, function: Function, arguments: tuple, options: dict[str, Any]) -> Any:
        if calls == self.call:
            self.here.touch()
            until(self.go.exists)
        return function(*arguments, **options)


def _wrap(target: str, around: Callable[[int, Function, tuple, dict[str, Any]], Any]) -> None:
    """Let every call of the target go through `around(which call it is, function, arguments, options)`."""
    owner, name = resolve(target)
    original = getattr(owner, name)
    calls = 0

    @functools.wraps(original)
    def wrapper(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return around(calls, original, arguments, options)

    setattr(owner, name, wrapper)
