"""Runs a public program on the local engine in a process and folders of its own, and looks at what it left."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file

from tests.ecosystem.package import Release, install
from tests.ecosystem.stubs import INSTRUCT, TAUGHT, fill_hub_cache, write_files
from tests.ecosystem.table import Program, Suite
from tests.waiting import HANG_SECONDS

ROOT = Path(__file__).parents[2]
TIMEOUT_S, TEACHING_TIMEOUT_S = 2 * HANG_SECONDS, 3 * HANG_SECONDS
SEED = 0
"""of the engine's draws. Tutorial 301 needs a group of four with unlike rewards: it reads the first datum, and there is none of a
group that is alike."""


@dataclass(frozen=True)
class Place:
    """What programs run with: folders.

    Attributes:
        packages: what they import beside their library.
        models: see model.py.
    """

    release: Release
    packages: Path
    models: Path


@dataclass(frozen=True)
class Outcome:
    """What a program did. `problem` is empty when it did what its entry of the table says."""

    name: str
    problem: str
    metrics_rows: int
    checkpoints: int
    seconds: float
    metrics: frozenset[str] = frozenset()
    """the names of what its rows have, without the statistics of spans"""


def environment(home: Path, *packages: Path) -> dict[str, str]:
    """No network, no state of the user's, no window, one thread."""
    keep = {key: value for key, value in os.environ.items() if not key.startswith(("TINKER_", "HF_", "PYTEST_"))}
    return {
        **keep,
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, *packages))),
        "HOME": str(home),
        "HF_HOME": str(home / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "MPLBACKEND": "agg",
        "TINKER_API_KEY": "tml-nobody-asks",  # notebooks stop without one
        "TINKER_LOCAL_HOME": str(home / "engine"),
        "TINKER_LOCAL_SEED": str(SEED),
        "TINKER_COOKBOOK_RUNS_DIR": str(home / "runs"),
        "OMP_NUM_THREADS": "1",
        "GCP_VERTEXAI_PROJECT_NUMBER": "0",
        "GCP_VERTEXAI_REGION": "nowhere",
    }


def make_models(output: Path, recipes: Path, packages: Path, home: Path) -> None:
    """Make the models (see model.py) from a release's recipes. Raises RuntimeError with what was printed when that fails."""
    command = [sys.executable, "-m", "tests.ecosystem.model", str(output), str(recipes)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(home, packages), capture_output=True, text=True, timeout=TEACHING_TIMEOUT_S
    )
    if done.returncode != 0:
        raise RuntimeError(f"the model could not be taught:\n{done.stderr[-2000:]}")


def run_program(suite: Suite, program: Program, place: Place, folder: Path) -> Outcome:
    """Run one program in `folder`, which is empty; what it prints goes to output.txt there."""
    write_files(folder, program.files)
    if program.needs:
        install(folder / "needs", program.needs)
    fill_hub_cache(folder / "huggingface", place.models)
    started = time.monotonic()
    try:
        code = _run(suite, program, place, folder)
    except subprocess.TimeoutExpired:
        return Outcome(program.name, f"still running after {TIMEOUT_S} s", 0, 0, TIMEOUT_S)
    return _look(program, folder, code, time.monotonic() - started)


def _run(suite: Suite, program: Program, place: Place, folder: Path) -> int:
    with (folder / "output.txt").open("w") as output:
        done = subprocess.run(
            [sys.executable, "-m", "tests.ecosystem.launch", *_arguments(suite, program, place, folder)],
            cwd=folder,
            env=environment(folder, place.packages, folder / "needs"),
            input=program.typed,
            text=True,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
        )
    return done.returncode


def _arguments(suite: Suite, program: Program, place: Place, folder: Path) -> list[str]:
    """For launch.py: the library, the program and what it is told."""
    model = INSTRUCT if suite.own_library else str(place.models / TAUGHT)
    given = {"model": model}
    if "{checkpoint}" in program.keys.values():
        given["checkpoint"] = _new_checkpoint(model, place, folder)
    keys = {key: str(value).format(**given) for key, value in program.keys.items()}
    if program.model_key is not None:
        keys[program.model_key] = model
    if program.log_path_key is not None:
        keys[program.log_path_key] = str(folder / program.log_paths[0])
    release = place.release
    library = ["theirs", str(release.library)] if suite.own_library else ["this", str(release.recipes)]
    if program.kind == "tutorial":
        return [*library, str(release.sources / "tutorials" / program.path)]
    module = f"tinker_cookbook.recipes.{program.path}"
    return [*library, module, *program.arguments, *(f"{key}={value}" for key, value in keys.items())]


def _new_checkpoint(model: str, place: Place, folder: Path) -> str:
    """The path of one in the program's folder."""
    command = [sys.executable, "-m", "tests.ecosystem.checkpoint", model]
    settings = {"env": environment(folder, place.packages), "timeout": TIMEOUT_S, "check": True}
    return subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, **settings).stdout.split()[-1]


def _look(program: Program, folder: Path, code: int, seconds: float) -> Outcome:
    logged = [_lines(folder / path / "metrics.jsonl") for path in program.log_paths]
    rows = [len(lines) for lines in logged]
    checkpoints = [len(_lines(folder / path / "checkpoints.jsonl")) for path in program.log_paths]
    said = (folder / "output.txt").read_text(errors="replace")
    problem = ""
    if code != 0:
        problem = f"exit code {code}: {_last_words(folder / 'output.txt')}"
    elif program.says is not None and not re.search(program.says, said):
        problem = f"did not say {program.says!r}"
    elif program.writes is not None and not _lines(folder / program.writes):
        problem = f"{program.writes} has no lines"
    elif 0 in rows:
        problem = "no row of metrics"
    elif 0 in checkpoints:
        problem = "no checkpoint"
    elif not all(
        _has_learnt(folder, folder / path) or (program.kind == "tutorial" and _had_nothing_to_learn(lines))
        for path, lines in zip(program.log_paths, logged, strict=True)
    ):
        problem = "the weights did not change"
    metrics = frozenset(key.partition(":")[0] for lines in logged for line in lines for key in json.loads(line))
    return Outcome(program.name, problem, sum(rows), sum(checkpoints), seconds, metrics)


def _had_nothing_to_learn(rows: Sequence[str]) -> bool:
    """Whether every step was skipped because its rewards were alike, as those of questions that are beyond the model."""
    return all(json.loads(row).get("train/skipped_steps") == 1 for row in rows)


def _has_learnt(home: Path, log_path: Path) -> bool:
    """Whether the last checkpoint's adapter adds anything: B begins at zero."""
    last = json.loads(_lines(log_path / "checkpoints.jsonl")[-1])
    path = last.get("sampler_path") or last["state_path"]
    weights = load_file(home / "engine" / "runs" / path.removeprefix("tinker://") / "adapter_model.safetensors")
    return any(bool(tensor.any()) for name, tensor in weights.items() if "lora_B" in name)


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.is_file() else []


def _last_words(path: Path) -> str:
    lines = [line for line in _lines(path) if line.strip()]
    return lines[-1][:300] if lines else "no output"
