"""What stands behind `env=`: names, classes, builders, functions; and errors that show what is wanted."""

import asyncio
from typing import Any

import chz
import pytest

from examples.custom_env import GuessDatasetBuilder, GuessEnv, GuessGroup
from recipes import rl
from recipes.guess_number import GuessNumber
from recipes.tool_use import ToolUse
from tests.debate.arena import TINY
from tinker_cookbook import cli_utils
from tinker_cookbook.env import get_env, known_envs, load, multi_turn_env, register_env, single_turn_env, unregister_env
from tinker_cookbook.env.dataset import DatasetBuilder
from tinker_cookbook.env.episodes import MultiTurn
from tinker_cookbook.env.qa import QATask
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl.message_env import MessageEnv
from tinker_cookbook.rl.types import RLDatasetBuilder

SUMS = single_turn_env([{"question": "What is 1 + 1?", "answer": 2}], "exact_match")


class Game:
    opening = "Begin."

    def __init__(self, size: int = 3, label: str | None = None):
        self.size = size

    def step(self, message):
        return 1.0


class Drawn(Game):
    def __init__(self, rng):
        super().__init__(rng.randint(1, 9))


@chz.chz(typecheck=True)
class OwnBuilder(RLDatasetBuilder):
    group_size: int
    seed: int = 7
    words: int
    share: float = chz.field(default=0.5, validator=chz.validators.gt(0))


def choose(kind: str = "class") -> Any:
    return {"class": Game, "environment": SUMS, "builder": GuessDatasetBuilder, "nothing": None, "function": choose}[
        kind
    ]


def test_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert known_envs()[:3] == ["guess_number", "twenty_questions", "tool_use"]
    register_env("my_game", Game)
    try:
        made = get_env("my_game", {"size": 4}).dataset_builder(TINY)
        assert isinstance(made, DatasetBuilder) and made.env == MultiTurn(Game, {"size": 4}, 10)
        with pytest.raises(ConfigurationError, match="the name 'my_game' is taken"):
            register_env("my_game", Game)
    finally:
        unregister_env("my_game")
    with pytest.raises(ConfigurationError, match=r"env='my_game' is unknown; use .*guess_number"):
        get_env("my_game")


@pytest.mark.parametrize("kind", ["class", "environment", "builder"])
def test_a_function_gives_any_of_the_others(kind: str) -> None:
    builder = get_env(choose, {"kind": kind}).dataset_builder(TINY, group_size=3, groups_per_batch=1)
    expected = {"class": DatasetBuilder, "builder": GuessDatasetBuilder}
    assert isinstance(builder, expected.get(kind, RLDatasetBuilder))
    assert builder.group_size == 3  # type: ignore[attr-defined]


def test_a_builder_of_ones_own_is_filled_by_the_names_of_its_fields() -> None:
    builder: Any = get_env(OwnBuilder, {"words": 2}).dataset_builder(TINY, group_size=5, seed=1)
    assert (builder.group_size, builder.seed, builder.words, builder.share) == (5, 1, 2, 0.5)
    made: Any = get_env("examples.custom_env:GuessDatasetBuilder", {"groups": 2}).dataset_builder(TINY, group_size=3)
    training, test = asyncio.run(made())
    assert len(training.get_batch(0)) == 2 and training.get_batch(0)[0].size == 3 and test is None


@pytest.mark.parametrize(
    ("env", "env_args", "message"),
    [
        (OwnBuilder, {}, "^OwnBuilder needs env_args.words"),
        (OwnBuilder, {"words": 2, "seed": 3}, "env_args.seed: is a setting and not an argument: give it as seed"),
        (OwnBuilder, {"words": 2, "x": 3}, "env_args.x: is unknown; OwnBuilder takes env_args.words, env_args.share"),
        (OwnBuilder, {"words": "two"}, "env_args.words='two': is str, but OwnBuilder takes words: int"),
        (OwnBuilder, {"words": 2, "share": -1}, "OwnBuilder: Expected env_args.share to be greater than 0"),
        (Game, {"size": 2.5}, "env_args.size=2.5: is float, but Game takes size: int"),
        (Game, {"label": 2}, r"but Game takes label: str \| None"),
        (
            Game,
            {"rng": 2},
            r"env_args.rng: Game.*unexpected keyword argument 'rng'; it takes env_args.size, env_args.label",
        ),
        (Drawn, {"rng": 2}, "env_args.rng: Drawn is given one for each episode; leave it out"),
        (SUMS, {"a": 1}, "takes no arguments"),
        (choose, {"kinds": 1}, "unexpected keyword argument 'kinds'; it takes env_args.kind"),
        (choose, {"kind": "nothing"}, "it returned nothing; `return` an object with"),
        (choose, {"kind": "function"}, "gave a function"),
        (GuessDatasetBuilder(), {}, "is an object of GuessDatasetBuilder; give the class"),
        (GuessEnv, {}, "is a class over token ids or groups"),
        (GuessGroup, {}, "is a class over token ids or groups"),
        (QATask, {}, "is a class without a method step: QATask"),
        (
            type("Two", (), {"step": lambda self, a, b: 1}),
            {},
            r"Two.step takes \(self, a, b\), but will be called with",
        ),
        (type("Half", (MessageEnv,), {}), {}, "Half lacks initial_observation, step"),
        (3, {}, "is neither a class nor a function, but int"),
    ],
)
def test_a_wrong_one_is_named(env: Any, env_args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        get_env(env, env_args).dataset_builder(TINY)


def test_an_argument_is_called_as_it_was_given() -> None:
    place = "tests.env.test_registry:Game"
    for call in (lambda: load(place, size=2.5), lambda: multi_turn_env(Game, size=2.5)):
        with pytest.raises(ConfigurationError, match=r"^size=2.5: is float, but Game takes size: int"):
            call()
    with pytest.raises(ConfigurationError, match=r"inner_args.sise: Game.*it takes inner_args.size, inner_args.label$"):
        load("gradient_intuition", inner=place, inner_args={"sise": 2})
    with pytest.raises(ConfigurationError, match=r"game_args.decks: .*; it takes no arguments"):
        load("kuhn_poker", game_args={"decks": 2})


def test_shipped_ones_are_those_of_their_recipes() -> None:
    builder = get_env("guess_number", {"highest": 6}).dataset_builder(TINY, group_size=3, num_batches=4, num_test=5)
    assert isinstance(builder, DatasetBuilder) and isinstance(builder.env, GuessNumber)
    assert (builder.env.highest, builder.env.max_turns) == (6, 3)
    assert (builder.group_size, builder.num_batches, builder.num_test) == (3, 4, 5)
    tools = get_env("tool_use", {"largest": 5}).dataset_builder(TINY, max_prompt_tokens=300)
    assert isinstance(tools, DatasetBuilder) and isinstance(tools.env, ToolUse)
    assert (tools.env.largest, tools.max_prompt_tokens) == (5, 300)


def test_the_recipe_reads_them_from_the_command_line() -> None:
    keys = ["env=tests.env.test_registry:Game", "env_args.size=4", "env_args.label=None", "group_size=3"]
    cli = cli_utils.parse(rl.CLIConfig, keys)
    assert cli.env_args == {"size": 4, "label": None}
    builder = rl.make_dataset_builder(chz.replace(cli, model_name=TINY, renderer_name="role_colon", max_tokens=9))
    assert isinstance(builder, DatasetBuilder) and isinstance(builder.env, MultiTurn)
    assert builder.env.env_args == {"size": 4, "label": None}
    assert (builder.group_size, builder.renderer_name, builder.num_batches) == (3, "role_colon", cli.max_steps)
    assert builder.max_prompt_tokens == 1024 - 9
