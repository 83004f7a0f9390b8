"""An episode of another environment in which every reply also contains a prediction."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from tinker_cookbook.completers import StopCondition
from tinker_cookbook.env.shipped.model_aware.extra_question import add_text, ids_from
from tinker_cookbook.env.shipped.model_aware.lessons import Probe
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Message, Renderer, get_text_content
from tinker_cookbook.renderers.decoding import decode_tokens
from tinker_cookbook.renderers.replies import strip_stop
from tinker_cookbook.rl.problem_env import OneTurnEnv
from tinker_cookbook.rl.rollout_runner import step_env
from tinker_cookbook.rl.types import (
    STOP_METRIC_PREFIX,
    Action,
    ActionExtra,
    Env,
    InitialObservationOverflow,
    Metrics,
    StepResult,
    StopReason,
)
from tinker_cookbook.utils.lazy import tinker

_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,6}(?:\.[0-9]{1,12})?|\.[0-9]{1,12})")
_OF_THE_INNER_ENV = (
    "rollout_limits", "rollout_ended", "set_max_tool_calls", "set_parse_error_policy", "set_tool_execution", "set_tool_errors",
)  # fmt: skip
"""Optional methods that `run_rollout` looks for in an env."""


class Intuition(NamedTuple):
    """A predicted change, in nats, with its sign, and the answer. None: missing."""

    predicted: float | None
    answer: str | None


def parse_intuition(reply: str) -> Intuition:
    """Parse a reply. Without ANSWER both are None."""
    rest_of_reply, predicted = reply.lstrip(), None
    if rest_of_reply.startswith("PREDICTION:"):
        line, _, rest = rest_of_reply.partition("\n")
        number = _NUMBER.fullmatch(line.removeprefix("PREDICTION:").strip(" "))
        rest_of_reply, predicted = rest.lstrip(), float(number[0]) if number else None
    if not rest_of_reply.startswith("ANSWER:"):
        return Intuition(None, None)
    return Intuition(predicted, rest_of_reply.removeprefix("ANSWER:").lstrip(" "))


def read_reply(renderer: Renderer, action: Sequence[int]) -> tuple[Intuition, list[int]]:
    """Parse a sampled reply, and extract the ids of its answer: the sampled ones, including the policy's stop token.

    Tool calls belong to the answer. Without an answer only the stop remains.
    """
    message, _ = renderer.parse_response(list(action))
    text, body = get_text_content(message), strip_stop(renderer, action)
    intuition, end = parse_intuition(text), list(action[len(body) :])
    if intuition.answer is None:
        return intuition, end
    whole = decode_tokens(renderer.tokenizer, body)
    before_answer = text[: len(text) - len(intuition.answer)].strip()
    at = whole.find(before_answer, _end_of_thinking(message, whole))
    if at < 0:  # the renderer's text differs from the sampled one, so the ids of the answer are unknown
        return Intuition(None, None), end
    start = at + len(before_answer)
    while whole.startswith(" ", start):
        start += 1
    return intuition, [*ids_from(renderer, body, start), *end]


def _end_of_thinking(message: Message, whole: str) -> int:
    """Index in a reply's text at which the separated reasoning ends; it may contain drafts of the reply."""
    end, content = 0, message["content"]
    for part in content if isinstance(content, list) else []:
        if part["type"] == "thinking" and (at := whole.find(part["thinking"].strip(), end)) >= 0:
            end = at + len(part["thinking"].strip())
    return end


def meta_task(probe: Probe) -> str:
    """The instructions added to the inner task."""
    return (
        "\n\nSuppose that you are trained for one step on your answer to this. By how much would that change your "
        f'log-probability of the reply "{probe.answer}" to "{probe.question}", in nats? Write two '
        "lines:\nPREDICTION: -0.01\nANSWER: your answer"
    )


class Turn(NamedTuple):
    """One reply: the prediction, the inner prompt, and the ids of the answer including the policy's stop."""

    predicted: float | None
    prompt: list[int]
    answer: list[int]

    @property
    def is_scored(self) -> bool:
        """Whether there is a prediction, and tokens to train on."""
        return self.predicted is not None and bool(self.answer)


class IntuitionEnv(Env):
    """Passes only the answers to an inner environment, and adds to every prompt a request to predict something about
    the answer.

    The inner environment never sees a prediction. The policy sees its own earlier ones: if the inner prompts extend
    each other, so do these.

    Attributes:
        turns: one per reply.
    """

    def __init__(self, inner: Env, probe: Probe, renderer: Renderer, max_prompt_tokens: int | None = None):
        self.inner, self.probe, self.renderer, self.max_prompt_tokens = inner, probe, renderer, max_prompt_tokens
        self.turns: list[Turn] = []
        self._asked: list[int] = []
        self._shown: list[int] = []

    def __getattr__(self, name: str) -> Any:
        if name in _OF_THE_INNER_ENV:
            return getattr(self.inner, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    @property
    def _is_too_long(self) -> bool:
        return self.max_prompt_tokens is not None and len(self._shown) > self.max_prompt_tokens

    async def initial_observation(self) -> tuple[tinker.ModelInput, StopCondition] | InitialObservationOverflow:
        first = await self.inner.initial_observation()
        if isinstance(first, InitialObservationOverflow):
            return first
        self._asked = self._ids(first[0])
        self._shown = self._first_prompt()
        if self._is_too_long:
            return InitialObservationOverflow(0.0, {"context_overflow": 1.0})
        return tinker.ModelInput.from_ints(self._shown), first[1]

    def _first_prompt(self) -> list[int]:
        if not isinstance(self.inner, OneTurnEnv):
            return add_text(self.renderer, self._asked, meta_task(self.probe))
        # Its messages are known, so the text of the last one is encoded as a whole.
        *before, last = self.inner.get_messages()
        question: Message = {"role": last["role"], "content": get_text_content(last) + meta_task(self.probe)}
        return self.renderer.build_generation_prompt([*before, question]).to_ints()

    def _ids(self, prompt: tinker.ModelInput) -> list[int]:
        if any(not isinstance(chunk, tinker.EncodedTextChunk) for chunk in prompt.chunks):
            raise ConfigurationError(
                f"gradient_intuition wraps environments of text, and a prompt of {type(self.inner).__name__} holds an image"
            )
        return prompt.to_ints()

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        intuition, answer = read_reply(self.renderer, action)
        result = await step_env(self.inner, answer, extra)
        self.turns.append(Turn(intuition.predicted, self._asked, answer))
        metrics: Metrics = {
            **result.metrics,
            "answered": float(intuition.answer is not None),
            "predicted": float(intuition.predicted is not None),
        }
        if result.episode_done or result.next_observation is None:
            return replace(result, metrics=metrics)
        self._follow(list(action), answer, self._ids(result.next_observation))
        result = replace(result, next_observation=tinker.ModelInput.from_ints(self._shown), metrics=metrics)
        if self._is_too_long:
            ended = {"context_overflow": 1.0, STOP_METRIC_PREFIX + StopReason.CONTEXT_OVERFLOW.value: 1}
            return replace(result, episode_done=True, metrics=metrics | ended)
        return result

    def _follow(self, action: list[int], answer: list[int], following: list[int]) -> None:
        """The next prompt: the previous prompt and reply, extended by the inner environment; or its own prompt, if it
        renders anew.
        """
        before = [*self._asked, *answer]
        extends = following[: len(before)] == before
        shown = [*self._shown, *action, *following[len(before) :]] if extends else following
        self._asked, self._shown = following, add_text(self.renderer, shown, meta_task(self.probe))
