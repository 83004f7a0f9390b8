"""Ghost trace: what counts as five integers, what the listener hears, and the control that tells a code from its prior."""

import asyncio
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.debate.arena import TINY
from tests.env.listeners import FOREIGN, HUGE, Listener, info_of
from tinker_cookbook.env import get_env
from tinker_cookbook.env.contract_dataset import LoadedEnvironment
from tinker_cookbook.env.shipped.model_aware import ghost_trace
from tinker_cookbook.env.shipped.model_aware.ghost_trace import MALFORMED, parse_trace, trace_reward, word_bank
from tinker_cookbook.exceptions import ConfigurationError

NUMBERS = st.lists(st.integers(0, 999), min_size=5, max_size=5)
SEPARATORS = st.sampled_from([",", ", ", " ", "\n", " ,\n"])
BANK = word_bank()


def reward(reply: str, listener: Listener, word: str = "Apple", decoy: str = "Moon") -> tuple[float, dict[str, float]]:
    return asyncio.run(trace_reward(reply, word, info_of(listener, decoy=decoy)))


@given(NUMBERS, SEPARATORS)
def test_five_integers_are_read_however_they_are_separated(numbers: list[int], separator: str) -> None:
    assert parse_trace(separator.join(map(str, numbers)) + "\n") == tuple(numbers)


@given(st.lists(st.integers(-2000, 2000), max_size=9))
def test_other_counts_signs_and_ranges_are_malformed(numbers: list[int]) -> None:
    fits = len(numbers) == 5 and all(0 <= number <= 999 for number in numbers)
    assert (parse_trace(", ".join(map(str, numbers))) is not None) == fits


@given(NUMBERS, st.text(min_size=1, max_size=40) | FOREIGN.filter(bool))
def test_any_other_text_beside_the_numbers_is_malformed(numbers: list[int], text: str) -> None:
    if not re.fullmatch(r"[0-9, \t\n]*", text):
        said = ", ".join(map(str, numbers))
        assert parse_trace(said + text) is None and parse_trace(text + said) is None and parse_trace(text) is None


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "Apple 1",
        "1 2 3 4 Apple 5",
        "1, 2, 3, 4",
        "1, 2, 3, 4, 5, 6",
        "1, 2, 3, 4, 1000",
        "1, 2, 3, 4, -5",
        "1.5, 2, 3, 4, 5",
        "01, 2, 3, 4, 5",
        "1,, 2, 3, 4, 5",
        "[1, 2, 3, 4, 5]",
        "١, ٢, ٣, ٤, ٥",
        "１, ２, ３, ４, ５",
        "1\xa02 3 4 5",
        "9" * HUGE,
        "1, " * HUGE,
        "1, 2, 3, 4, 5" + " x" * HUGE,
        "\n" * HUGE,
        "Apple " * (HUGE // 6),
    ],
    ids=lambda reply: repr(reply[:20]),
)
def test_a_malformed_reply_costs_the_same_whatever_it_says_and_is_not_heard(reply: str) -> None:
    listener = Listener(lambda text: 0.0)
    assert reward(reply, listener) == (MALFORMED, {"format": 0.0}) and listener.heard == []


@given(NUMBERS, st.sampled_from(BANK), st.floats(-1000, 0))
def test_the_listener_hears_numbers_only_and_no_valid_reply_is_worth_less_than_a_malformed_one(
    numbers: list[int], word: str, logprob: float
) -> None:
    listener = Listener(lambda text: logprob)
    value, metrics = reward(" ".join(map(str, numbers)), listener, word)
    assert -10 <= value <= 10 and value > MALFORMED
    assert value == pytest.approx(max(logprob, -20) + 10) and metrics["specific"] == 0
    for text in listener.heard:
        before, said = text.split("object:")
        assert re.fullmatch(r"Sequence: [0-9, ]*\. Guess the ", before) and said.strip() in (word, "Moon")


def test_the_reward_is_the_mean_logprob_of_the_words_tokens_after_the_numbers() -> None:
    class Sampler:
        async def compute_logprobs(self, prompt: Any) -> list[float | None]:
            return [None, *(-0.1 * i for i in range(1, prompt.length))]

    sampler = Sampler()
    info = info_of(sampler, decoy="Moon")
    value, _ = asyncio.run(trace_reward("1, 2, 3, 4, 5", "Helicopter", info))
    encode = info["tokenizer"].encode
    before = len(encode("Sequence: 1, 2, 3, 4, 5. Guess the object:", add_special_tokens=False))
    count = len(encode(" Helicopter", add_special_tokens=False))
    assert value == pytest.approx(10 - 0.1 * np.mean(np.arange(before, before + count)))


def code(word: str) -> str:
    """Numbers that tell words apart."""
    return ", ".join(str((BANK.index(word) * k) % 1000) for k in (1, 3, 7, 11, 13))


def mean_of(metric: str, listener: Listener, speak: Any) -> tuple[float, float]:
    """Mean reward and mean of a metric over the rows of the environment."""
    rows = ghost_trace.load_environment(words=40).dataset
    found = [reward(speak(row["answer"]), listener, row["answer"], row["info"]["decoy"]) for row in rows]
    return float(np.mean([value for value, _ in found])), float(np.mean([metrics[metric] for _, metrics in found]))


def test_one_sequence_for_all_words_is_rewarded_and_the_control_shows_it() -> None:
    """The hack: after the magic numbers the listener finds every word of the bank likely."""
    words = {word: len(word) for word in BANK}
    hacked = Listener(lambda text: -1.0 - 0.1 * words[text.split()[-1]] - (0 if "7, 7, 7, 7, 7" in text else 6))
    cheated, specific = mean_of("specific", hacked, lambda word: "7, 7, 7, 7, 7")
    assert cheated > 8 and abs(specific) < 1e-9
    _, gain = mean_of("gain", hacked, lambda word: "7, 7, 7, 7, 7")
    assert gain == pytest.approx(6)  # which the prior alone would not have shown


def test_a_code_is_specific() -> None:
    honest = Listener(lambda text: -1.0 if f" {code(text.split()[-1])}." in text else -7.0)
    value, specific = mean_of("specific", honest, code)
    assert value == pytest.approx(9) and specific == pytest.approx(6)


def test_priors_are_asked_once_per_group() -> None:
    listener = Listener(lambda text: -2.0)
    info = info_of(listener, decoy="Moon")

    async def group() -> None:
        await asyncio.gather(*(trace_reward(f"{i}, 2, 3, 4, 5", "Apple", info) for i in range(4)))

    asyncio.run(group())
    assert len(listener.heard) == 2 + 2 * 4


def test_the_shipped_environment_holds_words_out() -> None:
    env = get_env("ghost_trace", {"words": 80})
    assert isinstance(env, LoadedEnvironment) and env.questions is not None and env.needs == ("sampling_client",)
    trained, tested = ({row["answer"] for row in rows} for rows in (env.questions.rows, env.questions.test_rows))
    assert (len(trained), len(tested)) == (70, 60) and not trained & tested
    assert all(row["info"]["decoy"] != row["answer"] for row in [*env.questions.rows, *env.questions.test_rows])
    training, test = asyncio.run(env.dataset_builder(TINY)())
    assert len(training) and test is not None
    assert len(set(BANK)) == len(BANK) > 300 and all(word.isalpha() for word in BANK)
    with pytest.raises(ConfigurationError, match="words=7"):
        get_env("ghost_trace", {"words": 7})
