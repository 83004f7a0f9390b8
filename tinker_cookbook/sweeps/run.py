"""Run the points of a sweep: in separate processes, or together in this one on shared base weights.

Each run has a folder named after its values, with a `sweep_run.json` that records its settings and its result. A
restarted sweep runs what is missing, resumes what was interrupted, and keeps what is finished. A failed run is
recorded and does not stop the others.
"""

import asyncio
import inspect
import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from tinker_cookbook import backends, cli_utils
from tinker_cookbook.cli_utils import RESUME_HINT, print_traceback
from tinker_cookbook.exceptions import ConfigurationError, DataFormatError
from tinker_cookbook.runs.bootstrap import note_log_path
from tinker_cookbook.stores.folder import one_writer, open_folder
from tinker_cookbook.sweeps.points import PlannedRun, Point, Recipe, Value, load_recipe, plan
from tinker_cookbook.utils import run_logs
from tinker_cookbook.utils.files import flatten, read_json_object, to_jsonable, write_json
from tinker_cookbook.utils.interrupts import Ending, ends_between_steps
from tinker_cookbook.utils.narrowing import is_exception_group
from tinker_cookbook.utils.processes import describe_exit, end_with
from tinker_cookbook.utils.secrets import redact

STATUS_BASE_NAME = "sweep_run.json"
CONSOLE_BASE_NAME = "console.log"
STOP_SECONDS = 30.0
"""How long an interrupted run may take to put its files in order before it is killed."""
ERROR_LINES = 5

Status = Literal["finished", "failed", "running"]


@dataclass(frozen=True)
class RunResult:
    """The result of one run."""

    name: str
    point: dict[str, Value]
    log_path: str
    status: Status
    error: str | None = None
    seconds: float = 0.0
    earlier: bool = False
    """finished in an earlier start of the sweep"""


async def run_sweep(
    recipe: str | Recipe,
    points: Sequence[Point],
    sweep_dir: str | Path,
    *,
    fixed: Point | None = None,
    processes: int = 1,
    concurrent: int = 4,
    on_start: Callable[[], None] | None = None,
    on_result: Callable[[RunResult], None] | None = None,
) -> list[RunResult]:
    """Run the unfinished runs of a sweep.

    Args:
        recipe: the recipe, or the name of its module.
        points: the values of each run (see `grid`).
        sweep_dir: the sweep's folder, with a folder for each run.
        fixed: values that are the same in every run.
        processes: how many runs at a time, each in a separate process; 0 runs them in this process and event loop,
            where local runs share the weights of their base model.
        concurrent: with processes=0, how many runs at a time.
        on_start: called once, when everything has been checked and the first run is about to begin.
        on_result: called for each run when it ends.

    Returns:
        The results in the order of the points.

    Raises:
        ConfigurationError: as in `plan`; or the folder has a run of the same values with another config, or is in use.
            Nothing is run then.
    """
    recipe = load_recipe(recipe) if isinstance(recipe, str) else recipe
    runs = plan(recipe, points, fixed)
    _check_processes(recipe, runs, processes, concurrent)
    folder = open_folder(sweep_dir, "sweep_dir")
    with one_writer(folder, "sweep_dir"):
        note_log_path(folder)
        finished = {run.name for run in runs if _was_finished(folder, run)}
        if on_start is not None:
            on_start()
        return await _run_all(recipe, runs, finished, folder, processes, concurrent, on_result)


async def _run_all(
    recipe: Recipe,
    runs: Sequence[PlannedRun],
    finished: set[str],
    folder: Path,
    processes: int,
    concurrent: int,
    on_result: Callable[[RunResult], None] | None,
) -> list[RunResult]:
    slots = asyncio.Semaphore(processes or concurrent)

    async def run_one(run: PlannedRun, ending: Ending) -> RunResult:
        log_path = folder / run.name
        if run.name in finished:
            result = RunResult(run.name, run.point, str(log_path), "finished", earlier=True)
        else:
            async with slots:
                ending.check()
                result = await _start(recipe, run, log_path, ending if processes else None, at_once=max(1, processes))
        if on_result is not None:
            on_result(result)
        return result

    with (
        shared_base(runs, processes),
        ends_between_steps() as ending,
        ending.stepping() if processes else nullcontext(),
    ):
        # Processes get a signal, and end after their step. Runs in this process receive signals themselves.
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run_one(run, ending)) for run in runs]
    return [task.result() for task in tasks]


@contextmanager
def shared_base(runs: Sequence[PlannedRun], processes: int) -> Generator[None]:
    """Load the base weights of local runs in this process (processes=0) once: while the client is referenced, all share
    it.
    """
    is_local = any(backends.resolve_backend(run.config.get("backend")) == "local" for run in runs)
    shared = [backends.create_service_client("local")] if processes == 0 and is_local else []
    try:
        yield
    finally:
        shared.clear()


async def _start(recipe: Recipe, run: PlannedRun, log_path: Path, ending: Ending | None, at_once: int) -> RunResult:
    """Run one. `ending`: the signal to pass on to its process; None: it runs in this one."""
    log_path.mkdir(parents=True, exist_ok=True)
    running = RunResult(run.name, run.point, str(log_path), "running")
    _write_status(recipe, run, running)
    start = time.monotonic()
    arguments = [*run.arguments, *_tracker_name(run), f"log_path={log_path}", "behavior_if_log_dir_exists=resume"]
    if ending is None:
        error = await _run_here(recipe, run.name, arguments)
    else:
        error = await _run_process(recipe, arguments, log_path, at_once, ending)
    seconds = time.monotonic() - start
    status: Status = "finished" if error is None else "failed"
    result = RunResult(run.name, run.point, str(log_path), status, error, seconds)
    _write_status(recipe, run, result)
    return result


async def _run_here(recipe: Recipe, name: str, arguments: list[str]) -> str | None:
    """Run in this event loop; return the error's text, or None."""
    with run_logs.label(name):
        try:
            with backends.closing_clients():
                await recipe.main(cli_utils.parse(recipe.config_cls, arguments))
        except (Exception, SystemExit) as error:
            print_traceback(type(error), error, error.__traceback__)
            return redact("; ".join(f"{type(leaf).__name__}: {leaf}" for leaf in _leaves(error)))
    return None


async def _run_process(
    recipe: Recipe, arguments: list[str], log_path: Path, at_once: int, ending: Ending
) -> str | None:
    """Run in a process with its output in `console.log`; return the error's text, or None."""
    environment = dict(os.environ)
    if at_once > 1:
        # Threads of several processes on the same cores slow each other by orders of magnitude.
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // at_once)))
    console = log_path / CONSOLE_BASE_NAME
    with open(console, "ab") as output:
        begin = output.tell()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            recipe.module,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
            preexec_fn=partial(_begin, os.getpid()),
        )
        ended, asked = asyncio.ensure_future(process.wait()), asyncio.ensure_future(ending.asked.wait())
        try:
            await asyncio.wait([ended, asked], return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                process.send_signal(signal.SIGTERM)
            if (code := await ended) != 0:
                ending.check()
        except asyncio.CancelledError:
            await _stop(process)
            raise
        finally:
            asked.cancel()
    return None if code == 0 else _error_text(code, console, begin)


def _begin(parent: int) -> None:
    """(In the new process.) Ctrl-C in the terminal reaches it too; the parent passes it on, once, as SIGTERM."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        end_with(parent)


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


def _error_text(code: int, console: Path, begin: int) -> str:
    """The last output of a process, from its `error:` line on if there is one."""
    with open(console, "rb") as file:
        file.seek(begin)
        lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    lines = list(takewhile(lambda line: not line.startswith(RESUME_HINT), lines))
    first = next((i for i, line in enumerate(lines) if line.startswith("error: ")), max(0, len(lines) - ERROR_LINES))
    return f"{describe_exit(code)}: " + " / ".join(lines[first : first + ERROR_LINES]).removeprefix("error: ")


def _check_processes(recipe: Recipe, runs: Sequence[PlannedRun], processes: int, concurrent: int) -> None:
    if processes < 0:
        raise ConfigurationError(f"processes={processes}: must not be negative (0 runs all in this process)")
    if concurrent < 1:
        raise ConfigurationError(f"concurrent={concurrent}: must be at least 1")
    if processes > 0:
        return
    if not inspect.iscoroutinefunction(recipe.main):
        raise ConfigurationError(f"processes=0: main of {recipe.module} is not a coroutine function; use processes=1")
    if any(run.config.get("wandb_project") is not None for run in runs):
        raise ConfigurationError("processes=0 with wandb_project: W&B keeps one run per process; use processes=1")


def _tracker_name(run: PlannedRun) -> list[str]:
    """The run's name for its tracker, unless the sweep sets one."""
    tracked = run.config.get("wandb_project") is not None
    unnamed = "wandb_name" in run.config and run.config["wandb_name"] is None
    return [f"wandb_name={run.name}"] if tracked and unnamed else []


def _was_finished(folder: Path, run: PlannedRun) -> bool:
    """Whether the run is complete. Raises ConfigurationError if it was started with another config."""
    path = folder / run.name / STATUS_BASE_NAME
    if not path.exists():
        return False
    earlier = read_status(path)
    then, now = flatten(earlier.get("config") or {}), flatten(redact(run.config))
    changed = [f"{key}={now[key]!r}, was {then[key]!r}" for key in now if key in then and now[key] != then[key]]
    if changed:
        raise ConfigurationError(
            f"sweep_dir={str(folder)!r} has the run {run.name} under another config ({'; '.join(changed)}); "
            "give another sweep_dir, or remove that run's folder"
        )
    return earlier.get("status") == "finished"


def read_status(path: Path) -> dict[str, Any]:
    """The content of a `sweep_run.json`. Raises DataFormatError if it is invalid."""
    fix = "remove that run's folder to run it again"
    content = read_json_object(path, fix)
    if not {"name", "point", "status"} <= content.keys():
        raise DataFormatError(f"{path}: lacks name, point or status; {fix}")
    return content


def _write_status(recipe: Recipe, run: PlannedRun, result: RunResult) -> None:
    content: Mapping[str, Any] = {
        **asdict(result),
        "recipe": recipe.module,
        "arguments": list(run.arguments),
        "config": run.config,
    }
    kept = {key: x for key, x in content.items() if key != "earlier"}
    write_json(Path(result.log_path) / STATUS_BASE_NAME, redact(to_jsonable(kept)))


def _leaves(error: BaseException) -> list[BaseException]:
    if not is_exception_group(error):
        return [error]
    return [leaf for part in error.exceptions for leaf in _leaves(part)]
