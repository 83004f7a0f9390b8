"""An inner environment with a further question: what the policy is shown, what the inner one is given, what the shadow learns."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.debate.arena import RENDERERS, TINY, decode, encode, make_renderer, reply_ids
from tests.env.listeners import FOREIGN
from tests.env.test_gradient_intuition import Run, exact
from tests.fakes import ScriptedCompleter, said
from tinker_cookbook.env import get_env, single_turn_env, tool_env
from tinker_cookbook.env.shipped.model_aware.extra_question import add_text, ids_from
from tinker_cookbook.env.shipped.model_aware.gradient_intuition import IntuitionGroupBuilder
from tinker_cookbook.env.shipped.model_aware.intuition_env import Intuition, meta_task, read_reply
from tinker_cookbook.exceptions import CheckpointError, ConfigurationError
from tinker_cookbook.renderers import get_text_content
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import EpisodeEnv, TrajectoryGroup
from tinker_local_backend import ServiceClient

RENDERER = make_renderer("qwen3_instruct")
QUESTION = "\n\nAnd why?"


@pytest.mark.parametrize("name", RENDERERS)
@given(
    content=st.text(min_size=1, max_size=30) | FOREIGN.filter(bool) | st.sampled_from(["2 + 2?", "End.\n", "x.\n\n"])
)
def test_a_question_stands_at_the_end_of_the_last_message(name: str, content: str) -> None:
    renderer = make_renderer(name)
    asked = renderer.build_generation_prompt([{"role": "user", "content": content}]).to_ints()
    whole = renderer.build_generation_prompt([{"role": "user", "content": content + QUESTION}]).to_ints()
    added = add_text(renderer, asked, QUESTION)
    assert decode(renderer, added) == decode(renderer, whole)
    same = next(i for i in range(len(asked) + 1) if added[: i + 1] != asked[: i + 1])
    assert added[same - len(asked) :] == asked[same:] or same == len(asked)


@pytest.mark.parametrize("name", RENDERERS)
def test_a_prompt_that_does_not_end_in_a_message_is_refused(name: str) -> None:
    renderer = make_renderer(name)
    asked = renderer.build_generation_prompt([{"role": "user", "content": "2 + 2?"}]).to_ints()
    for prompt in ([], asked[:-2], [*asked, *encode(renderer, "Four")]):
        with pytest.raises(ConfigurationError, match="ends in a message"):
            add_text(renderer, prompt, QUESTION)


@given(text=st.text(max_size=40) | FOREIGN, data=st.data())
def test_the_ids_of_the_rest_of_a_text(text: str, data: st.DataObject) -> None:
    ids = encode(RENDERER, text)
    assume(decode(RENDERER, ids) == text)
    start = data.draw(st.integers(0, len(text)))
    rest = ids_from(RENDERER, ids, start)
    assert decode(RENDERER, rest) == text[start:]
    if start == 0:
        assert rest == ids
    kept = next((i for i in range(len(ids) + 1) if len(decode(RENDERER, ids[:i])) >= start), 0)
    assert rest[len(rest) - len(ids) + kept + 4 :] == ids[kept + 4 :]  # a character has at most four bytes, and so ids


CALL = "<tool_call>\n" + json.dumps({"name": "add", "arguments": {"a": 2, "b": 2}}) + "\n</tool_call>"


@pytest.mark.parametrize(
    ("name", "reply", "told", "answer"),
    [
        ("qwen3_instruct", "PREDICTION: -1.5\nANSWER: Four, I think", -1.5, "Four, I think"),
        ("role_colon", "PREDICTION: -1.5\nANSWER: Four, I think", -1.5, "Four, I think"),
        ("qwen3_instruct", "ANSWER:4", None, "4"),
        ("qwen3_instruct", "PREDICTION: 1\nANSWER: PREDICTION: 1\nANSWER: 4", 1.0, "PREDICTION: 1\nANSWER: 4"),
        ("qwen3_instruct", f"PREDICTION: 1\nANSWER: {CALL}", 1.0, CALL),
        ("qwen3", "<think>\nPREDICTION: 9\nANSWER: 9\n</think>\n\nPREDICTION: -1\nANSWER: 4", -1.0, "4"),
        ("qwen3_instruct", "PREDICTION: 2\nANSWER: 四", 2.0, "四"),
        ("qwen3_instruct", "Four", None, ""),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stopped", [True, False])
def test_the_answer_keeps_its_ids_and_its_end(
    name: str, reply: str, told: float | None, answer: str, stopped: bool
) -> None:
    renderer = make_renderer(name)
    found, ids = read_reply(renderer, reply_ids(renderer, reply, stopped))
    assert found.predicted == told and ids == reply_ids(renderer, answer, stopped)


def test_ids_that_no_text_encodes_to_are_trained_as_they_were_sampled() -> None:
    letters = [token for letter in "Four" for token in encode(RENDERER, letter)]
    assert letters != encode(RENDERER, "Four")
    found, ids = read_reply(RENDERER, [*encode(RENDERER, "ANSWER:"), *encode(RENDERER, " "), *letters])
    assert found == Intuition(None, "Four") and ids == letters


class Guess:
    """Two numbers are asked for, one after the other."""

    max_turns = 3

    def __init__(self, rng: Any):
        self.opening, self.left = "Name a number.", ["3", "5"]

    def step(self, message: Any) -> Any:
        wanted = self.left.pop(0)
        reward = 0.5 * (get_text_content(message) == wanted)
        return reward if not self.left else ("Name another one.", reward)


@pytest.fixture
def run(tmp_path: Path) -> Any:
    with ServiceClient(home=tmp_path) as service:
        yield Run(service)


def builder_of(inner: Any, members: int, run: Run, **args: Any) -> IntuitionGroupBuilder:
    env = get_env("gradient_intuition", {"inner": inner, "learning_rate": 1e-3, **args})
    training, _ = asyncio.run(env.dataset_builder(TINY, groups_per_batch=1, group_size=members)())
    builder = training.get_batch(0)[0].with_clients(run.clients)
    assert isinstance(builder, IntuitionGroupBuilder)
    return builder


def play(builder: IntuitionGroupBuilder, *replies_T: list[str]) -> tuple[TrajectoryGroup, dict[int, list[list[int]]]]:
    """The group, and the prompts of each member."""
    object.__setattr__(builder, "with_clients", lambda clients: builder)  # there is no loop that would give it clients
    turns = {i: [said(reply_ids(RENDERER, reply)) for reply in replies] for i, replies in enumerate(replies_T)}
    policy = ScriptedCompleter(turns)
    return asyncio.run(do_group_rollout(builder, policy)), policy.heard


def test_an_episode_of_several_turns(run: Run) -> None:
    builder = builder_of(Guess, 3, run)
    group, heard = play(
        builder,
        ["PREDICTION: 0\nANSWER: 3", "PREDICTION: -0.25\nANSWER: 5"],
        ["PREDICTION: 0\nANSWER: 3", "ANSWER: 4"],
        ["3", "5"],
    )
    first, second = heard[0]
    question, spoken = encode(RENDERER, meta_task(builder.probe)), reply_ids(RENDERER, "PREDICTION: 0\nANSWER: 3")
    assert second[: len(first) + len(spoken)] == first + spoken  # the prompts extend each other, token for token
    for prompt in (first, second):
        assert sum(prompt[i : i + len(question)] == question for i in range(len(prompt))) == 1 + (prompt is second)
    assert "Name another one." in decode(RENDERER, second)
    (datum,) = trajectory_to_data(group.trajectories_G[0], 1.0)
    assert datum.model_input.to_ints()[: len(second)] == second
    metrics = group.metrics_G
    assert [own["inner"] for own in metrics] == [1.0, 0.5, 0.0]
    close = [max(0.0, 1 - abs(own["told"] - own["true"])) for own in metrics[1:2]]
    assert group.get_total_rewards()[1] == pytest.approx(
        0.5 + 0.3 * close[0] / 2
    )  # one of its two replies told nothing
    assert group.get_total_rewards()[0] == pytest.approx(1 + 0.3 * metrics[0]["closeness"])
    assert "true" not in metrics[2] and group.get_total_rewards()[2] == 0.0
    assert metrics[0]["told"] == -0.125 and metrics[1]["told"] == 0.0


def test_the_shadow_trains_on_the_answers_after_the_prompts_of_the_inner_environment(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[Any] = []

    async def changes(self: Any, snapshot: Any, steps: Any, probe: Any, learning_rate: float) -> list[float]:
        trained.extend(steps)
        return [0.5] * len(steps)

    monkeypatch.setattr("tinker_cookbook.env.shipped.model_aware.shadow.Shadow.changes", changes)
    replies = ["PREDICTION: 0\nANSWER: 3", "PREDICTION: -1\nANSWER: 5"]
    play(builder_of(Guess, 2, run), replies, replies)
    assert len(trained) == 2  # members that answered alike share the steps
    for datum, answer in zip(trained, ("3", "5"), strict=True):
        weights = datum.loss_fn_inputs["weights"].to_numpy()
        targets = datum.loss_fn_inputs["target_tokens"].to_numpy()
        assert targets[weights > 0].tolist() == reply_ids(RENDERER, answer)
        assert "PREDICTION" not in decode(RENDERER, datum.model_input.to_ints())
    assert "Name another one." in decode(RENDERER, trained[1].model_input.to_ints())


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def test_an_environment_with_tools(run: Run) -> None:
    rows = [{"question": "What is 2 + 2?", "answer": "4"}]
    builder = builder_of(tool_env(rows, exact, tools=[add]), 2, run)
    group, heard = play(
        builder, [f"PREDICTION: 1\nANSWER: {CALL}", "PREDICTION: 0\nANSWER: 4"], ["PREDICTION: 0\nANSWER: 4"]
    )
    assert [len(trajectory.transitions) for trajectory in group.trajectories_G] == [2, 1]
    assert [own["inner"] for own in group.metrics_G] == [1.0, 1.0]
    assert "<tool_response>\n4\n</tool_response>" in decode(RENDERER, heard[0][1])


def test_a_game_of_several_roles(run: Run) -> None:
    builder = builder_of("shared_sum", 2, run, inner_args={"highest": 4})
    assert builder.coordinated
    envs = asyncio.run(builder.make_envs())
    group, _ = play(builder, *[["PREDICTION: 0\nANSWER: 2"] * 3 for _ in envs])
    assert len(group.trajectories_G) == len(envs) and len(set(group.get_roles())) == 2
    for own, total in zip(group.metrics_G, group.get_total_rewards(), strict=True):
        assert total == pytest.approx(own.get("inner", 0.0) + 0.3 * own.get("closeness", 0.0))


def test_a_prompt_that_grows_too_long_ends_the_episode(run: Run) -> None:
    replies = ["ANSWER: 3", "ANSWER: 5"]
    _, heard = play(builder_of(Guess, 1, run), replies)
    first, second = map(len, heard[0])
    object.__setattr__(builder := builder_of(Guess, 1, run), "max_prompt_tokens", second - 1)
    group, _ = play(builder, replies)
    assert (len(group.trajectories_G[0].transitions), group.trajectories_G[0].stop_reason) == (1, "context_overflow")
    object.__setattr__(builder := builder_of(Guess, 1, run), "max_prompt_tokens", first - 1)
    group, _ = play(builder, replies)
    assert group.trajectories_G[0].num_action_tokens == 0 and group.get_total_rewards() == [0.0]


class Whole(EpisodeEnv):
    async def play(self, policy: Any) -> Any:
        raise NotImplementedError


def test_what_asks_the_policy_itself_is_refused(run: Run) -> None:
    builder = builder_of(single_turn_env([{"question": "2 + 2?", "answer": "4"}], exact), 1, run)

    async def make_envs() -> Any:
        return [Whole()]

    object.__setattr__(builder.inner, "make_envs", make_envs)
    with pytest.raises(ConfigurationError, match="Whole asks the policy itself"):
        asyncio.run(builder.make_envs())


def test_a_state_that_is_there_already_is_refused_by_name(run: Run) -> None:
    run.main.save_state("shadow-000000").result()
    with pytest.raises(CheckpointError, match=r"cannot save the state 'shadow-000000'.*exists.*delete a state"):
        play(builder_of(Guess, 1, run), ["PREDICTION: 0\nANSWER: 3", "ANSWER: 5"])
