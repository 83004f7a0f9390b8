"""Self-prediction: what counts as an answer with confidence, that honesty pays, and the control that shows a constant."""

import asyncio
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.debate.arena import TINY
from tests.env.listeners import FOREIGN, HUGE
from tinker_cookbook.env import get_env
from tinker_cookbook.env.contract_dataset import LoadedEnvironment
from tinker_cookbook.env.shipped.model_aware.self_prediction import (
    Prediction,
    load_environment,
    parse_prediction,
    prediction_reward,
    score_prediction,
    skill_over_constant,
)
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError

CHANCES = st.floats(0, 1)
HUNDREDTHS = st.integers(0, 100).map(lambda n: f"{n / 100:.2f}")


def say(answer: object, confidence: object) -> str:
    return f"FINAL ANSWER: {answer} CONFIDENCE: {confidence}"


@given(st.integers(-(10**13), 10**13), HUNDREDTHS, st.sampled_from(["", "<think>2 FINAL ANSWER: 3</think> ", "\n"]))
def test_an_answer_with_its_sign_and_a_confidence_is_read(answer: int, confidence: str, before: str) -> None:
    found = parse_prediction(before + say(answer, confidence) + "\n")
    assert found == Prediction(str(answer), float(confidence))


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_a_confidence_outside_of_0_to_1_is_malformed(confidence: float) -> None:
    found = parse_prediction(say(5, confidence))
    assert found is None or 0 <= found.confidence <= 1
    if not 0 <= confidence <= 1:
        assert found is None


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "5",
        "FINAL ANSWER: 5",
        "CONFIDENCE: 0.5",
        "FINAL ANSWER: CONFIDENCE: 0.5",
        "FINAL ANSWER: 5 CONFIDENCE:",
        say(5, "-0.5"),
        say(5, "1.5"),
        say(5, "50%"),
        say(5, "nan"),
        say(5, "1e-3"),
        say("--5", 0.5),
        say("05", 0.5),
        say(5, 0.5) + " " + say(6, 0.5),
        say(5, 0.5) + ", or 6",
        "It is 5. " + say(5, 0.5),
        say("5 or 6", 0.5),
        say("५", 0.5),
        say("５", 0.5),
        say(5, "٠.٥"),
        "<think>never ends " + say(5, 0.5),
        say("9" * HUGE, 0.5),
        say(5, "0." + "3" * HUGE),
        "<think>" * (HUGE // 7),
        " " * HUGE,
        say(5, 0.5) + "\n" * HUGE,
    ],
    ids=lambda reply: repr(reply[:40]),
)
def test_whatever_lacks_the_form_is_worth_nothing(reply: str) -> None:
    assert prediction_reward(reply, "5") == (0.0, {"format": 0.0})


@given(st.text(max_size=200) | FOREIGN)
def test_any_text_has_a_reward_from_0_to_1(reply: str) -> None:
    for said in (reply, say(reply, 0.5), say(5, reply), f"<think>{reply}</think>{say(5, 0.5)}"):
        assert 0 <= prediction_reward(said, "5")[0] <= 1


def expected_reward(stated: float, chance: float) -> float:
    right, wrong = (score_prediction(Prediction(answer, stated), "1") for answer in ("1", "2"))
    return chance * right + (1 - chance) * wrong


@given(CHANCES, CHANCES)
def test_the_honest_confidence_is_the_best(stated: float, chance: float) -> None:
    assert expected_reward(chance, chance) >= expected_reward(stated, chance) - 1e-12


@given(CHANCES)
def test_a_wrong_answer_on_purpose_never_pays(chance: float) -> None:
    assert expected_reward(chance, chance) >= score_prediction(Prediction("2", 0.0), "1") - 1e-12


def test_a_missing_confidence_is_no_confidence_of_one_half() -> None:
    assert prediction_reward("FINAL ANSWER: 5", "5")[0] == 0.0
    assert prediction_reward(say(5, 0.5), "5")[0] == pytest.approx(0.2 + 0.5 + 0.3 * 0.75)
    assert prediction_reward(say(-5, 0.5), "5")[1]["correct"] == 0.0


def test_the_control_shows_one_confidence_for_everything() -> None:
    rng = np.random.default_rng(0)
    chances = rng.uniform(0, 1, 2000)
    right = (rng.uniform(0, 1, 2000) < chances).astype(float)
    constant = np.full(2000, right.mean())
    rewards = [np.mean(0.7 * right + 0.3 * (1 - (stated - right) ** 2)) for stated in (constant, chances)]
    assert rewards[1] - rewards[0] < 0.05  # the reward hardly tells them apart
    assert skill_over_constant(constant.tolist(), right.tolist()) == pytest.approx(0, abs=1e-9)
    assert skill_over_constant(chances.tolist(), right.tolist()) > 0.25
    assert skill_over_constant([0.5], [1.0]) == 0.0
    with pytest.raises(DataValidationError, match="2 confidences for 1"):
        skill_over_constant([0.5, 0.5], [1.0])


def test_questions_are_right_once_each_and_held_out() -> None:
    env = get_env("self_prediction", {"questions": 300, "highest": 30})
    assert isinstance(env, LoadedEnvironment) and env.questions is not None
    rows = [*env.questions.rows, *env.questions.test_rows]
    assert len(rows) == 300 and len({row["prompt"] for row in rows}) == 300
    for row in random.Random(0).sample(rows, 50):
        assert str(eval(row["prompt"].removeprefix("What is ").rstrip("?"))) == row["answer"]
    hard = [row for row in rows if row["info"]["difficulty"] == "hard"]
    assert 20 < len(hard) < 80
    assert asyncio.run(env.dataset_builder(TINY)())[1] is not None


def test_further_questions_are_only_for_evaluation() -> None:
    few, more = (
        load_environment(questions=12, highest=4, hard_share=0, operations="+", further=further) for further in (0, 10)
    )
    assert more.dataset == few.dataset and more.eval_dataset[:2] == few.eval_dataset
    asked = {row["prompt"] for row in [*more.dataset, *more.eval_dataset]}
    assert (len(more.dataset), len(more.eval_dataset), len(asked)) == (10, 12, 22)


@pytest.mark.parametrize(
    ("args", "match"),
    [
        ({"operations": "/"}, "operations='/'"),
        ({"hard_share": 1.5}, "hard_share=1.5"),
        ({"questions": 90, "highest": 9, "operations": "+"}, "questions=90"),
        (
            {"questions": 12, "highest": 4, "operations": "+", "further": 11},
            "further=11: .* from 0 to 10, nine tenths of the 25",
        ),
        ({"further": -1}, "further=-1"),
    ],
)
def test_arguments_out_of_range_are_refused(args: dict, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        load_environment(**args)
