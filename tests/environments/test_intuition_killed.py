"""A run of gradient_intuition that is killed and resumed: a shadow of the new training client takes the place of the lost one."""

from pathlib import Path

import pytest

from tests.killing import CHECKPOINT_LINE, SAVE_STATE, KillPoint, Recipe, assert_same, run_killed, run_whole
from tinker_cookbook.data.shipped import EXAMPLE_DATA

FORMS = EXAMPLE_DATA / "minds" / "forms" / "gradient_intuition.jsonl"
RECIPE = Recipe(
    "recipes.env_rl",
    (
        "env=gradient_intuition",
        "env_args.inner_args={'questions': 12, 'highest': 4, 'hard_share': 0, 'operations': '+'}",
        f"warm_up_data={FORMS}",
        "warm_up_steps=40",
        "max_steps=3",
        "groups_per_batch=2",
        "group_size=4",
        "max_tokens=40",
        "lora_rank=16",
        "eval_every=0",
        "save_every=1",
        "on_zero_advantages=skip",
    ),
)


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    whole = run_whole(RECIPE, tmp_path / "whole")
    assert any("env/all/true" in row for row in whole.rows), "no reply had the form, so that there was no shadow"
    # The supervised stage leaves a checkpoint too. Among the states that are saved are those of the shadow.
    points = [KillPoint(CHECKPOINT_LINE, call=3, when="torn"), KillPoint(SAVE_STATE, call=2)]
    assert_same(run_killed(RECIPE, tmp_path / "killed", points), whole)
