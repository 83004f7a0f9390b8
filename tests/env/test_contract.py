"""What `load_environment` may return: the three forms, what their code is given, and the sentence that refuses another."""

import asyncio
import copy
import random
import threading
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.debate.arena import TINY, make_renderer, reply_ids
from tests.fakes import FakeServiceClient, SampleCall, ScriptedCompleter, said
from tests.rl import loop
from tinker_cookbook import env
from tinker_cookbook.completers import TinkerTokenCompleter
from tinker_cookbook.env import Environment, Rubric, get_env
from tinker_cookbook.env.contract_dataset import LoadedEnvironment
from tinker_cookbook.env.dataset import DatasetBuilder
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError, TinkerCookbookError
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import EnvGroupBuilder, TrajectoryGroup

RENDERER = make_renderer("qwen3_instruct")
ROWS = [{"question": f"What is {n} + 1?", "answer": str(n + 1), "info": {"level": n}} for n in range(5)]


def exact(completion: str, answer):
    return float(completion == answer)


async def brief(completion: str, state, info):
    state["length"] = len(completion)
    return len(completion) / 10, {"level": info["level"]}


def ranked(completions: list[str], answers):
    return [float(len(text) == min(map(len, completions))) for text in completions]


def questions(**changes: Any) -> SimpleNamespace:
    rubric = Rubric([exact, brief], [1.0, -0.5])
    return SimpleNamespace(**{"dataset": ROWS, "rubric": rubric, **changes})


class Episode:
    """Two turns; asks its sampler what it is."""

    def __init__(self, word: str = "moss", needs: tuple[str, ...] = ()):
        self.word, self.needs, self.turns = word, needs, 0

    def initial_observation(self) -> str:
        return f"Say {self.word}."

    async def step(self, text: str, info: Any = None):
        self.turns += 1
        if self.turns == 1:
            return {"reward": 0.25, "next_observation": "Again.", "metrics": {"turn": 1}}
        return SimpleNamespace(reward=float(text == self.word), done=True, metrics={"weights": weights_of(info)})


def weights_of(info: dict[str, Any]) -> int:
    sampler = info["sampling_client"]
    return -1 if sampler is None else sampler.weights


class Builder:
    def __init__(self, words: tuple[str, ...] = ("moss", "fern", "reed"), **parts: Any):
        self.words = words
        vars(self).update(parts)

    async def build(self, sampling_client, service_client=None, base_model=None, training_client=None):
        assert service_client is not None and training_client is not None and base_model == TINY
        return [Episode(f"{word}{sampling_client.weights}") for word in self.words]


def first_group(env: Environment, **settings: Any) -> EnvGroupBuilder:
    training, _ = asyncio.run(env.dataset_builder(TINY, **settings)())
    return training.get_batch(0)[0]


def play(env: Environment, *members: list[str]) -> TrajectoryGroup:
    turns = {i: [said(reply_ids(RENDERER, text)) for text in texts] for i, texts in enumerate(members)}
    builder = first_group(env, group_size=len(members))
    return asyncio.run(do_group_rollout(builder, ScriptedCompleter(turns)))


def prompt_of(group: TrajectoryGroup) -> str:
    text = RENDERER.tokenizer.decode(group.trajectories_G[0].transitions[0].ob.to_ints())
    assert isinstance(text, str)
    return text


def test_a_rubric_is_a_weighted_sum_of_functions_called_by_name() -> None:
    env = get_env(lambda: questions(system_prompt="Be brief.", dataset=ROWS[2:3]))
    group = play(env, ["3"], ["four"])
    assert "Be brief." in prompt_of(group) and "What is 2 + 1?" in prompt_of(group)
    assert group.get_total_rewards() == [1.0 - 0.05, -0.2]
    metrics = group.trajectories_G[0].transitions[0].metrics
    assert metrics["reward/exact"] == 1.0 and metrics["reward/brief"] == 0.1 and metrics["reward/brief/level"] == 2.0


def test_a_group_of_one_of_several_datasets_stays_one_when_it_is_given_clients() -> None:
    builder = first_group(get_env(questions()), group_size=1).of_dataset(1)
    policy = ScriptedCompleter({0: [said(reply_ids(RENDERER, "moss"))]})
    group = asyncio.run(do_group_rollout(builder, policy))
    assert group.dataset_index == 1 and "dataset_1" in group.tags


def test_a_function_of_the_group_sees_all_of_its_replies_at_once() -> None:
    env = get_env(lambda: questions(rubric={"funcs": [exact, ranked], "weights": [1, 2]}, dataset=ROWS[:1]))
    group = play(env, ["1"], ["one"], ["2"])
    assert group.get_total_rewards() == [3.0, 0.0, 2.0]
    assert [metrics["reward/ranked"] for metrics in group.metrics_G] == [1.0, 0.0, 1.0]


def test_rows_may_be_messages_and_prompts_of_the_same_row_are_shared() -> None:
    row = {"prompt": [{"role": "system", "content": "Sing."}, {"role": "user", "content": "La?"}], "answer": "la"}
    group = play(get_env(lambda: questions(dataset=[row], rubric=Rubric([exact]))), ["la"], ["lo"])
    assert "Sing." in prompt_of(group) and group.get_total_rewards() == [1.0, 0.0]
    first, second = (trajectory.transitions[0].ob for trajectory in group.trajectories_G)
    assert first is second


def test_an_episode_goes_on_while_it_shows_something_new() -> None:
    group = play(get_env(Episode, {"word": "fern"}), ["no", "fern"], ["no", "moss"])
    assert group.get_total_rewards() == [1.25, 0.25]
    assert [len(trajectory.transitions) for trajectory in group.trajectories_G] == [2, 2]
    assert group.trajectories_G[0].transitions[0].metrics["turn"] == 1.0
    assert "Again." in str(RENDERER.tokenizer.decode(group.trajectories_G[0].transitions[1].ob.to_ints()))


def test_members_play_copies_of_what_was_loaded_once() -> None:
    made = Episode()
    env = get_env(made)
    for _ in range(2):
        assert play(env, ["a", "moss"], ["a", "moss"]).get_total_rewards() == [1.25, 1.25]
    assert made.turns == 0


def test_rng_is_the_same_within_a_group_and_another_for_each_group() -> None:
    def load_environment(rng: random.Random, words: int = 1000):
        return Episode(str(rng.randrange(words)))

    training, test = asyncio.run(get_env(load_environment).dataset_builder(TINY, group_size=3, num_test=6)())
    assert test is not None

    def shown(builder: EnvGroupBuilder, size: int) -> str:
        turns = {i: [said(reply_ids(RENDERER, "a"))] * 2 for i in range(size)}
        return prompt_of(asyncio.run(do_group_rollout(builder, ScriptedCompleter(turns))))

    seen = [shown(builder, 3) for index in range(2) for builder in training.get_batch(index)]
    assert len(set(seen)) > 10 and seen == [shown(b, 3) for index in range(2) for b in training.get_batch(index)]
    assert not {shown(builder, 1) for builder in test.get_batch(0)} <= set(seen)


class Asked:
    """What the functions of a run were given."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self.made: list[str] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> "Asked":
        return self

    async def reward(self, completion, info):
        async def make() -> int:
            self.made.append("shadow")
            return len(self.made)

        assert await info["run"].once("shadow", make) == 1
        self.seen.append((info["sampling_client"].weights, info["training_client"], info["service_client"]))
        return float(len(self.seen) % 3)


def answer(call: SampleCall) -> list[int]:
    """The word that was asked for, or another, as the seed says."""
    word = str(RENDERER.tokenizer.decode(call.prompt)).partition("Say ")[2].partition(".")[0]
    return reply_ids(RENDERER, word if (call.params.seed or 0) % 2 else "sand")


def train_on(env: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> FakeServiceClient:
    service = FakeServiceClient(answer)
    monkeypatch.setattr("tinker_cookbook.backends.create_service_client", lambda *_, **__: service)
    settings: dict[str, Any] = {"group_size": 3, "groups_per_batch": 2, "num_batches": 3, "num_test": 2}
    builder = get_env(env).dataset_builder(TINY, **settings)
    loop.run(loop.make_config(tmp_path, builder, **changes))
    return service


def test_rewards_ask_the_weights_that_gave_the_reply(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked()
    env = questions(rubric=Rubric([asked.reward]), eval_dataset=ROWS[:2], needs=("training_client",))
    service = train_on(lambda: env, tmp_path, monkeypatch, eval_every=1)
    # Two questions are evaluated before each step and after the last, and six replies sampled in each step.
    assert [weights for weights, *_ in asked.seen] == [*[0] * 8, *[1] * 8, *[2] * 8, *[3] * 2]
    assert {id(client) for _, client, _ in asked.seen} == {id(service.trainers[0])}
    assert all(client is service for *_, client in asked.seen)
    assert asked.made == ["shadow"]


def test_build_is_given_the_current_sampler_and_what_else_it_takes(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = train_on(Builder, tmp_path, monkeypatch)
    asked = [
        (str(RENDERER.tokenizer.decode(call.prompt)).partition("Say ")[2].partition(".")[0], call.weights)
        for call in service.sampled
    ]
    assert {weights for _, weights in asked} == {0, 1, 2}
    assert all(word.endswith(str(weights)) for word, weights in asked)
    # Six groups of three members with two turns go through three words twice.
    assert Counter(word.rstrip("012") for word, _ in asked) == {"moss": 12, "fern": 12, "reed": 12}


@pytest.mark.parametrize("needs", ["training_client", ("service_client",)])
def test_what_an_environment_needs_is_asked_for_before_it_plays(needs: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"needs the (training|service)_client of a training run"):
        play(get_env(Episode("a", needs)), ["a", "b"])


def test_a_builder_needs_a_sampler_whatever_it_says() -> None:
    with pytest.raises(ConfigurationError, match="needs the sampling_client"):
        play(get_env(Builder), ["a", "b"])


def test_a_sampler_alone_serves_an_environment_that_asks_for_no_more() -> None:
    policy = TinkerTokenCompleter(FakeServiceClient(answer).new_sampler(7), 4)
    group = asyncio.run(do_group_rollout(first_group(get_env(Episode), group_size=2), policy))
    assert [t.transitions[-1].metrics["weights"] for t in group.trajectories_G] == [7.0, 7.0]


def of_class(**parts: Any) -> Any:
    return type("Thing", (), parts)()


def takes_two(self, first, second): ...


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (
            of_class(dataset=ROWS),
            "for questions it has dataset and lacks rubric; for a builder of environments it lacks build",
        ),
        (
            of_class(step=len),
            "for an episode it has step and lacks initial_observation; for questions it lacks dataset and",
        ),
        (questions(dataset=[]), "dataset has no rows"),
        (questions(dataset=[{"text": "a"}]), r"dataset\[0\]: has text; it needs `prompt`"),
        (questions(dataset=[3]), r"dataset\[0\] is int; a row is a mapping"),
        (questions(dataset=[{"prompt": [{"role": "user"}]}]), "it needs `prompt`"),
        (questions(dataset=[{"prompt": "a", "info": 3}]), r"dataset\[0\].info is int"),
        (questions(dataset=[{"prompt": "a", "info": {"tokenizer": 3}}]), "the name is reserved for a client"),
        (questions(rubric=Rubric([])), "rubric, a Rubric, has no funcs"),
        (questions(rubric=[float]), r"rubric, a list, has no funcs: .* Rubric\(\[function\]\)"),
        (questions(rubric=Rubric([exact], [1, 2])), "1 funcs need as many weights, got 2"),
        (questions(rubric=Rubric([exact], [float("nan")])), "the weight of exact must be a finite number"),
        (questions(rubric=Rubric([exact, exact])), "two funcs called exact"),
        (
            questions(rubric=Rubric([lambda reply: 1.0])),
            "takes reply, which is not available; parameters are called prompt, comp",
        ),
        (questions(rubric=Rubric([lambda completion, answers: 1.0])), "either one reply's fields or those of a group"),
        (questions(rubric=Rubric(["exact"])), "'exact' in funcs is not a function"),  # type: ignore[list-item]
        (questions(needs=("trainer",)), "needs: 'trainer' is none of sampling_client"),
        (of_class(build=lambda self: []), "build takes nothing; its first argument is the sampling client"),
        (of_class(build=takes_two), "build takes second, which is not available"),
        (
            of_class(initial_observation=lambda self: "Go.", step=lambda self: 1.0),
            r"step takes \(\), but will be called with \(action_text\)",
        ),
        (
            of_class(initial_observation=lambda self, seed: "Go.", step=len),
            r"initial_observation takes \(seed\), but will",
        ),
        (of_class(initial_observation=lambda self: 3, step=len), "initial_observation gave 3; it gives a text"),
        (
            of_class(initial_observation=lambda self: str(random.random()), step=len),
            "gives something else at each call",
        ),
    ],
)
def test_a_wrong_object_is_refused_with_what_it_lacks(found: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        get_env(lambda: found)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda self, text: None, "step gave None; it gives an object or mapping with a reward"),
        (lambda self, text: {"done": True}, "it gives an object or mapping with a reward"),
        (lambda self, text: {"reward": "high"}, "reward is 'high'; it must be a finite number"),
        (lambda self, text: {"reward": float("inf")}, "reward is inf; it must be a finite number"),
        (lambda self, text: {"reward": 1, "metrics": {"a": None}}, "metrics.'a'. is None"),
        (lambda self, text: {"reward": 1, "done": False}, "is not done, and its next observation is None"),
    ],
)
def test_a_wrong_step_is_named(step: Callable[..., Any], message: str) -> None:
    with pytest.raises(DataValidationError, match=message):
        play(get_env(of_class(initial_observation=lambda self: "Go.", step=step)), ["a"])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda completion: "good", "is 'good'; it must be a finite number"),
        (lambda completion: None, "is None; it must be a finite number"),
        (lambda completions: 1.0, "a function of a group gives a list of one number for each of its 2 members"),
        (lambda completions: [1.0], "for each of its 2 members"),
    ],
)
def test_a_reward_is_never_made_up(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(DataValidationError, match=message):
        play(get_env(lambda: questions(rubric=Rubric([function]))), ["a"], ["b"])


def test_members_that_begin_differently_are_refused() -> None:
    class Hidden(Episode):
        def __deepcopy__(self, memo: dict[int, Any]) -> "Hidden":
            return Hidden(str(random.SystemRandom().random()))

        async def initial_observation(self) -> str:  # type: ignore[override]
            return self.word

    with pytest.raises(ConfigurationError, match="members of a group were shown different first observations"):
        play(get_env(Hidden()), ["a", "b"], ["a", "b"])


def test_an_object_that_cannot_be_copied_says_what_to_do() -> None:
    made = Episode()
    made.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(TypeError):
        copy.deepcopy(made)
    with pytest.raises(
        TinkerCookbookError, match=r"Episode cannot be copied for the members of a group .*define __deepcopy__"
    ):
        play(get_env(made), ["a", "b"])


def test_load_takes_arguments_as_keywords() -> None:
    builder = env.load("tests.env.test_contract:Episode", word="reed").dataset_builder(TINY)
    assert isinstance(builder, DatasetBuilder) and isinstance(builder.env, LoadedEnvironment)
    assert builder.env.loaded.word == "reed"
    with pytest.raises(ConfigurationError, match=r"words: Episode.*unexpected keyword argument 'words'"):
        env.load("tests.env.test_contract:Episode", words=3)
