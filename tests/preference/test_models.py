"""Preference models over a chat renderer, and the evaluators that use them: scores by hand-made probabilities."""

import asyncio
import math
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any

import pytest
import tinker
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes import FakeSamplingClient, SampleCall
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.exceptions import ConfigurationError, TrainingError
from tinker_cookbook.preference.comparison_policy_evaluator import (
    ComparisonEvaluator,
    LabelAccuracyEvaluator,
    compare,
    preprocess_content,
)
from tinker_cookbook.preference.types import (
    LABELS,
    Comparison,
    ComparisonRendererFromChatRenderer,
    LabeledComparison,
    PreferenceModel,
    PreferenceModelFromChatRenderer,
)
from tinker_cookbook.renderers import Message, get_renderer, get_text_content
from tinker_cookbook.tokenizer_utils import get_tokenizer

TINY = str(EXAMPLE_DATA / "tiny_chat")
TOKENIZER = get_tokenizer(TINY)
RENDERER = get_renderer("qwen3_instruct", TOKENIZER, model_name=TINY)


def said(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def comparison(a: str = "one", b: str = "two", prompt: str = "q") -> Comparison:
    return Comparison([said("user", prompt)], [said("assistant", a)], [said("assistant", b)])


class Answers:
    """A sampling client that gives the three labels these probabilities, and samples `text`."""

    def __init__(self, probabilities: dict[str, float], text: str = "A"):
        self.probabilities, self.text = probabilities, text

    async def compute_logprobs(self, prompt: tinker.ModelInput) -> list[float | None]:
        text = str(TOKENIZER.decode(prompt.to_ints()))
        label = text.rpartition("assistant\n")[2].removesuffix("\n").removesuffix("<|im_end|>")
        # All of the probability on the first token of the label: what stands before it must not count.
        prefix = RENDERER.build_generation_prompt([said("user", "")]).length
        tokens = prompt.to_ints()
        first = len(tokens) - len(TOKENIZER.encode(f"{label}<|im_end|>"))
        logprobs: list[float | None] = [None, *([-3.0] * (len(tokens) - 1))]
        assert first > prefix
        logprobs[first:] = [math.log(self.probabilities[label]), *([0.0] * (len(tokens) - first - 1))]
        return logprobs

    async def sample(self, prompt: tinker.ModelInput, num_samples: int, params: tinker.SamplingParams) -> Any:
        assert params.temperature == 0 and num_samples == 1
        tokens = TOKENIZER.encode(f"{self.text}<|im_end|>")
        return SimpleNamespace(sequences=[SimpleNamespace(tokens=tokens)])


PROBABILITIES = st.floats(1e-6, 1.0)


@settings(max_examples=30)
@given(a=PROBABILITIES, b=PROBABILITIES, tie=PROBABILITIES)
def test_expected_is_the_mean_label_among_the_three(a: float, b: float, tie: float) -> None:
    model = PreferenceModelFromChatRenderer(RENDERER, Answers({"A": a, "B": b, "Tie": tie}))  # pyright: ignore[reportArgumentType]
    score = asyncio.run(model(comparison()))
    assert score == pytest.approx((b - a) / (a + b + tie), abs=1e-9) and -1 <= score <= 1


@pytest.mark.parametrize(("text", "score"), [("A", -1.0), ("B", 1.0), ("Tie", 0.0)])
def test_sampled_is_the_label_that_was_said(text: str, score: float) -> None:
    model = PreferenceModelFromChatRenderer(RENDERER, Answers({}, text), "sampled")  # pyright: ignore[reportArgumentType]
    assert asyncio.run(model(comparison())) == score


def test_what_is_no_label_is_an_error_and_no_tie() -> None:
    model = PreferenceModelFromChatRenderer(RENDERER, Answers({}, "Both"), "sampled")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TrainingError, match=r"answered 'Both'.*scoring=expected"):
        asyncio.run(model(comparison()))
    with pytest.raises(ConfigurationError, match="scoring='mode' is unknown; use expected or sampled"):
        PreferenceModelFromChatRenderer(RENDERER, Answers({}), "mode")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("label", LABELS)
def test_the_label_follows_the_prompt_token_for_token(label: Any) -> None:
    """What the model is trained on is what it is asked."""
    renderer = ComparisonRendererFromChatRenderer(RENDERER)
    prompt = renderer.build_generation_prompt(comparison()).to_ints()
    tokens, weights = renderer.to_model_input_weights(LabeledComparison(comparison(), label))
    assert tokens.to_ints()[: len(prompt)] == prompt
    trained = [token for token, weight in zip(tokens.to_ints(), weights.tolist(), strict=True) if weight]
    assert str(TOKENIZER.decode(trained)).strip() == f"{label}<|im_end|>" and not weights[: len(prompt)].any()


class Longer(PreferenceModel):
    """Likes the longer reply, and position B a little."""

    def __init__(self, bias: float = 0.25):
        self.bias = bias
        self.asked: list[Comparison] = []

    async def __call__(self, comparison: Comparison) -> float:
        self.asked.append(comparison)
        a, b = (len(get_text_content(c[0])) for c in (comparison.completion_A, comparison.completion_B))
        return 0.5 * ((b > a) - (a > b)) + self.bias


def test_both_ways_removes_a_preference_for_a_position() -> None:
    one = comparison("short", "much longer")
    assert asyncio.run(compare(Longer(), one, both_ways=False)) == 0.75
    assert asyncio.run(compare(Longer(), one, both_ways=True)) == 0.5


def test_text_is_preprocessed_in_strings_and_parts() -> None:
    messages: list[Message] = [
        said("assistant", "abc"),
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "abc"}, {"type": "text", "text": "abc"}]},
    ]
    changed = preprocess_content(messages, str.upper)
    assert changed[0]["content"] == "ABC"
    assert changed[1]["content"] == [{"type": "thinking", "thinking": "abc"}, {"type": "text", "text": "ABC"}]
    assert messages[0]["content"] == "abc"


def policy(text: str) -> FakeSamplingClient:
    def reply(call: SampleCall) -> list[int]:
        return TOKENIZER.encode(f"{text}<|im_end|>")

    return FakeSamplingClient(0, reply, [], [])


def test_win_rate_counts_the_policys_replies_against_completion_a() -> None:
    model = Longer(bias=0.25)

    def build() -> Awaitable[PreferenceModel]:
        return asyncio.sleep(0, model)

    comparisons = [comparison("x"), comparison("x" * 50), comparison("hello")]
    evaluator = ComparisonEvaluator(build, comparisons, "qwen3_instruct", TINY, name="test", seed=1)
    metrics = asyncio.run(evaluator(policy("hello")))
    assert metrics["test/win_rate"] == pytest.approx((0.75 + 0.25 + 0.5) / 3)
    assert metrics["test/stderr"] == pytest.approx(0.25 / math.sqrt(3))
    assert metrics["test/reply_tokens"] == len(TOKENIZER.encode("hello<|im_end|>"))
    assert len(model.asked) == 6
    assert {get_text_content(asked.completion_B[0]) for asked in model.asked[::2]} == {"hello"}
    with pytest.raises(ConfigurationError, match="comparisons is empty"):
        ComparisonEvaluator(build, [], "qwen3_instruct", TINY)


def test_label_accuracy_asks_both_orders_and_leaves_ties_out() -> None:
    labeled = [LabeledComparison(comparison(), "A"), LabeledComparison(comparison(), "Tie")]
    always_a = Answers({"A": 0.8, "B": 0.1, "Tie": 0.1})
    metrics = asyncio.run(LabelAccuracyEvaluator(labeled, RENDERER)(always_a))  # pyright: ignore[reportArgumentType]
    assert metrics["test/accuracy"] == 0.5 and metrics["test/position_bias"] == pytest.approx(-0.7)
    with pytest.raises(ConfigurationError, match="comparisons: all are ties"):
        LabelAccuracyEvaluator(labeled[1:], RENDERER)
