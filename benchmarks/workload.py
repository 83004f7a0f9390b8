"""The work of every contender: ragged prompts, groups of samples, completions that end at random.

A completion ends at the first of a set of stop tokens, 1/80 of the vocabulary: the end-of-sequence token, which some peers
require, and random others. A random-weight model is nearly uniform over its vocabulary, so lengths are geometric with mean
80, cut off at `MAX_NEW_TOKENS`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.models import EOS_ID, FIRST_WORD_ID

PROMPT_LENGTHS = (20, 31, 43, 54, 66, 77, 89, 100)
GROUP_SIZE = 8
MAX_NEW_TOKENS = 128
STOP_PROBABILITY = 1 / 80
PAIRS = 32


@dataclass(frozen=True)
class Workload:
    """Sampling work: `prompts_P` with `GROUP_SIZE` samples each, until one of `stops` or `max_new_tokens`."""

    prompts_P: list[list[int]]
    stops: list[int]
    vocab: int
    max_new_tokens: int
    group_size: int = GROUP_SIZE

    @property
    def rows(self) -> int:
        return len(self.prompts_P) * self.group_size

    def in_round(self, number: int) -> Workload:
        """The same with other prompts of the same lengths, so that no prefix cache has them from the round before."""
        rng = random.Random(number)
        ordinary = _ordinary(self.vocab, self.stops)
        return replace(self, prompts_P=[[rng.choice(ordinary) for _ in prompt] for prompt in self.prompts_P])


@dataclass(frozen=True)
class TrainingSequence:
    """Tokens of prompt and completion; the loss is on the completion."""

    tokens: list[int]
    prompt_length: int

    @property
    def completion(self) -> list[int]:
        return self.tokens[self.prompt_length :]


@dataclass(frozen=True)
class PreferencePair:
    """One prompt with the completion to prefer and the one to avoid, both ended by the end-of-sequence token."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]


def make_workload(vocab: int, max_new_tokens: int = MAX_NEW_TOKENS, seed: int = 0) -> Workload:
    """The same prompts and stop tokens for the same vocabulary and seed. Prompts have no stop token."""
    rng = random.Random(seed)
    count = max(1, round(vocab * STOP_PROBABILITY))
    stops = [EOS_ID, *sorted(rng.sample(range(FIRST_WORD_ID, vocab), count - 1))]
    ordinary = _ordinary(vocab, stops)
    prompts = [[rng.choice(ordinary) for _ in range(length)] for length in PROMPT_LENGTHS]
    return Workload(prompts, stops, vocab, max_new_tokens)


def _ordinary(vocab: int, stops: Sequence[int]) -> list[int]:
    return sorted(set(range(FIRST_WORD_ID, vocab)) - set(stops))


def training_sequences(workload: Workload, shared_prompts: bool = True, seed: int = 0) -> list[TrainingSequence]:
    """One sequence per row of the workload, shuffled. Lengths do not depend on `shared_prompts`.

    Args:
        shared_prompts: the samples of a group have the same prompt, as in RL; else each row has its own prompt.
    """
    rng = random.Random(seed)
    sequences = [
        (prompt, _completion(rng, workload.vocab, workload.max_new_tokens))
        for prompt in workload.prompts_P
        for _ in range(workload.group_size)
    ]
    rng.shuffle(sequences)
    if not shared_prompts:
        sequences = [(_tokens(rng, workload.vocab, len(prompt)), completion) for prompt, completion in sequences]
    return [TrainingSequence(prompt + completion, len(prompt)) for prompt, completion in sequences]


def preference_pairs(workload: Workload, pairs: int = PAIRS, seed: int = 0) -> list[PreferencePair]:
    """Pairs over the workload's prompts, in turn."""
    rng = random.Random(seed)

    def answer() -> list[int]:
        return [*_completion(rng, workload.vocab, workload.max_new_tokens - 1), EOS_ID]

    prompts = [workload.prompts_P[i % len(workload.prompts_P)] for i in range(pairs)]
    return [PreferencePair(prompt, answer(), answer()) for prompt in prompts]


def even_fraction(tokens: Sequence[int]) -> float:
    """The reward of the RL step: the share of even token ids."""
    return sum(token % 2 == 0 for token in tokens) / max(1, len(tokens))


def random_tokens(vocab: int, count: int, seed: int) -> list[int]:
    """Uniform over the ordinary words, stop tokens included."""
    return _tokens(random.Random(seed), vocab, count)


def _tokens(rng: random.Random, vocab: int, count: int) -> list[int]:
    return [rng.randrange(FIRST_WORD_ID, vocab) for _ in range(count)]


def _completion(rng: random.Random, vocab: int, longest: int) -> list[int]:
    length = 1
    while length < longest and rng.random() > STOP_PROBABILITY:
        length += 1
    return _tokens(rng, vocab, length)
