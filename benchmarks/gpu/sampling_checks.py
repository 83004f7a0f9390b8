"""Check that the sampler's logprobs are right, and that samples do not depend on the rest of the batch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import tinker

from benchmarks.gpu.case import Case, teacher_forced
from benchmarks.gpu.models import fill_adapter
from benchmarks.ours import completion_datum
from benchmarks.workload import TrainingSequence
from tinker_local_backend import SamplingClient, TrainingClient
from tinker_local_backend.engine.cuda.execution import DECODING, CudaExecution
from tinker_local_backend.engine.cuda.generation import BurstGenerator
from tinker_local_backend.engine.sampling.requests import SamplingRequest
from tinker_local_backend.engine.sampling.sampler import SamplingResult, Ticket

SAMPLING = (
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 1.5},
    {"temperature": 0.0},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 50, "top_p": 0.7},
)
TOKENS = 24
SAMPLES = 4


def _params(seed: int, **fields: float) -> tinker.SamplingParams:
    return tinker.SamplingParams(max_tokens=TOKENS, seed=seed, stop=[], **fields)  # pyright: ignore[reportArgumentType]


def _input(tokens: list[int]) -> tinker.ModelInput:
    return tinker.ModelInput.from_ints(tokens)


def sampled_equals_teacher_forced(case: Case) -> None:
    """For ragged prompts and all sampling settings, reported logprobs equal those of the trainer's pass at that temperature."""
    sampler = case.sampler()
    for fields in SAMPLING:
        futures = [sampler.sample(_input(prompt), SAMPLES, _params(7, **fields)) for prompt in case.prompts]
        found, sequences, starts = [], [], []
        for prompt, future in zip(case.prompts, futures, strict=True):
            for sequence in future.result().sequences:
                assert sequence.logprobs is not None
                found.extend(sequence.logprobs)
                sequences.append([*prompt, *sequence.tokens])
                starts.append(len(prompt) - 1)
        forced = teacher_forced(case.training, sequences, fields["temperature"])
        expected = np.concatenate([scores[start:] for scores, start in zip(forced, starts, strict=True)])
        words = ", ".join(f"{key} {value:g}" for key, value in fields.items())
        case.compare(f"sampled against teacher-forced, {words}", found, expected)


def adapters_in_one_batch(case: Case) -> None:
    """Interleaved rows of three adapters and the base model in one batch: each has the logprobs of its own trainer."""
    clients = [case.training]
    for seed in (11, 12):
        client = case.engine.service.create_lora_training_client(case.model.name, rank=8, seed=seed).result()
        fill_adapter(client._run.state.adapter, seed, size=0.03)
        clients.append(client)
    plain = case.engine.service.create_lora_training_client(case.model.name, rank=4, seed=5).result()  # B is zero
    samplers: list[SamplingClient] = [c.save_weights_and_get_sampling_client().result() for c in clients]
    samplers.append(case.engine.base_sampler())
    owners = [*clients, plain]
    futures = [
        (owner, prompt, sampler.sample(_input(prompt), 1, _params(seed)))
        for seed in range(2)
        for prompt in case.prompts
        for owner, sampler in zip(owners, samplers, strict=True)
    ]
    for k, owner in enumerate(owners):
        found, sequences, starts = [], [], []
        for who, prompt, future in futures:
            if who is owner:
                (sequence,) = future.result().sequences
                found.extend(sequence.logprobs or [])
                sequences.append([*prompt, *sequence.tokens])
                starts.append(len(prompt) - 1)
        forced = teacher_forced(owner, sequences)
        expected = np.concatenate([scores[start:] for scores, start in zip(forced, starts, strict=True)])
        who_is_it = "base model" if owner is plain else f"adapter {k + 1}"
        case.compare(f"mixed batch, {who_is_it}", found, expected)


def prompt_logprobs(case: Case) -> None:
    """compute_logprobs of a snapshot against the trainer's forward pass."""
    sampler = case.sampler()
    found = [sampler.compute_logprobs(_input(prompt)).result()[1:] for prompt in case.prompts]
    expected = teacher_forced(case.training, case.prompts)
    flat = [value for scores in found for value in scores if value is not None]
    case.compare("prompt logprobs", flat, np.concatenate(expected))


def seeds_alone_and_in_a_crowd(case: Case) -> None:
    """A seed gives the same tokens whatever else is in the batch, up to rounding."""
    sampler = case.sampler()
    # At a low temperature few draws are close to the border between two tokens, where rounding decides.
    chosen = [(prompt, seed) for prompt in case.prompts for seed in range(4)]
    alone = [
        sampler.sample(_input(prompt), 1, _params(seed, temperature=0.5)).result().sequences[0].tokens
        for prompt, seed in chosen
    ]
    crowd = [sampler.sample(_input(case.prompts[0]), 8, _params(100 + i)) for i in range(4)]
    futures = [sampler.sample(_input(prompt), 1, _params(seed, temperature=0.5)) for prompt, seed in chosen]
    together = [future.result().sequences[0].tokens for future in futures]
    for future in crowd:
        future.result()
    same = float(np.mean([left == right for left, right in zip(alone, together, strict=True)]))
    case.findings.check(
        f"{case.name}: seeds alone and in a crowd, share of sequences that differ",
        1 - same,
        1 - case.tolerance.same_tokens,
        f"{len(chosen)} sequences of {TOKENS} tokens",
    )
    distinct = len({tuple(tokens) for tokens in sampler_group(sampler, case.prompts[0])})
    case.findings.require(f"{case.name}: samples of one request differ", distinct > 1, f"{distinct} of 8 are distinct")


EXACT_ROWS, EXACT_CACHE = 8, 4096
"""Rows per step, and cache tokens, of the generator in `exact_rows`."""


def exact_rows(case: Case) -> None:
    """With steps of a fixed size and separate prefills a sample has the same bits alone and in a large batch. No library
    guarantees this; the check shows whether matrix products on this device do."""
    execution = case.model.execution
    if not (isinstance(execution, CudaExecution) and execution.runs(DECODING)):
        return
    adapter = case.adapter.snapshot(case.model.dtype)
    requests = [
        SamplingRequest(tuple(prompt), adapter if i % 2 else None, 1, TOKENS, temperature=0.8, seed=i)
        for i, prompt in enumerate(case.prompts)
    ]

    def sampled(*chosen: SamplingRequest) -> list[tuple[list[int], list[float]]]:
        seeds = itertools.count(1).__next__
        generator = BurstGenerator(case.model, EXACT_CACHE, seeds, execution.graphs, exact_rows=EXACT_ROWS)
        found: list[list[SamplingResult | BaseException]] = [[] for _ in chosen]
        for request, results in zip(chosen, found, strict=True):
            generator.add(Ticket(request, results.append, lambda: False))
        while generator.busy:
            generator.step()
        samples = []
        for (result,) in found:
            if isinstance(result, BaseException):
                raise result
            samples.append((result.sequences[0].tokens, result.sequences[0].logprobs))
        return samples

    def on_worker() -> int:
        alone = [sampled(request)[0] for request in requests]
        return sum(one != other for one, other in zip(alone, sampled(*requests), strict=True))

    differ = case.engine.service._engine.submit("exact rows", on_worker).result()
    name = f"{case.name}: exact rows, sequences whose bits differ alone and in a crowd"
    case.findings.check(name, differ, 0, f"{len(requests)} sequences, steps of {EXACT_ROWS} rows")


def sampler_group(sampler: SamplingClient, prompt: list[int]) -> list[list[int]]:
    """Eight samples of one request."""
    return [sequence.tokens for sequence in sampler.sample(_input(prompt), 8, _params(3)).result().sequences]


def snapshots_are_frozen(case: Case) -> None:
    """Training does not change an earlier snapshot, and a new snapshot has the change."""
    sampler = case.sampler()
    tokens = [*case.prompts[2], *case.prompts[0]]
    before = _scores(sampler, tokens)
    train_a_step(case.training, case.prompts, learning_rate=1e-2)
    after, new = _scores(sampler, tokens), _scores(case.sampler(), tokens)
    case.compare("snapshot after a training step", after, before)
    moved = float(np.abs(new - before).mean())
    case.findings.require(
        f"{case.name}: a new snapshot has the step", moved > 10 * case.tolerance.mean, f"mean change {moved:.2g}"
    )


def train_a_step(client: TrainingClient, sequences: Sequence[list[int]], learning_rate: float) -> None:
    """One step of cross-entropy on whole sequences."""
    data = [completion_datum(TrainingSequence(tokens, prompt_length=1)) for tokens in sequences]
    client.forward_backward(data, "cross_entropy")
    client.optim_step(tinker.AdamParams(learning_rate=learning_rate)).result()


def _scores(sampler: SamplingClient, tokens: list[int]) -> np.ndarray:
    return np.array(sampler.compute_logprobs(_input(tokens)).result()[1:], dtype=np.float64)


CHECKS = (
    sampled_equals_teacher_forced,
    adapters_in_one_batch,
    prompt_logprobs,
    seeds_alone_and_in_a_crowd,
    exact_rows,
    snapshots_are_frozen,
)
