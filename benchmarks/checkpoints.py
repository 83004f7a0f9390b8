"""Time of a save and of listings with many checkpoints in the run.

    python -m benchmarks.checkpoints
    python -m benchmarks.checkpoints sizes=100,500,2000 repetitions=30

The checkpoints are copies of one that the engine saved, for the shipped tiny model. "again" is a listing of a home in which
nothing has changed since the last one, "first" one of a home without an index, as from an earlier version.
"""

import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import chz

from benchmarks.config import EXAMPLE_MODEL, run_benchmark
from tinker_local_backend import RestClient, ServiceClient
from tinker_local_backend.storage.database import REGISTRY_FILE
from tinker_local_backend.storage.paths import CheckpointPath


@chz.chz(typecheck=True)
class CheckpointsConfig:
    """Keys of `python -m benchmarks.checkpoints`."""

    sizes: list[int] = chz.field(default_factory=lambda: [10, 100, 500], doc="checkpoints in the run, growing")
    repetitions: int = chz.field(default=15, doc="calls of each kind, for the median", validator=chz.validators.gt(0))
    output: str | None = chz.field(default=None, doc="JSON file for the result; default: none")


def measure(config: CheckpointsConfig) -> list[dict[str, float]]:
    """A row for each size: medians in milliseconds."""
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="tinker-benchmark-") as folder,
        ServiceClient(home=(home := Path(folder))) as service,
    ):
        client = service.create_lora_training_client(EXAMPLE_MODEL, rank=4, seed=0).result()
        first = CheckpointPath.parse(client.save_state("n0").result().path).folder(home)
        rest = RestClient(home)

        def list_without_index() -> None:
            for file in home.glob(f"{REGISTRY_FILE}*"):
                file.unlink()
            rest.list_checkpoints(client.model_id).result()

        for size in config.sizes:
            _fill(first, size)
            list_without_index()
            calls = {
                "save": lambda: client.save_state("measured", overwrite=True).result(),
                "list a run again": lambda: rest.list_checkpoints(client.model_id).result(),
                "list 100 of all again": lambda: rest.list_user_checkpoints(limit=100).result(),
                "list a run first": list_without_index,
            }
            rows.append({"checkpoints": size, **{name: _median(call, config) for name, call in calls.items()}})
    return rows


def _fill(first: Path, size: int) -> None:
    """Fill the run with `size` checkpoints, copies of the first, unchanged for a minute."""
    then = time.time() - 60
    for i in range(size):
        folder = first.parent / f"n{i}"
        if not folder.exists():
            shutil.copytree(first, folder)
        os.utime(folder, (then, then))


def _median(call: Callable[[], object], config: CheckpointsConfig) -> float:
    times = []
    for _ in range(config.repetitions):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return round(1000 * statistics.median(times), 2)


def main(config: CheckpointsConfig) -> None:
    """Measure, print, and write the result."""
    rows = measure(config)
    print("milliseconds, medians\n")
    print(" | ".join(rows[0]))
    for row in rows:
        print(" | ".join(f"{value:>{len(name)}}" for name, value in row.items()))
    if config.output is not None:
        Path(config.output).write_text(
            json.dumps({"config": chz.asdict(config), "milliseconds": rows}, indent=2) + "\n"
        )


if __name__ == "__main__":
    run_benchmark(main)
