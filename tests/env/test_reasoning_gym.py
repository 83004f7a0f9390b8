"""The generators of reasoning-gym themselves: `make test-reasoning`."""

import asyncio
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recipes import rl
from tests.child import ROOT
from tests.debate.arena import TINY, make_renderer
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.env import get_env, load
from tinker_cookbook.env.dataset import DatasetSettings, Environment
from tinker_cookbook.env.reasoning import package
from tinker_cookbook.env.reasoning.environment import ReasoningEnv, ReasoningGym
from tinker_cookbook.env.reasoning.questions import Entry, Mixture, is_held_out
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.renderers import ParseTermination
from tinker_cookbook.rl.problem_env import OneTurnGroupBuilder, Reply
from tinker_cookbook.utils.reward_threads import in_reward_threads

pytestmark = pytest.mark.reasoning
pytest.importorskip("reasoning_gym", reason="needs the extra `reasoning` (make test-reasoning)")

THREE = "leg_counting,basic_arithmetic:2,spell_backward"
RUN_ANSWERS = {
    "binary_matrix",
    "countdown",
    "intermediate_integration",
    "n_queens",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
    "spiral_matrix",
    "string_insertion",
}


def gym(env: str, **args: Any) -> ReasoningGym:
    made = get_env(f"reasoning_gym:{env}", args)
    assert isinstance(made, ReasoningGym)
    return made


def questions(mixture: Mixture, count: int, is_test: bool = False) -> list[str]:
    return [mixture.entry(item, is_test).content["question"] for item in range(count)]


class TestQuestions:
    def test_training_and_held_out_questions_never_coincide(self) -> None:
        for name in THREE.split(","):
            for seed in (0, 1):
                mixture = gym(name.partition(":")[0]).mixture(seed)
                train, test = set(questions(mixture, 400)), set(questions(mixture, 60, is_test=True))
                assert not train & test and len(train) > 100 and len(test) > 20
                assert all(map(is_held_out, test)) and not any(map(is_held_out, train))

    def test_of_a_generator_with_few_questions_they_do_not_either(self) -> None:
        config = {"leg_counting": {"min_animals": 1, "max_animals": 1, "max_instances": 1}}
        mixture = gym("leg_counting", config=config).mixture(0)
        train, test = set(questions(mixture, 300)), set(questions(mixture, 50, is_test=True))
        assert train and test and not train & test and len(train | test) < 40

    def test_a_generator_of_one_question_is_named(self) -> None:
        config = {"spell_backward": {"min_word_len": 10, "max_word_len": 10}}
        mixture = gym("spell_backward", config=config).mixture(0)
        entry = mixture.entry(0, False)

        class Same:
            def __getitem__(self, place: int) -> dict[str, Any]:
                return entry.content

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tinker_cookbook.env.reasoning.questions.make_dataset", lambda *_: Same())
            with pytest.raises(DataValidationError, match=r"spell_backward has too few different questions.*held out"):
                mixture.entry(77, True)

    def test_a_question_that_a_generator_gives_up_on_is_drawn_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        mixture = gym("spell_backward").mixture(0)
        asked = mixture.entry(0, False).content
        failing = 3

        class GivesUp:
            def __getitem__(self, place: int) -> dict[str, Any]:
                nonlocal failing
                failing -= 1
                if failing >= 0:
                    raise RuntimeError("no word")
                return asked

        monkeypatch.setattr("tinker_cookbook.env.reasoning.questions.make_dataset", lambda *_: GivesUp())
        assert mixture.entry(78, False).content == asked and failing == -1
        failing = 1000
        with pytest.raises(DataValidationError, match=r"failed to make question 79 \(RuntimeError: no word\)"):
            mixture.entry(79, False)

    def test_a_question_depends_on_seed_and_number_alone(self) -> None:
        env = gym(THREE)
        mixture = env.mixture(5)
        forward = questions(mixture, 40)
        package.make_dataset.cache_clear()
        again = gym(THREE).mixture(5)
        shuffled = {item: again.entry(item, False).content["question"] for item in reversed(range(40))}
        assert [shuffled[item] for item in range(40)] == forward
        assert questions(env.mixture(6), 40) != forward

    def test_another_process_asks_the_same(self) -> None:
        code = (
            "from tinker_cookbook.env import get_env\n"
            f"mixture = get_env('reasoning_gym:{THREE}').mixture(5)\n"
            "print([mixture.entry(item, False).content['question'] for item in range(12)])"
        )
        environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        shown = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        assert shown.stdout.strip() == str(questions(gym(THREE).mixture(5), 12))

    def test_weights_are_shares(self) -> None:
        mixture = gym("leg_counting,basic_arithmetic:3").mixture(0)
        names = [mixture.of_item(item, False).name for item in range(1000)]
        assert 700 < names.count("basic_arithmetic") < 800

    def test_overrides_reach_the_generator(self) -> None:
        mixture = gym("leg_counting", **{"config/leg_counting/max_animals": 3}).mixture(0)
        assert {mixture.entry(item, False).content["metadata"]["num_animals"] for item in range(20)} == {3}

    def test_levels_are_those_of_the_package(self) -> None:
        mixture = gym("basic_arithmetic", curriculum=True, size=100).mixture(0)
        assert mixture.num_levels == 5
        terms = [{_terms(mixture.entry(level * 100 + n, False)) for n in range(30)} for level in range(5)]
        assert [max(one) for one in terms] == [2, 3, 4, 5, 6]
        assert len({_terms(mixture.entry(item, True)) for item in range(30)}) == 5, "held out: all levels"


def _terms(entry: Entry) -> int:
    return entry.content["metadata"]["num_terms"]


class TestScores:
    @pytest.fixture
    def env(self) -> ReasoningEnv:
        mixture = gym("basic_arithmetic").mixture(0)
        return ReasoningEnv(mixture, 3, False, make_renderer("qwen3_instruct"), "", None)

    def score(self, env: ReasoningEnv, text: str) -> tuple[float, float, float]:
        reply = Reply({"role": "assistant", "content": text}, ParseTermination.STOP_SEQUENCE, True)
        reward, metrics = env.score_reply(reply)
        return reward, metrics["correct"], metrics["parsed"]

    def test_are_those_of_the_generator(self, env: ReasoningEnv) -> None:
        answer = env.get_reference_answer()
        assert self.score(env, f"It is <SOLUTION> {answer} </SOLUTION>") == (1.0, 1.0, 1.0)
        partly = env._entry.dataset.score_answer(f"about {answer}", env._entry.content)
        assert 0 < partly < 1
        assert self.score(env, f"<SOLUTION>about {answer}</SOLUTION>") == (partly, 0.0, 1.0)
        assert self.score(env, f"{answer}") == (0.0, 0.0, 0.0)

    def test_a_generator_that_fails_on_an_answer_gives_nothing(self) -> None:
        env = ReasoningEnv(gym("prime_factorization").mixture(0), 0, False, make_renderer("qwen3_instruct"), "", None)
        reply = Reply(
            {"role": "assistant", "content": '<SOLUTION>{"a":</SOLUTION>'}, ParseTermination.STOP_SEQUENCE, True
        )
        reward, metrics = env.score_reply(reply)
        assert (reward, metrics["score_failed"]) == (0.0, 1.0)

    def test_are_computed_in_reward_threads(self, env: ReasoningEnv, monkeypatch: pytest.MonkeyPatch) -> None:
        import threading

        seen: list[str] = []

        def score_answer(answer: str, entry: dict[str, Any]) -> float:
            seen.append(threading.current_thread().name)
            return 0.5

        monkeypatch.setattr(env._entry.dataset, "score_answer", score_answer)
        tokens = env.renderer.tokenizer.encode("<SOLUTION>1</SOLUTION>", add_special_tokens=False)

        async def play() -> float:
            with in_reward_threads(1):
                return (await env.step(tokens)).reward

        assert asyncio.run(play()) == 0.5 and seen[0].startswith("reward")


class TestGroups:
    def test_members_share_a_question_and_groups_can_be_pickled(self) -> None:
        train, test = asyncio.run(_built(gym(THREE, system_prompt="Say <SOLUTION>.")))
        group = pickle.loads(pickle.dumps(train.get_batch(1)[0]))
        assert isinstance(group, OneTurnGroupBuilder)
        envs = asyncio.run(group.make_envs())
        shown = [env.get_messages() for env in envs]
        assert shown[0] == shown[1] and shown[0][0] == {"role": "system", "content": "Say <SOLUTION>."}
        assert group.logging_tags()[0] in THREE
        assert test is not None and len(test.get_batch(0)) == 4

    def test_a_batch_needs_no_batch_before_it(self) -> None:
        one, other = (asyncio.run(_built(gym(THREE)))[0] for _ in range(2))
        asked = [[asyncio.run(group.make_envs())[0].instance_id for group in one.get_batch(b)] for b in range(4)]  # type: ignore[attr-defined]
        last = [asyncio.run(group.make_envs())[0].instance_id for group in other.get_batch(3)]  # type: ignore[attr-defined]
        assert last == asked[3] and len({name for batch in asked for name in batch}) == 12


async def _built(env: Environment) -> Any:
    settings = DatasetSettings(
        model_name=TINY, groups_per_batch=3, group_size=2, num_batches=4, num_test=4, max_prompt_tokens=None
    )
    return await env.build(settings)()


@pytest.mark.parametrize(
    ("env", "args", "message"),
    [
        ("leg_countin", {}, "no generator 'leg_countin'; did you mean leg_counting"),
        ("", {}, "name generators, as in env=reasoning_gym:leg_counting"),
        ("leg_counting:0", {}, "a weight is a number above 0"),
        ("leg_counting:x", {}, "'x' is not a weight of leg_counting"),
        ("leg_counting,leg_counting", {}, "leg_counting is named twice"),
        (
            "leg_counting",
            {"config/leg_counting/animals": 1},
            "animals: is unknown; leg_counting takes min_animals, max_",
        ),
        ("leg_counting", {"config/leg_counting/seed": 1}, "seed: is unknown; leg_counting takes min_animals"),
        ("leg_counting", {"config/leg_counting/min_animals": 50}, "max_animals must be >= min_animals"),
        ("leg_counting", {"config/other/x": 1}, r"env\.config\.other: is not asked"),
        ("leg_counting", {"config": 3}, "is not a mapping"),
        ("leg_counting", {"curriculm": True}, "curriculm: is unknown; reasoning_gym takes"),
        ("leg_counting", {"size": "many"}, "size='many': is str"),
        ("leg_counting", {"window": 3}, r"env\.window=3: belongs to the curriculum; add env\.curriculum=True"),
        ("arc_agi,jugs,codeio,decimal_arithmetic", {"lower_at": 0.9}, "must be below"),
        ("countdown", {}, r"countdown evaluates the policy's answers as Python.*env\.run_answers=True"),
        (
            "leg_counting",
            {"curriculum": True, "config/leg_counting/max_animals": 4},
            r"env\.config\.leg_counting\.max_animals: is set by the curriculum",
        ),
    ],
)
def test_what_is_wrong_is_named(env: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        get_env(f"reasoning_gym:{env}", args)


def test_generators_without_levels_have_no_curriculum() -> None:
    lacking = [name for name in package.generators() if not package.has_levels(name)]
    assert lacking
    with pytest.raises(ConfigurationError, match=f"{lacking[0]} has no levels"):
        load("reasoning_gym", generators=lacking[0], curriculum=True)
    for name in ("modulo_grid", "knight_swap"):  # of one level, and of a first level that its own config refuses
        with pytest.raises(ConfigurationError, match=f"{name} has no levels to move between"):
            gym(name, curriculum=True)


def test_questions_that_change_with_the_process_need_a_hash_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(
        ConfigurationError, match="ransom_note asks different questions in every process; set PYTHONHASHSEED=0"
    ):
        gym("ransom_note")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert gym("ransom_note").mixture(0).entry(0, False).content["question"]


def test_generators_that_run_answers_are_known() -> None:
    assert {name for name in package.generators() if package.runs_answers(name)} == RUN_ANSWERS
    assert gym("countdown", run_answers=True).mixture(0).entry(0, False)


@pytest.mark.parametrize("curriculum", [False, True])
def test_from_command_line_to_files(tmp_path: Path, curriculum: bool) -> None:
    words = ["max_steps=2", "groups_per_batch=2", "group_size=2", "num_test=2", "lora_rank=4", "max_tokens=8"]
    levels = ["env.curriculum=True", "env.window=1", "env.raise_at=0.0", "env.lower_at=-1.0"] if curriculum else []
    words += ["on_zero_advantages=skip", f"log_path={tmp_path / 'run'}", *levels]
    run_recipe(rl.CLIConfig, rl.main, argv=["env=reasoning_gym:leg_counting", *words])
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert "env/all/reward/total" in rows[0] and "test/env/all/reward/total" in rows[0]
    assert [row.get("curriculum/level/leg_counting") for row in rows[:2]] == ([1, 2] if curriculum else [None, None])
