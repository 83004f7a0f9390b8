"""Games of several roles as a recipe: its keys, its supervised stage, and rewards that rise."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from recipes import multi_agent
from recipes.common import for_model
from tinker_cookbook import cli_utils
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.runs.ml_log import read_metrics


def cli_of(*arguments: str) -> multi_agent.CLIConfig:
    return for_model(cli_utils.parse(multi_agent.CLIConfig, list(arguments)))


def test_keys_reach_the_games() -> None:
    cli = cli_of("game=shared_sum", "game.highest=7", "opponent=past", "save_every=3", "opponent_share=0.5")
    builder = multi_agent.make_env(cli)
    assert builder.game_args == {"highest": 7} and builder.test_opponent == "self"
    assert (builder.opponents.past_every, builder.opponents.past_lag, builder.opponents.opponent_share) == (3, 0, 0.5)
    ahead = cli_of("opponent=past", "save_every=3", "async_config.max_steps_off_policy=2")
    assert multi_agent.make_env(ahead).opponents.past_lag == 2
    assert multi_agent.make_env(cli_of()).test_opponent == "random"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["game=chess"], "game='chess' is unknown; use kuhn_poker, proposer_solver, shared_sum"),
        (["game=recipes.multi_agent:main"], "is not a class"),
        (["opponent=past", "save_every=0"], "set save_every"),
        (["opponent=past", "async_periodic_saves=True"], "async_periodic_saves may delay"),
        (
            ["opponent=start", "kl_penalty_coef=0.1", "kl_reference_config.load_checkpoint_path=a"],
            "names another reference than the policy",
        ),
    ],
)
def test_what_cannot_be_is_said_before_anything_loads(arguments: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=message):
        asyncio.run(multi_agent.main(cli_of(*arguments, f"log_path={tmp_path / 'run'}")))


def test_the_supervised_stage_shows_what_each_role_sees() -> None:
    cli = cli_of("warm_up_steps=2")
    said = asyncio.run(multi_agent.conversations(cli, multi_agent.make_env(cli), 2))
    assert 16 < len(said) <= 32 and all(talk[-1]["role"] == "assistant" for talk in said)
    assert {len(talk) for talk in said} == {3, 5}  # one move, or a check and the answer to a bet
    assert any("I bet. call or fold?" in str(talk[1]["content"]) for talk in said)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("game", "keys", "least"),
    [("kuhn_poker", {}, 0.1), ("shared_sum", {"learning_rate": 1e-3}, 0.3)],
)
def test_the_reward_rises(game: str, keys: dict[str, Any], least: float, seed: int, tmp_path: Path) -> None:
    cli = multi_agent.CLIConfig(game=game, seed=seed, eval_every=16, log_path=str(tmp_path / "run"), **keys)
    asyncio.run(multi_agent.main(cli))
    rewards = [
        row[key] for row in read_metrics(tmp_path / "run") for key in ["test/env/all/reward/total"] if key in row
    ]
    assert rewards[-1] - rewards[0] > least
