"""The recipes of several turns, from command line to files, in a few small steps: warm-up, episodes, one datum per episode."""

import asyncio
import io
import json
import math
import pickle
import random
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes import guess_number, math_rl, tool_use, twenty_questions
from recipes.rl_common import train_config
from recipes.warm_up import GENTLE_RATE, TINY_RATE, Player, demonstrate
from tests.debate.arena import make_renderer
from tinker_cookbook import cli_utils
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.rl.message_env import MessageEnv, MessageStepResult
from tinker_cookbook.utils.misc_utils import resolved

SMALL = ("max_steps=2", "groups_per_batch=3", "group_size=4", "num_test=2", "lora_rank=4", "on_zero_advantages=skip")
WITH_WARM_UP = {"guess_number": guess_number, "twenty_questions": twenty_questions, "tool_use": tool_use}


def run(recipe: ModuleType, log_path: Path, *argv: str) -> list[dict[str, Any]]:
    keys = {word.partition("=")[0]: word for word in (*SMALL, *argv)}
    run_recipe(recipe.CLIConfig, recipe.main, argv=[*keys.values(), f"log_path={log_path}"])
    return [json.loads(line) for line in (log_path / "metrics.jsonl").read_text().splitlines()]


def play(env: MessageEnv, *replies: str) -> list[MessageStepResult]:
    async def steps() -> list[MessageStepResult]:
        await env.initial_observation()
        return [await env.step({"role": "assistant", "content": reply}) for reply in replies]

    return asyncio.run(steps())


def shown(result: MessageStepResult) -> object:
    return result.next_messages[-1]["content"]


@pytest.mark.parametrize(
    "name", [name if name == "tool_use" else pytest.param(name, marks=pytest.mark.slow) for name in WITH_WARM_UP]
)
def test_from_command_line_to_files(name: str, tmp_path: Path) -> None:
    rows = run(WITH_WARM_UP[name], tmp_path / "run", "warm_up_steps=2")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[0]["env/all/turns_per_episode"] >= 1 and "test/env/all/reward/total" in rows[0]
    warm_up = [json.loads(line) for line in (tmp_path / "run" / "warm_up.jsonl").read_text().splitlines()]
    assert len(warm_up) == 32 and all(row["messages"][-1]["role"] == "assistant" for row in warm_up)
    resumed = run(WITH_WARM_UP[name], tmp_path / "run", "warm_up_steps=2", "behavior_if_log_dir_exists=resume")
    assert resumed == rows


@pytest.mark.parametrize(
    ("argv", "rate"),
    [((), GENTLE_RATE), (("learning_rate=0.01",), 0.01), (("load_checkpoint_path=tinker://x",), GENTLE_RATE)],
)
@pytest.mark.parametrize("recipe", [tool_use, twenty_questions])
def test_the_learning_rate_is_gentle_unless_given(
    recipe: ModuleType, argv: tuple[str, ...], rate: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []

    async def play_or_train(cli: Any, name: str, episodes: Any, *rest: Any) -> None:
        ran.append(train_config(cli, name, episodes, []).learning_rate)

    monkeypatch.setattr(recipe, "play_or_train", play_or_train)
    asyncio.run(recipe.main(cli_utils.parse(recipe.CLIConfig, [*argv, f"log_path={tmp_path / 'run'}"])))
    assert ran == [rate]


def test_the_learning_rate_does_not_reach_the_warm_up(tmp_path: Path) -> None:
    run(tool_use, tmp_path / "run", "warm_up_steps=1", "max_steps=1", "learning_rate=1e-9")
    rows = [json.loads(line) for line in (tmp_path / "run" / "warm_up" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["learning_rate"] == TINY_RATE


def test_an_episode_of_several_turns_is_one_datum(tmp_path: Path) -> None:
    run(guess_number, tmp_path / "run", "warm_up_steps=0", "max_tokens=24")
    records = [json.loads(path.read_text()) for path in sorted((tmp_path / "run").glob("training_step_*.json"))]
    datums = [datum["metadata"] for record in records for datum in record["training_data"]]
    assert datums and max(source["rounds_merged"] for source in datums) > 1
    for record in records:
        members = [(datum["metadata"]["group_idx"], datum["metadata"]["traj_idx"]) for datum in record["training_data"]]
        assert len(members) == len(set(members))


@pytest.mark.slow
def test_mathematics(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(f'{{"question": "What is {a} + 1?", "answer": "{a + 1}"}}\n' for a in range(4)))
    for arguments in ((), (f"dataset={file}", "test_dataset=test"), ("dataset=arithmetic", "env.grading=exact")):
        rows = run(math_rl, tmp_path / f"run{len(arguments)}{arguments[-1:]}", *arguments)
        assert rows[0]["env/all/parsed"] > 0.5 and "test/env/all/correct" in rows[-1]


@pytest.mark.parametrize(
    ("recipe", "argument", "message"),
    [
        (math_rl, "env.operators=+/", "operators='+/': must be one or more of + - *"),
        (math_rl, "env.largest=1", "gives fewer than"),
        (math_rl, "dataset=nowhere.jsonl", "no such file"),
        (math_rl, "test_dataset=test", "sums have their own held-out questions"),
        (math_rl, "env.grading=roughly", "grading"),
        (tool_use, "task=cooking", "task"),
        (tool_use, "renderer_name=role_colon", "has no tool format"),
        (tool_use, "warm_up_steps=-1", "warm_up_steps=-1: must be 0 (no warm-up) or more"),
        (guess_number, "env.highest=1", "highest: must be greater than 1"),
        (twenty_questions, "env.answerer_weights.base_model=tiny_chat", "is unused with answerer=script"),
        (twenty_questions, "env.num_things=9", "num_things=9: there are 8 things"),
        (twenty_questions, "env.max_turns=0", "max_turns: must be greater than 0"),
    ],
)
def test_mistakes_are_named(
    recipe: ModuleType, argument: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as raised:
        run(recipe, tmp_path / "run", argument)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", WITH_WARM_UP)
def test_a_person_can_play(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recipe = WITH_WARM_UP[name]
    monkeypatch.setattr(sys, "stdin", io.StringIO("no idea\n\n" * 5))
    run_recipe(recipe.CLIConfig, recipe.main, argv=["play=True", f"log_path={tmp_path / 'run'}"])
    assert "total reward" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


class TestGuessNumber:
    @staticmethod
    def env(number: int = 7, turns: int = 3, list_numbers: bool = True) -> guess_number.GuessNumberEnv:
        return guess_number.GuessNumberEnv(number, 10, turns, list_numbers)

    def test_hints_and_rewards(self) -> None:
        results = play(self.env(), "<SOLUTION>4</SOLUTION>", "<SOLUTION>9</SOLUTION>", "<SOLUTION>7</SOLUTION>")
        assert [shown(result) for result in results] == [
            "It is more than 4. One of 5 6 7 8 9 10?",
            "It is less than 9. One of 5 6 7 8?",
            "Yes!",
        ]
        assert [result.reward for result in results] == [0, 0, 1] and results[-1].episode_done

    def test_a_wasted_turn_costs_and_a_near_miss_is_worth_something(self) -> None:
        results = play(self.env(), "<SOLUTION>4</SOLUTION>", "<SOLUTION>3</SOLUTION>", "<SOLUTION>8</SOLUTION>")
        near = guess_number.NEAR * (1 - 1 / 9)
        assert [result.reward for result in results] == pytest.approx([0, -guess_number.WASTE, near])
        assert "5 6 7 8 9 10" in str(shown(results[1]))

    @pytest.mark.parametrize(
        "reply", ["7", "<SOLUTION>seven</SOLUTION>", "<SOLUTION>11</SOLUTION>", "<SOLUTION>٧</SOLUTION>"]
    )
    def test_what_is_no_guess_is_said(self, reply: str) -> None:
        (result,) = play(self.env(list_numbers=False), reply)
        assert result.reward == -guess_number.WASTE and result.metrics["valid_guess"] == 0
        assert shown(result) == "Give a number from 1 to 10. What is it?"


class TestTwentyQuestions:
    things = twenty_questions.Things.read()

    def env(
        self, name: str = "owl", turns: int = 4, among: Sequence[str] = (), list_objects: bool = True
    ) -> twenty_questions.TwentyQuestionsEnv:
        answerer = twenty_questions.ScriptedAnswerer(self.things)
        candidates = list(among or self.things.names)
        return twenty_questions.TwentyQuestionsEnv(name, candidates, self.things, answerer, turns, list_objects)

    def test_a_game(self) -> None:
        results = play(self.env(), "Is it an animal?", "Is it heavy?", "Is it white?", "Is it owl?")
        assert [shown(result) for result in results] == [
            "Yes. Open: heavy, white, cat, dog, owl, sheep.",
            "No. Open: white, cat, owl.",
            "Yes. Open: owl.",
            "You win!",
        ]
        assert [result.reward for result in results] == pytest.approx([1 / 3, 1 / 3, 1 / 3, twenty_questions.WIN])
        assert [result.episode_done for result in results] == [False, False, False, True]
        assert results[-1].metrics["won"] == 1

    def test_naming_a_wrong_thing_ends_the_game_for_nothing(self) -> None:
        (result,) = play(self.env(), "Is it cat?")
        assert result.episode_done and result.reward == 0
        assert result.metrics["won"] == result.metrics["useful"] == 0

    def test_the_last_question_ends_the_game(self) -> None:
        results = play(self.env(turns=2), "Is it white?", "Is it heavy?")
        assert [result.episode_done for result in results] == [False, True] and results[-1].metrics["won"] == 0

    def test_the_first_message_names_what_may_be_asked(self) -> None:
        env = self.env("cat", among=("sheep", "cat"), list_objects=False)
        first = asyncio.run(env.initial_observation())
        assert first[0]["content"] == "Find my thing. Ask: Is it ...? Open: heavy, white, sheep, cat."
        assert shown(play(env, "Is it heavy?")[0]) == "No."

    def test_three_attributes_tell_all_things_apart(self) -> None:
        assert len(self.things.known) == 3
        assert len(set(self.things.attributes.values())) == len(self.things.names) == 8

    @pytest.mark.parametrize(
        "reply", ["owl", "Is it an owl, perhaps", "Is it big?", "Is it ?", "Is it heavy? Is it white?"]
    )
    def test_a_question_that_is_none_costs(self, reply: str) -> None:
        (result,) = play(self.env(), reply)
        assert result.reward == -twenty_questions.WASTE and result.metrics["well_formed"] == 0

    def test_what_is_known_already_costs_too(self) -> None:
        rewards = [result.reward for result in play(self.env(), "Is it heavy?", "Is it heavy?")]
        assert rewards == pytest.approx([1 / 3, -twenty_questions.WASTE])

    @pytest.mark.parametrize("name", ["cat", "dog", "sheep"])
    def test_a_question_is_worth_what_it_may_be_expected_to_tell(self, name: str) -> None:
        (result,) = play(self.env(name, among=("cat", "dog", "sheep")), "Is it white?")
        assert result.reward == pytest.approx((math.log(3) - 2 / 3 * math.log(2)) / math.log(3))

    def test_an_answer_that_contradicts_the_script_narrows_nothing(self) -> None:
        env = self.env(among=("cat", "apple"))
        env.answerer = self.agree
        results = play(env, "Is it white?", "Is it an animal?", "Is it green?")
        assert [shown(result) for result in results[:2]] == ["Yes. Open: an animal, cat, apple.", "Yes. Open: cat."]
        # The model may know what the script does not: no reward, no cost.
        assert results[2].reward == 0 and results[2].metrics["well_formed"] == 1

    @staticmethod
    async def agree(name: str, question: str) -> bool:
        return True

    @given(st.integers(0, 10_000), st.integers(2, 8))
    def test_information_adds_up_to_the_whole(self, seed: int, number: int) -> None:
        rng = random.Random(seed)
        among = rng.sample(self.things.names, number)
        env = self.env(rng.choice(among), among=among)
        total = [max(0.0, r.reward) for r in play(env, *(f"Is it {what}?" for what in self.things.known))]
        assert env.possible == [env.name] and 0 < sum(total) <= 1 + math.log(4) / math.log(number)

    def test_the_careless_player_speaks_of_what_it_sees(self) -> None:
        said = set()
        for seed in range(60):
            messages: list[Any] = [{"role": "user", "content": "Open: white, cat, owl."}]
            said.add(str(twenty_questions.careless_question(self.things, random.Random(seed), messages)["content"]))
        assert said == {"Is it white?", "Is it heavy?", "Is it an animal?", "Is it owl?"}

    @pytest.mark.parametrize(("reply", "answer"), [("Yes, it is.", True), ("no", False), ("Perhaps.", None)])
    def test_a_model_may_answer(self, reply: str, answer: bool | None) -> None:
        class Model(twenty_questions.MessageCompleter):
            async def __call__(self, messages: list[Any]) -> Any:
                assert messages[0]["content"].endswith("the thing is: owl. Is it heavy? Answer yes or no.")
                return {"role": "assistant", "content": reply}

        assert asyncio.run(twenty_questions.LMAnswerer(Model())("owl", "heavy")) is answer

    @pytest.mark.slow
    def test_the_shipped_model_answers_as_a_model(self, tmp_path: Path) -> None:
        rows = run(twenty_questions, tmp_path / "run", "env.answerer=lm", "warm_up_steps=1", "max_steps=1")
        assert rows[0]["env/all/turns_per_episode"] >= 1


class TestToolUse:
    def test_questions_of_articles_have_their_answer_in_what_the_search_finds(self) -> None:
        questions = tool_use.article_questions()
        tool = tool_use.registry("search")
        assert len(questions) > 20
        found = 0
        for question in questions:
            assert question.answer not in question.text.rpartition(". ")[2]
            call = tool_use.ToolCall.FunctionBody(name="search", arguments=json.dumps(question.arguments))
            result = asyncio.run(tool.call(tool_use.ToolCall(function=call)))
            assert result.error is None
            found += question.answer in str(result.messages[0]["content"])
        assert found >= 0.9 * len(questions)

    @staticmethod
    async def play_and_grade(env: tool_use.AgentToolMessageEnv, player: Player) -> tuple[float, int]:
        messages = await demonstrate(env, player)
        return (await resolved(env.reward_fn(messages)))[0], len(messages)

    @pytest.mark.parametrize("task", ["calculator", "search"])
    def test_a_player_that_calls_is_right_and_one_that_gives_up_is_not(self, task: tool_use.ToolTask) -> None:
        renderer = make_renderer("qwen3_instruct")
        rewards: dict[int, set[float]] = {}
        for seed in range(120):
            rng = random.Random(seed)
            question = tool_use.draw_question(task, 99, rng)
            env = tool_use.make_tool_env(task, question, True, renderer)
            player = partial(tool_use.half_hearted, task, question, rng)
            reward, length = asyncio.run(self.play_and_grade(env, player))
            rewards.setdefault(length, set()).add(reward)
        assert rewards == {3: {0.0}, 5: {1.0}}

    @pytest.mark.slow
    def test_search_from_command_line_to_files(self, tmp_path: Path) -> None:
        pytest.importorskip("bm25s")
        rows = run(tool_use, tmp_path / "run", "task=search", "warm_up_steps=1", "max_steps=1", "max_tokens=32")
        assert [row["step"] for row in rows] == [0, 1] and "test/env/all/reward/total" in rows[0]
        assert '"query' in (tmp_path / "run" / "warm_up.jsonl").read_text().replace('\\"', '"')

    def test_without_its_package_search_says_what_to_install(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        monkeypatch.setitem(sys.modules, "bm25s", None)
        tool_use.registry.cache_clear()
        with pytest.raises(SystemExit):
            run(tool_use, tmp_path / "run", "task=search")
        tool_use.registry.cache_clear()
        assert "bm25s" in capsys.readouterr().err and not (tmp_path / "run").exists()

    def test_a_wrong_answer_is_worth_nothing_however_faithful(self) -> None:
        conversation: list[Any] = [{"role": "tool", "content": "7"}, {"role": "assistant", "content": ""}]
        outcomes = {}
        for text in ("<SOLUTION>7</SOLUTION>", "<SOLUTION>8</SOLUTION>", "8"):
            conversation[-1]["content"] = text
            reward, metrics = asyncio.run(tool_use.AnswerGrader("8")(conversation))
            outcomes[text] = (reward, metrics["faithful"])
        assert list(outcomes.values()) == [(0.0, 1.0), (1.0, 0.0), (-tool_use.FORMAT_PENALTY, 0.0)]

    def test_environments_pickle(self) -> None:
        question = tool_use.Question("What is 1 + 1?", "2", {"expression": "1 + 1"})
        thunk = partial(tool_use.make_tool_env, "calculator", question, False, make_renderer("qwen3_instruct"))
        assert isinstance(pickle.loads(pickle.dumps(thunk))(), tool_use.AgentToolMessageEnv)
