"""A supervised run that is killed at any instant and resumed gives the weights, steps and rows of one that was not."""

from pathlib import Path

import pytest

from tests.killing import (
    CHECKPOINT_LINE,
    METRICS_ROW,
    OPTIM_STEP,
    SAVED_FILE,
    SUBMIT_OPTIM_STEP,
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
STEPS = 7


def recipe(submit_ahead: int) -> Recipe:
    """Seven steps in two epochs, saved after the second, the fourth and the sixth."""
    data = ("dataset=library", "batch_size=5", "test_size=44", f"max_steps={STEPS}")
    settings = ("save_every=2", "eval_every=3", "lora_rank=4", f"submit_ahead={submit_ahead}")
    return Recipe("recipes.sl_basic", (*data, *settings))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("whole")
    outcome = run_whole(recipe(submit_ahead=1), folder)
    for record in checkpoints(folder):
        # Each checkpoint holds the steps before its cursor and none of those that were already submitted.
        assert optimizer_steps(folder, record) == record["epoch"] * 4 + record["batch"]
    return outcome


def test_the_uninterrupted_run_has_all_its_rows(whole: Outcome) -> None:
    assert [row["step"] for row in whole.rows] == list(range(STEPS + 1))
    assert [row["step"] for row in whole.rows if "test/nll" in row] == [0, 3, 6, 7]
    assert whole.optimizer_steps == STEPS
    assert (whole.final["epoch"], whole.final["batch"], whole.final["final"]) == (1, 3, True)


KILLS = [
    [KillPoint(OPTIM_STEP, call=4, when="after")],  # done, neither logged nor saved
    [KillPoint(SAVED_FILE, call=6)],  # while the second checkpoint is being written
    [KillPoint(METRICS_ROW, call=6, when="torn"), KillPoint(CHECKPOINT_LINE, call=1, when="torn")],  # twice in one run
]


@pytest.mark.parametrize("submit_ahead", [0, 2])
@pytest.mark.parametrize("kills", KILLS, ids=lambda kills: "+".join(map(str, kills)))
def test_killed_and_resumed(whole: Outcome, tmp_path: Path, submit_ahead: int, kills: list[KillPoint]) -> None:
    assert_same(run_killed(recipe(submit_ahead), tmp_path, kills), whole)


def test_killed_before_anything_was_saved_right_after_a_save_and_at_the_very_end(
    whole: Outcome, tmp_path: Path
) -> None:
    kills = [
        KillPoint(SUBMIT_OPTIM_STEP, call=1),
        KillPoint(CHECKPOINT_LINE, call=2, when="after"),  # the rows of all its steps must be there
        KillPoint(CHECKPOINT_LINE, call=2, when="after"),
    ]
    assert_same(run_killed(recipe(submit_ahead=2), tmp_path, kills), whole)
