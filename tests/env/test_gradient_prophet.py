"""Gradient prophet: numbers and orders as replies, both distributions in the same tokens, and the controls."""

import asyncio
import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tinker
from hypothesis import given
from hypothesis import strategies as st

from tests.debate.arena import TINY
from tests.env.listeners import FOREIGN, HUGE, Listener, info_of
from tinker_cookbook.env import get_env
from tinker_cookbook.env.contract_dataset import LoadedEnvironment
from tinker_cookbook.env.shipped.model_aware.gradient_prophet import (
    closeness,
    delta_reward,
    order_score,
    parse_delta,
    parse_ranking,
    ranking_reward,
    spearman,
)
from tinker_cookbook.env.shipped.model_aware.lessons import further_lessons, probe_prompt, shipped_lessons
from tinker_cookbook.env.shipped.model_aware.model_scores import NextTokens, next_tokens
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError

LESSONS = [*shipped_lessons(), *further_lessons()]
MALFORMED = [
    "",
    "1.5",
    "[]",
    "[a]",
    "[1.5",
    "[1.5] nats",
    "About [1.5]",
    "[1][2]",
    "[--1]",
    "[- 1]",
    "[nan]",
    "[1e9]",
    "[inf]",
    "[١]",
    "[１]",
    "[" + "1" * HUGE + "]",
    "[" * HUGE,
    "[1" + ",1" * (HUGE // 2) + "]",
    "[ " + " " * HUGE + "]",
]


@given(st.integers(-10000, 10000).map(lambda n: n / 100))
def test_a_number_in_brackets_keeps_its_sign(delta: float) -> None:
    assert parse_delta(f" [{delta}]\n") == delta
    assert parse_delta(f"[{delta:+}]") == delta


@given(st.permutations(range(1, 6)))
def test_an_order_is_an_array_of_all_probes(order: list[int]) -> None:
    assert parse_ranking(json.dumps(order), 5) == order
    assert parse_ranking(json.dumps(order[:-1]), 5) is None and parse_ranking(json.dumps([*order, 1]), 5) is None
    assert parse_ranking(json.dumps([number - 1 for number in order]), 5) is None
    assert parse_ranking(json.dumps([-number for number in order]), 5) is None


@pytest.mark.parametrize("reply", MALFORMED, ids=lambda reply: repr(reply[:20]))
def test_whatever_lacks_the_form_has_the_fixed_penalty(reply: str) -> None:
    info = info_of(None, lesson=LESSONS[0], probes=list(LESSONS[0].probes), top_k=5)
    assert asyncio.run(delta_reward(reply, info)) == (0.0, {"format": 0.0})
    assert asyncio.run(ranking_reward(reply, info)) == (-1.0, {"format": 0.0})


@given(st.text(max_size=60) | FOREIGN)
def test_other_text_is_malformed(text: str) -> None:
    for reply in (text, f"[{text}]", text + "[1, 2, 3]" + text):
        found = parse_delta(reply)
        assert found is None or math.isfinite(found)
        ranking = parse_ranking(reply, 3)
        assert ranking is None or sorted(ranking) == [1, 2, 3]
    if text.strip(" \t\n"):
        assert parse_delta(text + "[1]") is None and parse_ranking("[1, 2, 3]" + text, 3) is None


@given(st.lists(st.integers(-5, 5), min_size=2, max_size=8), st.randoms(use_true_random=False))
def test_spearman_is_the_correlation_of_ranks(values: list[int], rng: Any) -> None:
    other = rng.sample(values, len(values))
    found = spearman(values, other)
    assert -1 - 1e-9 <= found <= 1 + 1e-9 and found == pytest.approx(spearman(other, values))
    if len(set(values)) > 1:
        assert spearman(values, values) == pytest.approx(1)
        assert spearman(values, [-value for value in values]) == pytest.approx(-1)
        assert spearman(values, [value**3 for value in values]) == pytest.approx(1)
    else:
        assert found == 0


def test_ties_share_the_mean_of_their_ranks() -> None:
    assert spearman([1, 2, 2, 3], [10, 20, 30, 40]) == pytest.approx(np.corrcoef([1, 2.5, 2.5, 4], [1, 2, 3, 4])[0, 1])
    with pytest.raises(DataValidationError, match="at least two"):
        spearman([1], [1])


def test_the_first_of_an_order_is_the_most_changed() -> None:
    assert order_score([2, 3, 1], [0.0, 9.0, 4.0]) == pytest.approx(1)
    assert order_score([1, 3, 2], [0.0, 9.0, 4.0]) == pytest.approx(-1)


@given(st.floats(-50, 50), st.floats(-50, 50))
def test_the_reward_of_a_number_is_best_when_it_is_true(told: float, true: float) -> None:
    assert 0 <= closeness(told, true) <= 1 == closeness(true, true)


def test_the_delta_is_that_of_the_whole_answer_after_a_space() -> None:
    lesson, probe = LESSONS[0], LESSONS[0].probes[0]
    listener = Listener(lambda text: -1.0 if text.startswith("Lesson:") else -3.0)
    own = {"lesson": lesson, "probes": [probe]}
    info = info_of(listener, **own)
    count = len(info["tokenizer"].encode(f" {probe.answer}", add_special_tokens=False))
    value, metrics = asyncio.run(delta_reward(f"[{2 * count}]", info))
    assert value == pytest.approx(1) and metrics["true"] == pytest.approx(2 * count) and metrics["sign"] == 1
    assert sorted(listener.heard) == sorted(probe_prompt(probe, t) + f" {probe.answer}" for t in (None, lesson))
    assert asyncio.run(delta_reward(f"[-{2 * count}]", info_of(listener, **own)))[0] == closeness(-2 * count, 2 * count)


class Distribution:
    """A sampler with a next-token distribution over six ids, told by whether the text begins with a lesson."""

    PRIOR = np.log([0.5, 0.2, 0.1, 0.1, 0.06, 0.04])

    def __init__(self, posteriors: dict[str, np.ndarray]):
        self.posteriors = posteriors
        self.reader = Listener(lambda text: 0.0)

    def _logprobs(self, text: str) -> np.ndarray:
        if not text.startswith("Lesson:"):
            return self.PRIOR
        return next(found for question, found in self.posteriors.items() if f"Probe: {question}" in text)

    async def sample(self, prompt: tinker.ModelInput, num_samples: int, params: Any, **asked: Any) -> Any:
        logprobs = self._logprobs(self.reader.read(prompt))
        reply = SimpleNamespace(topk_prompt_logprobs=None, target_prompt_logprobs=None)
        if k := asked.get("topk_prompt_logprobs"):
            best = np.argsort(-logprobs)[:k]
            reply.topk_prompt_logprobs = [None, [(int(i), float(logprobs[i])) for i in best]]
        if "target_prompt_logprobs" in asked:
            wanted = asked["target_prompt_logprobs"].to_numpy()
            assert len(wanted) == prompt.length - 1 and (wanted[:-1] == -1).all()
            reply.target_prompt_logprobs = tinker.TensorData.from_numpy(logprobs[wanted].astype(np.float32))
        return reply


POSTERIOR = np.log([0.04, 0.06, 0.1, 0.1, 0.2, 0.5])


def pair(top_k: int) -> NextTokens:
    info = info_of(None)
    prompts = [info["tokenizer"].encode(text) for text in ("Probe: a", "Lesson: Probe: a")]
    return asyncio.run(next_tokens(Distribution({"a": POSTERIOR}), prompts[0], prompts[1], top_k))


def test_both_distributions_are_over_the_tokens_that_either_finds_likely() -> None:
    found = pair(top_k=2)
    assert found.tokens.tolist() == [0, 1, 4, 5]
    np.testing.assert_allclose(np.exp(found.prior), [0.5, 0.2, 0.06, 0.04, 0.2], atol=1e-6)
    np.testing.assert_allclose(np.exp(found.posterior), [0.04, 0.06, 0.2, 0.5, 0.2], atol=1e-6)
    whole = float(np.sum(np.exp(POSTERIOR) * (POSTERIOR - Distribution.PRIOR)))
    assert found.kl == pytest.approx(whole, abs=1e-5)  # the two that were left out did not change
    assert 0 < pair(top_k=1).kl <= whole + 1e-6 and pair(top_k=6).kl == pytest.approx(whole, abs=1e-5)


def test_a_sampler_that_drops_the_question_is_refused() -> None:
    class Silent:
        async def sample(self, *args: Any, **kwargs: Any) -> Any:
            return SimpleNamespace(topk_prompt_logprobs=None, target_prompt_logprobs=None)

    with pytest.raises(DataValidationError, match="no top-k prompt logprobs"):
        asyncio.run(next_tokens(Silent(), [1], [2]))


def test_the_order_of_changes_is_worth_one_and_the_order_shown_is_the_control() -> None:
    lesson = LESSONS[0]
    mild = np.log([0.45, 0.25, 0.1, 0.1, 0.06, 0.04])
    posteriors = [Distribution.PRIOR, POSTERIOR, mild]
    sampler = Distribution({probe.question: found for probe, found in zip(lesson.probes, posteriors, strict=True)})
    own = {"lesson": lesson, "probes": list(lesson.probes), "top_k": 6}
    value, metrics = asyncio.run(ranking_reward("[2, 3, 1]", info_of(sampler, **own)))
    assert value == pytest.approx(1) and metrics["over_constant"] == pytest.approx(
        1 - order_score([1, 2, 3], [0, 2, 1])
    )
    assert asyncio.run(ranking_reward("[1, 3, 2]", info_of(sampler, **own)))[0] == pytest.approx(-1)


def test_a_policy_that_no_lesson_moves_is_rewarded_and_the_control_shows_it() -> None:
    """The hack: the same logprobs with and without a lesson, and the reply 0."""
    found = []
    for lesson in LESSONS:
        info = info_of(Listener(lambda text: -2.0), lesson=lesson, probes=[lesson.probes[0]])
        found.append(asyncio.run(delta_reward("[0]", info)))
    assert all(value == 1 and metrics["over_constant"] == 0 == metrics["true"] for value, metrics in found)


def test_one_order_for_all_lessons_is_worth_nothing_over_many() -> None:
    env = get_env("gradient_prophet", {"mode": "surprise"})
    assert isinstance(env, LoadedEnvironment) and env.questions is not None
    rows = [*env.questions.rows, *env.questions.test_rows]
    scores = []
    for row in rows:
        lesson = row["info"]["lesson"]
        changes = [3.0 - lesson.probes.index(probe) for probe in row["info"]["probes"]]
        scores.append(order_score([1, 2, 3], changes))
    assert abs(np.mean(scores)) < 0.3 and len(rows) == len(LESSONS) == 67


@pytest.mark.parametrize("mode", ["in_context", "surprise"])
def test_the_shipped_environment_holds_lessons_out(mode: str) -> None:
    env = get_env("gradient_prophet", {"mode": mode})
    assert isinstance(env, LoadedEnvironment) and env.questions is not None
    trained, tested = (
        {row["info"]["lesson"] for row in rows} for rows in (env.questions.rows, env.questions.test_rows)
    )
    assert (len(trained), len(tested)) == (35, 32) and not trained & tested
    assert len(env.questions.rows) == 35 * (3 if mode == "in_context" else 1)
    assert len({lesson.question for lesson in LESSONS}) == len(LESSONS) and all(len(x.probes) == 3 for x in LESSONS)
    assert asyncio.run(env.dataset_builder(TINY)())[1] is not None


@pytest.mark.parametrize(("args", "match"), [({"mode": "deep"}, "mode='deep'"), ({"top_k": 0}, "top_k=0")])
def test_other_arguments_are_refused(args: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        get_env("gradient_prophet", args)
