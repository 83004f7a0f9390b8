"""Entropy intuition: the three lines, the entropy of candidates and an invalid rest, and the control that shows certainty."""

import asyncio
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.debate.arena import TINY
from tests.env.listeners import FOREIGN, HUGE, Listener, info_of
from tinker_cookbook.env import get_env
from tinker_cookbook.env.contract_dataset import LoadedEnvironment
from tinker_cookbook.env.shipped.model_aware.entropy_intuition import (
    Intuition,
    entropy_reward,
    normalised_entropy,
    parse_intuition,
    skill_over_constant,
)
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError

CANDIDATES = [3, 7, 12]


def say(number: object, entropy: object, feeling: str = "calm") -> str:
    return f"NUMBER: {number}\nFEELING: {feeling}\nENTROPY: {entropy}"


def reward(reply: str, chances: dict[int, float]) -> tuple[float, dict[str, float]]:
    """With a sampler that gives the line of each candidate this chance."""

    class Sampler(Listener):
        async def compute_logprobs(self, prompt: Any) -> list[float | None]:
            text = self.read(prompt)
            number = int(text.split("NUMBER:")[1])
            return [None, *[0.0] * (prompt.length - 2), math.log(chances[number])]

    info = info_of(Sampler(lambda text: 0.0), candidates=list(chances))
    return asyncio.run(entropy_reward(reply, {"prompt_tokens": [5, 6, 7]}, info))


@given(st.sampled_from(CANDIDATES), st.integers(0, 100).map(lambda n: f"{n / 100:.2f}"), st.sampled_from("ab"))
def test_three_lines_are_read(number: int, entropy: str, feeling: str) -> None:
    assert parse_intuition(say(number, entropy, feeling) + "\n", CANDIDATES) == Intuition(
        number, feeling, float(entropy)
    )


@given(st.integers(-2000, 2000), st.floats())
def test_numbers_that_are_no_candidates_and_entropies_out_of_range_are_malformed(number: int, entropy: float) -> None:
    assert (parse_intuition(say(number, 0.5), CANDIDATES) is not None) == (number in CANDIDATES)
    if not 0 <= entropy <= 1:
        assert parse_intuition(say(3, entropy), CANDIDATES) is None


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "NUMBER: 3",
        "NUMBER: 3\nENTROPY: 0.5",
        "NUMBER: 3\nFEELING: calm",
        "FEELING: calm\nENTROPY: 0.5",
        say(3, "-0.5"),
        say(3, "1.5"),
        say(3, "nan"),
        say(3, ""),
        say("-3", 0.5),
        say("3, 7", 0.5),
        say(3, 0.5, " "),
        say(3, 0.5) + "\nENTROPY: 0.9",
        "I say:\n" + say(3, 0.5),
        say("３", 0.5),
        say(3, "٠.٥"),
        say("3" * HUGE, 0.5),
        say(3, 0.5, "x" * HUGE),
        say(3, "0." + "1" * HUGE),
        "NUMBER: 3\n" * (HUGE // 10),
    ],
    ids=lambda reply: repr(reply[:30]),
)
def test_whatever_lacks_the_form_is_worth_nothing(reply: str) -> None:
    assert reward(reply, dict.fromkeys(CANDIDATES, 0.3)) == (0.0, {"format": 0.0})


@given(st.text(max_size=100) | FOREIGN)
def test_any_feeling_on_one_line_will_do(feeling: str) -> None:
    found = parse_intuition(say(3, 0.5, feeling), CANDIDATES)
    assert (found is not None) == (len(feeling) > 0 and "\n" not in feeling and feeling.strip() != "")


@given(st.lists(st.floats(1e-6, 1), min_size=2, max_size=8), st.floats(0, 5))
def test_the_entropy_is_that_of_the_candidates_and_the_rest(weights: list[float], rest: float) -> None:
    total = sum(weights) + rest
    entropy, invalid = normalised_entropy([math.log(weight / total) for weight in weights])
    chances = [weight / total for weight in [*weights, rest] if weight > 1e-12]
    expected = -sum(p * math.log(p) for p in chances) / math.log(len(weights) + 1)
    assert 0 <= entropy <= 1 and entropy == pytest.approx(expected, abs=1e-6) and invalid == pytest.approx(rest / total)


def test_the_reward_falls_with_the_distance_from_the_snapshots_entropy() -> None:
    even = dict.fromkeys(CANDIDATES, 0.25)
    value, metrics = reward(say(3, "1.0"), even)
    assert (
        value == pytest.approx(1) and metrics["true"] == pytest.approx(1) and metrics["invalid"] == pytest.approx(0.25)
    )
    assert reward(say(3, "0.25"), even)[0] == pytest.approx(0.25)
    certain = {3: 1.0 - 1e-9, 7: 1e-12, 12: 1e-12}
    assert reward(say(7, "0"), certain)[0] == pytest.approx(1, abs=1e-6) and reward(say(7, "1"), certain)[0] < 1e-6


def test_certainty_is_rewarded_and_the_control_shows_it() -> None:
    """The hack: a policy that always says the first candidate, and 0."""
    told, true, rewards = [], [], []
    for first in range(20):
        value, metrics = reward(say(first, "0"), {first: 1 - 1e-12, first + 1: 1e-13})
        told, true, rewards = [*told, metrics["told"]], [*true, metrics["true"]], [*rewards, value]
    assert np.mean(rewards) > 0.99 and skill_over_constant(told, true) <= 0
    varied = [i / 20 for i in range(20)]
    assert skill_over_constant([0.5] * 20, varied) <= 0 and skill_over_constant(varied, varied) == 1
    with pytest.raises(DataValidationError, match="1 predictions for 2"):
        skill_over_constant([0.5], [0.5, 0.1])


def test_the_shipped_environment() -> None:
    env = get_env("entropy_intuition", {"questions": 50, "highest": 9, "most": 4})
    assert isinstance(env, LoadedEnvironment) and env.questions is not None
    for row in [*env.questions.rows, *env.questions.test_rows]:
        candidates = row["info"]["candidates"]
        assert 2 <= len(set(candidates)) == len(candidates) <= 4 and ", ".join(map(str, candidates)) in row["prompt"]
    assert asyncio.run(env.dataset_builder(TINY)())[1] is not None
    with pytest.raises(ConfigurationError, match="most=11"):
        get_env("entropy_intuition", {"highest": 9, "most": 11})
