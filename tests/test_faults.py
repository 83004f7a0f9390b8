"""Whatever strikes a run, the next start gives what an undisturbed run gives, or an error that names the damage.

TINKER_TEST_FAULTS says how many faults are drawn (3 by default; `make test-faults`: 200).
"""

import functools
import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults import ENV_STEP, KINDS, METRICS_ROW, Fault, Pause, count_calls
from tests.killing import (
    Outcome,
    Recipe,
    assert_same,
    checkpoints,
    output,
    read_outcome,
    run_process,
    run_whole,
    started,
)
from tests.waiting import HANG_SECONDS, until
from tinker_cookbook.utils.files import read_jsonl

FAULTS = int(os.environ.get("TINKER_TEST_FAULTS", "3"))
TRUNCATED, TWO_PROCESSES = "newest checkpoint truncated", "two processes on one folder"
RUN = Recipe(
    "recipes.debate_rs_grpo",
    ("num_rollouts=8", "num_groups=2", "max_steps=3", "max_tokens=10", "lora_rank=2", "save_every=1", "eval_every=0",
     "num_test=1", "on_zero_advantages=skip"),
)  # fmt: skip
TOLERANT = Recipe(
    RUN.module,
    (*RUN.arguments, "rollout_error_tolerance=RetryOnFailure", "rollout_error_tolerance.max_retries=0",
     f"rollout_error_tolerance.per_rollout_timeout={HANG_SECONDS:g}"),
)  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, dict[str, int]]:
    """What the run comes to, and how often it calls each function that can be struck."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    counts = folder.parent / "counts.json"
    assert run_process(RUN, folder, functools.partial(count_calls, counts)) == 0, output(folder)
    return read_outcome(folder), json.loads(counts.read_text())


def resumed_is(undisturbed: Outcome, folder: Path) -> None:
    assert_same(run_whole(RUN, folder), undisturbed)


def strike(kind: str, draw: random.Random, folder: Path, undisturbed: Outcome, counts: dict[str, int]) -> str:
    """One fault of this kind, drawn; then the resumed run. Returns what it was."""
    targets = [target for target in KINDS[kind].targets if counts[target]]
    target = draw.choice(targets)
    fault = Fault(kind, target, draw.randint(1, counts[target]))
    expected = KINDS[kind]
    exitcode = run_process(TOLERANT if expected.is_tolerated else RUN, folder, fault.install)
    assert exitcode in expected.exitcodes, f"{fault}: exit code {exitcode}\n{output(folder)[-3000:]}"
    assert expected.says in output(folder), f"{fault}: {expected.says!r} is not in\n{output(folder)[-3000:]}"
    if expected.is_tolerated:
        counted(folder / "log")
    else:
        resumed_is(undisturbed, folder)
    return str(fault)


def counted(log_path: Path) -> None:
    """The group that failed stands in the metrics, and every group is accounted for."""
    rows = [row for row in read_jsonl(log_path / "metrics.jsonl") if "groups/sampled" in row]
    assert sum(row["groups/failed"] for row in rows) == 1
    assert sum(row.get("rollout_errors/RolloutTimeoutError", 0) for row in rows) >= 1
    for row in rows:
        ends = ("trained", "filtered", "stale", "failed")
        assert row["groups/sampled"] == sum(row[f"groups/{end}"] for end in ends)


def truncate(draw: random.Random, folder: Path, undisturbed: Outcome, counts: dict[str, int]) -> str:
    """The run dies after its second or third step, and a file of its newest checkpoint loses its end.

    The run goes on from the checkpoint before, or (there is none) ends with an error; either names what is damaged.
    """
    fault = Fault("SIGKILL afterwards", METRICS_ROW, draw.randint(2, 3))
    run_process(RUN, folder, fault.install)
    path = checkpoints(folder)[-1]["state_path"].removeprefix("tinker://")
    file = draw.choice(sorted((folder / "home" / "runs" / path).iterdir()))
    whole = file.read_bytes()
    file.write_bytes(whole[: draw.randrange(len(whole))])
    what = f"{file.name} cut to {file.stat().st_size} of {len(whole)} bytes"
    exitcode = run_process(RUN, folder)
    said = output(folder)
    if file.name != "adapter_config.json":  # which PEFT reads, and resuming does not
        assert file.name in said and "damaged" in said and path in said, f"{what}\n{said[-3000:]}"
    if exitcode == 0:
        assert_same(read_outcome(folder), undisturbed)
    else:
        assert len(checkpoints(folder)) == 1, f"{what}\n{said[-3000:]}"
        file.write_bytes(whole)
        resumed_is(undisturbed, folder)
    return what


def two_processes(draw: random.Random, folder: Path, undisturbed: Outcome, counts: dict[str, int]) -> str:
    """The second is told who holds the folder, and changes nothing in the first."""
    here, go = folder / "here", folder / "go"
    pause = Pause(METRICS_ROW, draw.randint(1, counts[METRICS_ROW]), here, go)
    first = started(RUN, folder, pause.install)
    try:
        until(lambda: here.exists() or not first.is_alive(), lambda: output(folder))
        exitcode = run_process(RUN, folder)
        assert exitcode == 2 and f"process {first.pid} on " in output(folder), output(folder)
    finally:
        go.touch()
        first.join(HANG_SECONDS)
    assert first.exitcode == 0, output(folder)
    assert_same(read_outcome(folder), undisturbed)
    return f"a second process at call {pause.call} of write_metrics"


SPECIAL: dict[str, Callable[[random.Random, Path, Outcome, dict[str, int]], str]] = {
    TRUNCATED: truncate,
    TWO_PROCESSES: two_processes,
}
ALL_KINDS = (*KINDS, *SPECIAL)


@pytest.mark.parametrize("number", range(FAULTS))
def test_a_drawn_fault(number: int, tmp_path: Path, undisturbed: tuple[Outcome, dict[str, int]]) -> None:
    """Kinds take turns, so that the first few draws have them all; where and when they strike is drawn."""
    kind = ALL_KINDS[number % len(ALL_KINDS)]
    draw = random.Random(f"fault/{number}")
    what = (
        SPECIAL[kind](draw, tmp_path, *undisturbed) if kind in SPECIAL else strike(kind, draw, tmp_path, *undisturbed)
    )
    print(f"{number}: {kind}: {what}")


def test_every_function_that_can_be_struck_is_called(undisturbed: tuple[Outcome, dict[str, int]]) -> None:
    outcome, counts = undisturbed
    assert all(counts.values()), counts
    assert counts[ENV_STEP] > 8
    assert sum(row["train/trained_tokens_sum"] for row in outcome.rows if "train/trained_tokens_sum" in row) > 100
