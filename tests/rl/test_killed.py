"""Reinforcement learning killed at any instant and resumed, in every pacing, is the run that was not."""

import functools
import itertools
from collections import Counter
from collections.abc import Callable
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
    unless,
)
from tinker_cookbook.rl.kept_groups import FOLDER
from tinker_cookbook.stores.rollouts import FILE_NAME, read_rollouts
from tinker_cookbook.utils.misc_utils import iteration_name

STEPS = 6
SAMPLE_GROUP = "tinker_cookbook.rl.sampler:Sampler.sample_group"
GROUPS = 3
SIGNAL = (  # all that is new in a checkpoint, and groups that are replaced
    "replace_constant_groups=1",
    "curriculum.easy_share=0.2",
    "entropy.target=2.0",
    "overlong.penalty_tokens=8",
    "overlong.mask=True",
)
MODES = {
    "sync": (),
    "sync, two substeps, role baselines, KL penalty": (
        "num_substeps=2",
        "advantage.baseline=role",
        "kl_penalty_coef=0.1",
    ),
    "stream": ("stream_minibatch_config.num_minibatches=2", "num_substeps=2"),
    "sync, pool and replacements": SIGNAL,
    "stream, pool and replacements": ("stream_minibatch_config.num_minibatches=2", *SIGNAL),
    "async 2, pool and replacements": ("async_config.max_steps_off_policy=2", "async_config.loss_fn=ppo", *SIGNAL),
    "async 2": ("async_config.max_steps_off_policy=2",),
    "async 2, stable_reinforce": ("async_config.max_steps_off_policy=2", "async_config.loss_fn=stable_reinforce"),
}


def recipe(*settings: str) -> Recipe:
    """Six steps, saved after the second and the fourth."""
    data = (f"groups_per_batch={GROUPS}", "group_size=6", "num_test=4", f"max_steps={STEPS}", "max_tokens=24")
    return Recipe(
        "recipes.rl_basic", (*data, "save_every=2", "eval_every=3", "lora_rank=4", "on_zero_advantages=skip", *settings)
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    """The uninterrupted run of a mode, made when it is first asked for."""
    return functools.cache(lambda mode: run_whole(recipe(*MODES[mode]), tmp_path_factory.mktemp("whole") / "run"))


KILLS = {
    "an update done, neither logged nor saved": [KillPoint(OPTIM_STEP, call=4, when="after")],
    "while a checkpoint is written": [KillPoint(SAVED_FILE, call=6)],
    "torn lines, twice in one run": [
        KillPoint(METRICS_ROW, call=4, when="torn"),
        KillPoint(CHECKPOINT_LINE, call=1, when="torn"),
    ],
}


KEPT = {("torn lines, twice in one run", "async 2, pool and replacements")}
"""What `make test` runs: the mode with most to lose. tests/rl/test_killed_anywhere.py kills the others at a drawn instant."""


@pytest.mark.parametrize(
    ("kills", "mode"),
    [pytest.param(*case, id="-".join(case), marks=unless(case in KEPT)) for case in itertools.product(KILLS, MODES)],
)
def test_killed_and_resumed(whole: Callable[[str], Outcome], tmp_path: Path, mode: str, kills: str) -> None:
    assert [row["step"] for row in whole(mode).rows] == list(range(STEPS + 1))
    assert whole(mode).optimizer_steps >= STEPS - 2
    assert_same(run_killed(recipe(*MODES[mode]), tmp_path, KILLS[kills]), whole(mode))


@pytest.mark.faults
def test_sampling_zero_batches_ahead_is_the_synchronous_loop(whole: Callable[[str], Outcome], tmp_path: Path) -> None:
    assert_same(run_whole(recipe("async_config.max_steps_off_policy=0"), tmp_path), whole("sync"))


@pytest.mark.faults
def test_a_run_that_samples_ahead_does_so_between_its_checkpoints(whole: Callable[[str], Outcome]) -> None:
    """Else its resumption would be that of the synchronous loop."""
    ages = [row["step"] - row["sampling_client/step_min"] for row in whole("async 2").rows[:STEPS]]
    assert max(ages) == 2
    assert not (whole("async 2").log_path / FOLDER).exists()


BY_TIME = [
    [KillPoint(SAMPLE_GROUP, call=3 * GROUPS + 2)],
    [KillPoint(OPTIM_STEP, call=4, when="after")],
    [KillPoint(METRICS_ROW, call=4, when="torn"), KillPoint(SAVED_FILE, call=2)],
]


@pytest.mark.parametrize(
    "kills",
    [pytest.param(kills, id="+".join(map(str, kills)), marks=pytest.mark.faults) for kills in BY_TIME],
)
def test_by_time_no_group_is_lost_or_trained_twice(tmp_path: Path, kills: list[KillPoint]) -> None:
    by_time = ("async_config.max_steps_off_policy=2", "async_config.deterministic=False")
    outcome = run_killed(recipe(*by_time), tmp_path, kills)
    steps = [row for row in outcome.rows if "groups/sampled" in row]
    assert [row["step"] for row in steps] == list(range(STEPS))
    assert sum(row["groups/sampled"] for row in steps) == STEPS * GROUPS
    assert all(row["groups/sampled"] == row["groups/trained"] + row["groups/filtered"] for row in steps)
    assert outcome.optimizer_steps == sum(1 - row["train/skipped_steps"] for row in steps)
    # What the records say was trained: each question of the run once.
    prompts: Counter[bytes] = Counter()
    for row in steps:
        about, turns = read_rollouts(outcome.log_path / iteration_name(row["step"]) / FILE_NAME)
        assert about["run"]["step"] == row["step"] and {turn["group"] for turn in turns} == set(range(GROUPS))
        trained = {turn["group"] for turn in turns if turn["advantages"] is not None}
        assert len(trained) == row["groups/trained"]
        prompts.update({turn["group"]: turn["prompt"].tobytes() for turn in turns}.values())
    assert len(prompts) == STEPS * GROUPS
