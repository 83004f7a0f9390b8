"""Prompt distillation: a prompted teacher labels lines of text, and a student learns to do it without the prompt.

This module has the labelling and the evaluation; training is ordinary supervised fine-tuning on the labelled
conversations. See Askell et al. 2021, "A General Language Assistant as a Laboratory for Alignment", section 2.1
(context distillation).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tinker_cookbook.clients import SamplingClient
from tinker_cookbook.completers import MessageCompleter
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Message, Renderer, get_text_content
from tinker_cookbook.runs.evaluation import SamplingClientEvaluator
from tinker_cookbook.utils.lazy import tinker
from tinker_cookbook.utils.misc_utils import gather_all
from tinker_cookbook.utils.seeds import derive_seed

CONCURRENCY = 64
"""Lines per wave; the next wave waits for the last reply, so that batching never depends on timing."""


@dataclass(frozen=True)
class Sampling:
    """Sampling settings of replies; temperature 0 is greedy."""

    max_tokens: int
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Labelled:
    """A line and the prompted teacher's reply. `answer` is extracted from the reply; None: it could not be parsed."""

    line: str
    reply: str
    answer: str | None


def read_answer(pattern: re.Pattern[str], reply: str) -> str | None:
    """The first group of the pattern's last match in a reply; None without a match."""
    matches = pattern.findall(reply)
    if not matches:
        return None
    return (matches[-1] if isinstance(matches[-1], str) else matches[-1][0]).strip()


def check_pattern(pattern: str) -> re.Pattern[str]:
    """Compile an answer pattern. Raises ConfigurationError unless it is a regular expression with a group."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigurationError(f"answer_pattern={pattern!r} is not a regular expression: {error}") from error
    if compiled.groups < 1:
        raise ConfigurationError(f"answer_pattern={pattern!r} has no group; put the answer in parentheses")
    return compiled


async def ask_lines(
    client: SamplingClient, renderer: Renderer, lines: Sequence[str], sampling: Sampling, system: str | None = None
) -> list[str]:
    """The model's replies to the lines, in order; each line is a user message after the system prompt, if there is one."""

    async def ask(number: int, line: str) -> str:
        messages: list[Message] = [{"role": "user", "content": line}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        params = tinker.SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            stop=renderer.get_stop_sequences(),
            seed=derive_seed(sampling.seed, "line", number),
        )
        response = await client.sample(renderer.build_generation_prompt(messages), 1, params)
        message, _ = renderer.parse_response(list(response.sequences[0].tokens))
        return get_text_content(message)

    replies: list[str] = []
    for first in range(0, len(lines), CONCURRENCY):
        wave = lines[first : first + CONCURRENCY]
        replies += await gather_all(ask(first + i, line) for i, line in enumerate(wave))
    return replies


async def label_lines(
    teacher: SamplingClient,
    renderer: Renderer,
    prompt: str,
    lines: Sequence[str],
    pattern: re.Pattern[str],
    sampling: Sampling,
) -> list[Labelled]:
    """The teacher's reply to each line, with `prompt` as its system prompt."""
    replies = await ask_lines(teacher, renderer, lines, sampling, prompt)
    return [Labelled(line, reply, read_answer(pattern, reply)) for line, reply in zip(lines, replies, strict=True)]


async def label_lines_by_text(
    teacher: MessageCompleter, prompt: str, lines: Sequence[str], pattern: re.Pattern[str]
) -> list[Labelled]:
    """Like `label_lines`, for a teacher that returns text: it may have any tokenizer."""

    async def ask(number: int, line: str) -> Labelled:
        messages: list[Message] = [{"role": "system", "content": prompt}, {"role": "user", "content": line}]
        reply = get_text_content(await teacher.fork("line", number)(messages))
        return Labelled(line, reply, read_answer(pattern, reply))

    return await gather_all(ask(number, line) for number, line in enumerate(lines))


class AgreementEvaluator(SamplingClientEvaluator):
    """Asks the lines without the prompt. <name>/agreement: fraction of replies with the teacher's answer;
    <name>/readable: fraction of replies with any answer.

    Args:
        lines: the lines to ask.
        answers: the teacher's answers to them.
    """

    def __init__(
        self,
        renderer: Renderer,
        lines: Sequence[str],
        answers: Sequence[str],
        pattern: re.Pattern[str],
        sampling: Sampling,
        name: str = "test",
    ):
        if not lines or len(lines) != len(answers):
            raise ConfigurationError(f"{len(lines)} lines and {len(answers)} answers: give one per line, at least one")
        self._renderer, self._lines, self._answers = renderer, list(lines), list(answers)
        self._pattern, self._sampling, self._name = pattern, sampling, name

    async def __call__(self, sampling_client: SamplingClient) -> dict[str, float]:
        replies = await ask_lines(sampling_client, self._renderer, self._lines, self._sampling)
        answers = [read_answer(self._pattern, reply) for reply in replies]
        agreeing = sum(answer == expected for answer, expected in zip(answers, self._answers, strict=True))
        return {
            f"{self._name}/agreement": agreeing / len(self._lines),
            f"{self._name}/readable": sum(answer is not None for answer in answers) / len(self._lines),
        }
