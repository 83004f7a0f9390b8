"""A DPO run killed at any instant and resumed is the uninterrupted one, measured against the reference it began with."""

from pathlib import Path

import pytest

from tests.killing import (
    CHECKPOINT_LINE,
    METRICS_ROW,
    OPTIM_STEP,
    SAVED_FILE,
    KillPoint,
    Outcome,
    Recipe,
    assert_same,
    checkpoints,
    optimizer_steps,
    run_killed,
    run_whole,
)

pytestmark = pytest.mark.faults
STEPS, BATCHES = 5, 3
"""Steps of the run, and batches of an epoch."""

DATA = ("test_size=130", "batch_size=5", f"max_steps={STEPS}", "num_epochs=2")
RECIPE = Recipe("recipes.preference.train", (*DATA, "save_every=2", "eval_every=3", "lora_rank=4"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("whole")
    outcome = run_whole(RECIPE, folder)
    for record in checkpoints(folder):
        assert optimizer_steps(folder, record) == record["epoch"] * BATCHES + record["batch"]
    return outcome


def test_the_uninterrupted_run_has_all_its_rows(whole: Outcome) -> None:
    assert [row["step"] for row in whole.rows] == list(range(STEPS + 1))
    assert [row["step"] for row in whole.rows if "test/accuracy" in row] == [0, 3, STEPS]
    assert whole.optimizer_steps == STEPS
    assert (whole.final["epoch"], whole.final["batch"]) == divmod(STEPS, BATCHES)
    assert whole.final["reference"]["path"] is None and whole.final["reference"]["base_model"].endswith("tiny_chat")


KILLS = [
    [KillPoint(OPTIM_STEP, call=4, when="after")],  # done, neither logged nor saved
    [KillPoint(SAVED_FILE, call=6)],  # while the second checkpoint is being written
    [KillPoint(METRICS_ROW, call=4, when="torn"), KillPoint(CHECKPOINT_LINE, call=2, when="torn")],  # twice in one run
]


@pytest.mark.parametrize("kills", KILLS, ids=lambda kills: "+".join(map(str, kills)))
def test_killed_and_resumed(whole: Outcome, tmp_path: Path, kills: list[KillPoint]) -> None:
    assert_same(run_killed(RECIPE, tmp_path, kills), whole)
