"""Difference of sampler and trainer logprobs in long conversations: every turn adds an observation and a sampled answer.

Each prompt is the conversation so far, so all but the newest observation comes from the prefix cache; the trainer scores each
whole conversation at the end, in one pass. Agent rollouts are sampled and trained in the same way.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import tinker
import torch

from benchmarks.gpu.case import teacher_forced
from benchmarks.gpu.marks import AGREEMENT
from benchmarks.gpu.models import fill_adapter, random_model
from benchmarks.gpu.visit import Visit
from benchmarks.ours import LocalEngine
from benchmarks.workload import random_tokens
from tinker_local_backend import SamplingClient


@dataclass
class Conversation:
    """The tokens of a conversation, and the start and logprobs of each sampled answer."""

    tokens: list[int] = field(default_factory=list)
    answers: list[tuple[int, npt.NDArray[np.float64]]] = field(default_factory=list)
    cached: int = 0
    """cached tokens of all its prompts together"""


def run(visit: Visit) -> None:
    """Measure the shape of the section `agreement`, in bfloat16, with an adapter on every linear but the head."""
    scale, findings = visit.scale, visit.findings
    turns, observed, sampled, rows = scale.turns
    length = turns * (observed + sampled)
    model = random_model(scale.agreement_shape, visit.device, torch.bfloat16, positions=length + 1)
    vocabulary = min(model.vocab_size, 1500)
    with LocalEngine.of(model, visit.rank) as engine:
        fill_adapter(engine.training._run.state.adapter, seed=1)
        conversations = sample_conversations(engine.adapter_sampler(), vocabulary, rows, turns, observed, sampled)
        add = findings.table(
            f"Sampler against trainer, {scale.agreement_shape}, bfloat16: conversations of {length:,} tokens, {observed:,} "
            f"observed and {sampled} sampled in each turn",
            ["turns", "tokens before", "sampled tokens", "KL (k3)", "RMS", "median |d|", "largest"],
        )
        prompts = sum(range(observed, length, observed + sampled)) * rows
        cached = sum(conversation.cached for conversation in conversations)
        findings.data["cached share"] = cached / prompts
        forced = [teacher_forced(engine.training, [conversation.tokens])[0] for conversation in conversations]
        worst = 0.0
        for low, high in itertools.pairwise((0, *scale.turn_borders)):
            d = np.concatenate([differences(c, f, low, high) for c, f in zip(conversations, forced, strict=True)])
            kl = float(np.mean(np.exp(-d) - 1 + d))
            numbers = [kl, float(np.sqrt(np.mean(d**2))), float(np.median(np.abs(d))), float(np.abs(d).max())]
            before = low * (observed + sampled) + observed
            add([f"{low + 1} to {high}", f"{before:,}", f"{d.size:,}", *(f"{value:.1e}" for value in numbers)])
            findings.check(f"KL of sampler and trainer, turns {low + 1} to {high}", kl, AGREEMENT.bound)
            worst = float(np.maximum(worst, kl))  # NaN stays
        findings.record("turns", shape=scale.agreement_shape, turns=turns, tokens=length, kl=worst)


def sample_conversations(
    sampler: SamplingClient, vocabulary: int, rows: int, turns: int, observed: int, sampled: int
) -> list[Conversation]:
    """`rows` concurrent conversations, each with different random observations."""
    conversations = [Conversation() for _ in range(rows)]
    for turn in range(turns):
        futures = []
        for i, conversation in enumerate(conversations):
            conversation.tokens += random_tokens(vocabulary, observed, seed=1000 * i + turn)
            params = tinker.SamplingParams(max_tokens=sampled, temperature=1.0, stop=[], seed=turn)
            futures.append(sampler.sample(tinker.ModelInput.from_ints(conversation.tokens), 1, params))
        for conversation, future in zip(conversations, futures, strict=True):
            response = future.result()
            (sequence,) = response.sequences
            conversation.cached += response.prompt_cache_hit_tokens or 0
            conversation.answers.append((len(conversation.tokens), np.array(sequence.logprobs, dtype=np.float64)))
            conversation.tokens += sequence.tokens
    return conversations


def differences(
    conversation: Conversation, forced: npt.NDArray[np.float32], low: int, high: int
) -> npt.NDArray[np.float64]:
    """log q - log p of the tokens sampled in turns low, ..., high - 1. `forced`: the trainer's logprobs of tokens 1, 2, ..."""
    parts = [logprobs - forced[at - 1 : at - 1 + len(logprobs)] for at, logprobs in conversation.answers[low:high]]
    return np.concatenate(parts)
