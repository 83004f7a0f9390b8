"""Runs a public recipe on the local engine in a process and folders of its own, and looks at what it left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file

from tests.ecosystem.stubs import fill_hub_cache, write_files
from tests.ecosystem.table import PublicRecipe

ROOT = Path(__file__).parents[2]
TIMEOUT_S, TEACHING_TIMEOUT_S = 600, 1800


@dataclass(frozen=True)
class Outcome:
    """What a recipe did. `problem` is empty when it trained and saved."""

    name: str
    problem: str
    metrics_rows: int
    checkpoints: int
    seconds: float


def environment(home: Path, package: Path) -> dict[str, str]:
    """No network, no state of the user's, one thread."""
    keep = {key: value for key, value in os.environ.items() if not key.startswith(("TINKER_", "HF_", "PYTEST_"))}
    return {
        **keep,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(package.parent)]),
        "HOME": str(home),
        "HF_HOME": str(home / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "TINKER_LOCAL_HOME": str(home / "engine"),
        "TINKER_COOKBOOK_RUNS_DIR": str(home / "runs"),
        "OMP_NUM_THREADS": "1",
        "GCP_VERTEXAI_PROJECT_NUMBER": "0",
        "GCP_VERTEXAI_REGION": "nowhere",
    }


def make_model(output: Path, package: Path, home: Path) -> None:
    """Teach the tiny model (see model.py). Raises RuntimeError with what was printed when that fails."""
    command = [sys.executable, "-m", "tests.ecosystem.model", str(output), str(package)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(home, package), capture_output=True, text=True, timeout=TEACHING_TIMEOUT_S
    )
    if done.returncode != 0:
        raise RuntimeError(f"the model could not be taught:\n{done.stderr[-2000:]}")


def run_recipe(recipe: PublicRecipe, package: Path, model: Path, folder: Path) -> Outcome:
    """Run one recipe in `folder`, which is empty."""
    write_files(folder, recipe.files)
    fill_hub_cache(folder / "huggingface", model)
    keys = {key: str(value).format(model=model) for key, value in recipe.keys.items()}
    if recipe.model_key is not None:
        keys[recipe.model_key] = str(model)
    if recipe.log_path_key is not None:
        keys[recipe.log_path_key] = str(folder / recipe.log_paths[0])
    arguments = [f"{key}={value}" for key, value in keys.items()]
    command = [sys.executable, "-m", "tests.ecosystem.launch", str(package), recipe.module, *arguments]
    started = time.monotonic()
    with (folder / "output.txt").open("w") as output:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment(folder, package),
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
        )
    return _look(recipe, folder, done.returncode, time.monotonic() - started)


def _look(recipe: PublicRecipe, folder: Path, code: int, seconds: float) -> Outcome:
    rows = [len(_lines(folder / path / "metrics.jsonl")) for path in recipe.log_paths]
    checkpoints = [len(_lines(folder / path / "checkpoints.jsonl")) for path in recipe.log_paths]
    problem = ""
    if code != 0:
        problem = f"exit code {code}: {_last_words(folder / 'output.txt')}"
    elif recipe.writes is not None and not _lines(folder / recipe.writes):
        problem = f"{recipe.writes} has no lines"
    elif 0 in rows:
        problem = "no row of metrics"
    elif 0 in checkpoints:
        problem = "no checkpoint"
    elif recipe.log_paths and not all(_has_learnt(folder, folder / path) for path in recipe.log_paths):
        problem = "the weights did not change"
    return Outcome(recipe.name, problem, sum(rows), sum(checkpoints), seconds)


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
