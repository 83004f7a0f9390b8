"""A class that returns only what is new: tokens stay as sampled, members of a group get the same, mistakes are named."""

import asyncio
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.debate.arena import TINY, encode, make_renderer, reply_ids, stop_ids
from tests.fakes import ScriptedCompleter, said
from tinker_cookbook.env import Environment, TurnResult, get_env, multi_turn_env
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Message
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.message_env import MessageEnv, MessageStepResult
from tinker_cookbook.rl.message_groups import MessageGroupBuilder
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import EnvGroupBuilder, TrajectoryGroup

RENDERER = make_renderer("qwen3_instruct")


class Guess:
    def __init__(self, rng: random.Random, highest: int = 9):
        self.rng, self.number = rng, rng.randint(1, highest)
        self.opening = f"Up to {highest}."

    def step(self, message):
        return 1.0 if message["content"] == str(self.number) else "No."


def first_group(env: Environment, **settings: Any) -> EnvGroupBuilder:
    training, _ = asyncio.run(env.dataset_builder(TINY, **settings)())
    return training.get_batch(0)[0]


def play(env: Environment, *turns: str) -> TrajectoryGroup:
    replies = [said(reply_ids(RENDERER, text)) for text in turns]
    return asyncio.run(do_group_rollout(first_group(env, group_size=1), ScriptedCompleter({0: replies})))


def class_of(step: Callable[..., Any], **attributes: Any) -> type:
    return type("Game", (), {"opening": "Begin.", "step": step, **attributes})


def test_what_was_sampled_is_never_rendered_again() -> None:
    # Letter by letter: no tokenizer writes this word like that, so that a decoded and encoded reply would differ.
    odd = [token for letter in "twelve" for token in encode(RENDERER, letter)]
    assert odd != encode(RENDERER, "twelve")
    game = class_of(lambda self, message: message.update(content="changed") or "Go on.", max_turns=3)
    turns = [said(odd + stop_ids(RENDERER)) for _ in range(3)]
    builder = first_group(multi_turn_env(game), group_size=1)
    group = asyncio.run(do_group_rollout(builder, ScriptedCompleter({0: turns})))
    (trajectory,) = group.trajectories_G
    assert len(trajectory.transitions) == 3 and trajectory.stop_reason == "max_turns"
    (datum,) = trajectory_to_data(trajectory, 1.0)
    tokens = datum.model_input.to_ints()
    spoken = odd + stop_ids(RENDERER)
    assert sum(tokens[i : i + len(odd)] == odd for i in range(len(tokens))) == 3
    mask = datum.loss_fn_inputs["mask"].tolist()
    targets = datum.loss_fn_inputs["target_tokens"].tolist()
    assert [token for token, m in zip(targets, mask, strict=True) if m] == spoken * 3


def test_the_conversation_and_the_rewards() -> None:
    def step(self, message):
        self.turns = getattr(self, "turns", 0) + 1
        return [
            "Second?",
            ({"role": "system", "content": "Third?"}, 0.25),
            TurnResult([{"role": "user", "content": "Fourth?"}], 0.5, metrics={"half": 1}, logs={"said": "so"}),
            1,
        ][self.turns - 1]

    group = play(multi_turn_env(class_of(step)), "a", "b", "c", "d")
    (trajectory,) = group.trajectories_G
    assert [turn.reward for turn in trajectory.transitions] == [0.0, 0.25, 0.5, 1.0]
    assert trajectory.transitions[2].metrics["half"] == 1 and trajectory.transitions[2].logs == {"said": "so"}
    assert trajectory.stop_reason == "completed"
    messages = group.records[0].content["messages"]
    assert [(message["role"], message["content"]) for message in messages] == [
        ("user", "Begin."), ("assistant", "a"), ("user", "Second?"), ("assistant", "b"), ("system", "Third?"),
        ("assistant", "c"), ("user", "Fourth?"), ("assistant", "d"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("returned", "reward"),
    [(0.5, 0.5), (2, 2.0), (True, 1.0), (np.float32(0.25), 0.25), (TurnResult(reward=0.75), 0.75),
     (TurnResult("Well done.", 3, done=True), 3.0)],
)  # fmt: skip
def test_what_ends_an_episode(returned: object, reward: float) -> None:
    async def step(self, message):
        return returned

    (trajectory,) = play(multi_turn_env(class_of(step)), "a").trajectories_G
    assert [turn.reward for turn in trajectory.transitions] == [reward]
    assert trajectory.stop_reason == "completed"


@pytest.mark.parametrize(
    "returned",
    [None, [], ("Go on.", "1"), ("Go on.", 1, 2), [{"content": "x"}], float("nan"), TurnResult(messages=3)],  # type: ignore[arg-type]
    ids=repr,
)
def test_what_is_no_result_is_named(returned: object) -> None:
    with pytest.raises(ConfigurationError, match=r"Game: \S+ gave .*; it gives "):
        play(multi_turn_env(class_of(lambda self, message: returned)), "a")


async def later(self) -> list[dict[str, str]]:
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Begin."}]


@pytest.mark.parametrize("opening", ["Begin.", {"role": "user", "content": "Begin."}, lambda self: "Begin.", later])
def test_openings(opening: object) -> None:
    group = play(multi_turn_env(class_of(lambda self, message: 1, opening=opening)), "a")
    messages = group.records[0].content["messages"]
    assert messages[-2:] == [{"role": "user", "content": "Begin."}, {"role": "assistant", "content": "a"}]
    assert len(messages) == (3 if opening is later else 2)


def test_members_of_a_group_draw_the_same_and_groups_differ() -> None:
    builder = multi_turn_env(Guess, highest=10**6).dataset_builder(TINY, groups_per_batch=3, group_size=4, num_test=5)
    training, test = asyncio.run(builder())
    assert test is not None and len(test.get_batch(0)) == 5

    def numbers(batch: int) -> list[tuple[int, float]]:
        drawn = []
        for group in training.get_batch(batch):
            assert isinstance(group, MessageGroupBuilder)
            envs = asyncio.run(pickle.loads(pickle.dumps(group)).make_envs())
            episodes = [env.message_env.episode for env in envs]
            assert len({id(episode) for episode in episodes}) == len({id(episode.rng) for episode in episodes}) == 4
            ((number, following),) = {(episode.number, episode.rng.random()) for episode in episodes}
            drawn.append((number, following))
        return drawn

    assert len({*numbers(0), *numbers(1)}) == 6 and numbers(0) == numbers(0)


class Unseeded:
    def __init__(self) -> None:
        self.opening = f"Guess {random.randint(1, 10**9)}."

    def step(self, message):
        return 1.0


class Hidden(Unseeded):
    opening = "Guess."  # type: ignore[assignment]

    def __init__(self) -> None:
        self.number = random.randint(1, 9)


class NumpyDrawn(Unseeded):
    def __init__(self) -> None:
        self.opening = f"Guess {np.random.default_rng().random()}."


@pytest.mark.parametrize("episode", [Unseeded, Hidden, NumpyDrawn])
def test_episodes_that_differ_within_a_group_are_refused(episode: type) -> None:
    with pytest.raises(ConfigurationError, match="draws from something else than `rng`"):
        multi_turn_env(episode).dataset_builder(TINY)


def test_a_message_env_does_as_well() -> None:
    class Once(MessageEnv):
        def __init__(self, rng: random.Random, reward: float):
            self.reward = reward

        async def initial_observation(self) -> list[Message]:
            return [{"role": "user", "content": "Begin."}]

        async def step(self, message) -> MessageStepResult:
            return MessageStepResult(self.reward, True, [])

    assert play(get_env(Once, {"reward": 0.25}), "a").get_total_rewards() == [0.25]


@pytest.mark.parametrize(
    ("episode", "message"),
    [
        (class_of(lambda self, message: 1, opening=3), "opening gave 3"),
        (class_of(lambda self, message: 1, opening=[]), r"opening gave \[\]"),
        (type("Closed", (), {"step": Guess.step}), "Closed has no `opening`"),
        (class_of(lambda self, message: 1, max_turns=0), "max_turns=0: must be positive"),
    ],
)
def test_what_is_no_episode_is_named(episode: type, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        multi_turn_env(episode).dataset_builder(TINY)


def test_limits_and_settings() -> None:
    endless = class_of(lambda self, message: ("More.", 0.5))
    assert len(play(multi_turn_env(endless, max_turns=2), *"abc").trajectories_G[0].transitions) == 2
    assert len(play(multi_turn_env(endless), *"abcdefghijkl").trajectories_G[0].transitions) == 10
    with pytest.raises(ConfigurationError, match="dataset_builder has no setting group_sise"):
        multi_turn_env(Guess).dataset_builder(TINY, group_sise=3)
