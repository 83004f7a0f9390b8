"""What a run's session is called."""

import pytest

from tinker_cookbook.utils.session_naming import (
    default_cookbook_session_name,
    resolve_session_display_name,
    slugify,
)


@pytest.mark.parametrize(
    ("session_name", "wandb_name", "shown"),
    [("mine", "board", "mine"), (None, "board", "board"), ("", "board", "board"), (None, None, None), ("", "", None)],
)
def test_the_given_name_comes_before_that_of_the_run_on_wandb(
    session_name: str | None, wandb_name: str | None, shown: str | None
) -> None:
    assert resolve_session_display_name(session_name=session_name, wandb_name=wandb_name) == shown


@pytest.mark.parametrize(
    ("text", "slug"),
    [("Math RL", "math-rl"), ("--a__b--", "a-b"), ("Qwen/Qwen3.5-4B", "qwen-qwen3-5-4b"), ("é!", ""), ("", "")],
)
def test_slugs(text: str, slug: str) -> None:
    assert slugify(text) == slug


def test_a_recipe_names_its_session_after_itself_and_what_tells_its_runs_apart() -> None:
    assert default_cookbook_session_name("math_rl", "GSM8K") == "cookbook-math-rl-gsm8k"
    assert default_cookbook_session_name("math_rl", None, "", "!") == "cookbook-math-rl"
    assert default_cookbook_session_name("math_rl", wandb_name="My run") == "My run"
