"""How often a preference model prefers the policy's replies to given ones, and how accurate a preference model is."""

import math
from collections.abc import Awaitable, Callable, Sequence
from statistics import fmean, stdev

from tinker_cookbook.clients import SamplingClient
from tinker_cookbook.completers import TinkerTokenCompleter
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.preference.types import (
    LABEL_SCORES,
    Comparison,
    LabeledComparison,
    PreferenceModel,
    PreferenceModelFromChatRenderer,
    open_preference_model,
)
from tinker_cookbook.renderers import Content, Message, Renderer, TextPart, get_renderer_of_model
from tinker_cookbook.runs.evaluation import SamplingClientEvaluator
from tinker_cookbook.utils.misc_utils import gather_all


class ComparisonEvaluator(SamplingClientEvaluator):
    """The policy answers each prompt, and the preference model compares its reply (B) with the comparison's completion_A.

    Metrics, under `<name>/`: win_rate, the mean of (preference + 1) / 2, so a tie counts one half; stderr of that mean; and
    reply_tokens, the mean length.

    Args:
        comparisons: prompts with the replies to beat; completion_B is ignored.
        preference_model_builder: opens the preference model, at the first evaluation.
        both_ways: also compare with A and B exchanged and average, to cancel position bias.
        max_tokens: longest reply of the policy.
        content_preprocessor: applied to the text of messages before the preference model sees them.
        seed: each evaluation draws the same random numbers.
    """

    def __init__(
        self,
        preference_model_builder: Callable[[], Awaitable[PreferenceModel] | PreferenceModel],
        comparisons: Sequence[Comparison],
        renderer_name: str,
        model_name_for_tokenizer: str,
        both_ways: bool = True,
        max_tokens: int = 1024,
        content_preprocessor: Callable[[str], str] | None = None,
        temperature: float = 1.0,
        seed: int | None = None,
        name: str = "comparisons",
    ):
        if not comparisons:
            raise ConfigurationError("comparisons is empty: an evaluation needs at least one")
        self._builder = preference_model_builder
        self._comparisons = list(comparisons)
        self._renderer = get_renderer_of_model(renderer_name, model_name_for_tokenizer)
        self._both_ways, self._max_tokens, self._preprocess = both_ways, max_tokens, content_preprocessor
        self._temperature, self._seed, self._name = temperature, seed, name
        self._model: PreferenceModel | None = None

    async def __call__(self, sampling_client: SamplingClient) -> dict[str, float]:
        model = self._model = self._model or await open_preference_model(self._builder)
        policy = TinkerTokenCompleter(sampling_client, self._max_tokens, self._temperature, seed=self._seed)
        outcomes = await gather_all(
            self._compare(model, policy.fork("comparison", i), comparison)
            for i, comparison in enumerate(self._comparisons)
        )
        wins = [win for win, _ in outcomes]
        metrics = {
            "win_rate": fmean(wins),
            "stderr": stdev(wins) / math.sqrt(len(wins)) if len(wins) > 1 else 0.0,
            "reply_tokens": fmean(tokens for _, tokens in outcomes),
        }
        return {f"{self._name}/{key}": value for key, value in metrics.items()}

    async def _compare(
        self, model: PreferenceModel, policy: TinkerTokenCompleter, comparison: Comparison
    ) -> tuple[float, int]:
        prompt = self._renderer.build_generation_prompt(comparison.prompt_conversation)
        reply = await policy(prompt, self._renderer.get_stop_sequences())
        message, _ = self._renderer.parse_response(reply.tokens)
        asked = Comparison(
            comparison.prompt_conversation,
            preprocess_content(comparison.completion_A, self._preprocess),
            preprocess_content([message], self._preprocess),
        )
        preference = await compare(model, asked, self._both_ways)
        return (preference + 1) / 2, len(reply.tokens)


class LabelAccuracyEvaluator(SamplingClientEvaluator):
    """Evaluates the sampled model as a preference model: how often it agrees with the labels.

    Each comparison is asked in both orders. Metrics, under `<name>/`: accuracy, over comparisons without ties, and
    position_bias, the mean preference for B over all orders (0 for a model without position bias).
    """

    def __init__(self, comparisons: Sequence[LabeledComparison], renderer: Renderer, name: str = "test"):
        self._decided = [one for one in comparisons if one.label != "Tie"]
        if not self._decided:
            raise ConfigurationError(
                "comparisons: all are ties, or there are none, so there is nothing to be right about"
            )
        self._renderer, self._name = renderer, name

    async def __call__(self, sampling_client: SamplingClient) -> dict[str, float]:
        model = PreferenceModelFromChatRenderer(self._renderer, sampling_client)
        orders = [order for one in self._decided for order in (one, one.swap())]
        preferences = await gather_all(model(order.comparison) for order in orders)
        right = [p * LABEL_SCORES[order.label] > 0 for p, order in zip(preferences, orders, strict=True)]
        return {f"{self._name}/accuracy": fmean(right), f"{self._name}/position_bias": fmean(preferences)}


async def compare(model: PreferenceModel, comparison: Comparison, both_ways: bool) -> float:
    """The preference for B in [-1, 1]; with both ways, the mean over both orders."""
    if not both_ways:
        return await model(comparison)
    forward, backward = await gather_all(model(order) for order in (comparison, comparison.swap()))
    return (forward - backward) / 2


def preprocess_content(messages: Sequence[Message], preprocess: Callable[[str], str] | None) -> list[Message]:
    """The messages with `preprocess` applied to their text; other parts of multi-part contents are unchanged."""
    if preprocess is None:
        return list(messages)
    return [{**message, "content": _preprocessed(message["content"], preprocess)} for message in messages]


def _preprocessed(content: Content, preprocess: Callable[[str], str]) -> Content:
    if isinstance(content, str):
        return preprocess(content)
    return [
        TextPart(type="text", text=preprocess(part["text"])) if part["type"] == "text" else part for part in content
    ]
