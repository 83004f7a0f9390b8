"""Distillation killed at any instant, also while its teacher is being made, and resumed is the run that was not."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
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
    run_killed,
    run_whole,
)

STEPS = 6
COMMON = ("save_every=2", "eval_every=3", "lora_rank=4", "teacher_epochs=1", f"max_steps={STEPS}")


@dataclass(frozen=True)
class Case:
    """A recipe that first trains a teacher for so many steps, with so many checkpoints."""

    recipe: Recipe
    teacher_steps: int
    teacher_saves: int
    redone_steps: int
    """steps of the teacher in a process that resumes it after its second one"""


CASES = {
    "off-policy": Case(
        Recipe(
            "recipes.distillation.off_policy",
            ("test_size=92", "batch_size=18", "num_epochs=3", "teacher_concurrency=7", *COMMON),
        ),
        teacher_steps=2,
        teacher_saves=1,
        redone_steps=2,
    ),
    "on-policy": Case(
        Recipe(
            "recipes.distillation.on_policy",
            ("groups_per_batch=4", "group_size=2", "test_size=6", "max_tokens=12", *COMMON),
        ),
        teacher_steps=10,
        teacher_saves=5,
        redone_steps=8,
    ),
    "sdft": Case(
        Recipe(
            "recipes.distillation.sdft",
            (
                *("groups_per_batch=4", "test_size=6", "max_tokens=12", "warm_up_steps=2", "teacher_sync_every=3"),
                *(key for key in COMMON if not key.startswith("teacher_epochs")),
            ),
        ),
        teacher_steps=2,
        teacher_saves=1,
        redone_steps=2,
    ),
}


def kills(case: Case) -> dict[str, list[KillPoint]]:
    return {
        "in the teacher's training, then with an update done, neither logged nor saved": [
            KillPoint(OPTIM_STEP, call=2 if case.teacher_steps == 2 else 3, when="after"),
            KillPoint(OPTIM_STEP, call=case.redone_steps + 4, when="after"),
        ],
        "while a checkpoint is written": [KillPoint(SAVED_FILE, call=2 * case.teacher_saves + 4)],
        "torn lines, twice in one run": [
            KillPoint(METRICS_ROW, call=case.teacher_steps + 4, when="torn"),
            KillPoint(CHECKPOINT_LINE, call=1, when="torn"),
        ],
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    """The uninterrupted run of a case, made when it is first asked for."""
    return functools.cache(lambda name: run_whole(CASES[name].recipe, tmp_path_factory.mktemp("whole") / "run"))


@pytest.mark.faults
@pytest.mark.parametrize(
    ("where", "name"),
    [pytest.param(*case, id="-".join(case)) for case in itertools.product(kills(CASES["on-policy"]), CASES)],
)
def test_killed_and_resumed(whole: Callable[[str], Outcome], tmp_path: Path, name: str, where: str) -> None:
    expected = whole(name)
    assert [row["step"] for row in expected.rows] == list(range(STEPS + 1))
    assert [row["step"] for row in expected.rows if any(key.startswith("test/") for key in row)] == [0, 3, STEPS]
    assert expected.optimizer_steps == STEPS and expected.final["batch"] == STEPS
    assert_same(run_killed(CASES[name].recipe, tmp_path, kills(CASES[name])[where]), expected)
