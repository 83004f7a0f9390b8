"""Checks of sampling clients: tokens, logprobs, seeds, stops, and agreement with the trainer's weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tinker

from tinker_local_backend.conformance.harness import Check, NonconformingError, expect, expect_close, offered
from tinker_local_backend.conformance.probe import (
    Probe,
    forward_logprobs,
    prompt,
    sampling_params,
    tensor,
    token_ids,
    train,
)

PROMPT = token_ids(10, 11)
TOPK = 4


def drawn(
    sampler: tinker.SamplingClient, seed: int | None = None, samples: int = 1, **options: object
) -> list[list[int]]:
    """Tokens of each sample after PROMPT."""
    reply = sampler.sample(prompt(PROMPT), samples, sampling_params(seed=seed, **options)).result()
    return [list(sequence.tokens) for sequence in reply.sequences]


def mean_difference(actual: object, expected: object) -> float:
    return float(np.abs(np.asarray(actual, dtype=np.float64) - np.asarray(expected, dtype=np.float64)).mean())


def expect_near(probe: Probe, actual: object, expected: object, what: str) -> None:
    """Raise NonconformingError unless two passes agree up to the rounding of the model's dtype."""
    difference, tolerance = mean_difference(actual, expected), probe.target.tolerance
    expect(difference <= tolerance, f"{what}: they differ by {difference:.3g} on average, more than {tolerance:g}")


def numbers(logprobs: Sequence[float | None] | None, what: str) -> list[float]:
    """Prompt logprobs without the first one, which must be None. Raises NonconformingError if another is missing."""
    expect(logprobs is not None, f"{what}: there are none")
    assert logprobs is not None
    expect(logprobs[0] is None, f"{what}: the first is {logprobs[0]}, and nothing precedes it: expected None")
    values = [value for value in logprobs[1:] if value is not None]
    expect(len(values) == len(logprobs) - 1, f"{what}: {len(logprobs) - 1 - len(values)} are missing")
    return values


def sample(probe: Probe) -> None:
    """A sample has max_tokens tokens where nothing stops it, a logprob for each, and an id."""
    reply = probe.base_sampler().sample(prompt(PROMPT), 2, sampling_params(seed=1)).result()
    expect(len(reply.sequences) == 2, f"{len(reply.sequences)} sequences for num_samples=2")
    for sequence in reply.sequences:
        count = len(sequence.tokens)
        expect(count == 16, f"{count} tokens, and max_tokens=16 with nothing to stop at")
        expect(sequence.stop_reason == "length", f"stop_reason is {sequence.stop_reason!r}, expected 'length'")
        logprobs = np.asarray(sequence.logprobs, dtype=np.float64)
        expect(logprobs.shape == (count,), f"{logprobs.shape} logprobs for {count} tokens")
        expect(np.isfinite(logprobs).all() and (logprobs <= 1e-6).all(), "a logprob is above 0 or not finite")
    ids = {sequence.sequence_id for sequence in reply.sequences}
    expect(len(ids) == 2, f"two sequences have {len(ids)} sequence_id")


def seeds(probe: Probe) -> None:
    """A seed gives the same tokens again; different seeds give different tokens."""
    sampler = probe.base_sampler()
    first = [drawn(sampler, seed) for seed in range(4)]
    again = [drawn(sampler, seed) for seed in range(4)]
    for seed, (one, other) in enumerate(zip(first, again, strict=True)):
        expect(one == other, f"seed {seed} gave {one[0]} and then {other[0]}")
    different = {tuple(tokens[0]) for tokens in first}
    expect(len(different) > 1, f"four seeds gave the same tokens, {first[0][0]}")


def num_samples(probe: Probe) -> None:
    """The samples of a request differ, and a seed gives all of them again."""
    sampler = probe.base_sampler()
    first, again = (drawn(sampler, 3, samples=6) for _ in range(2))
    expect(len(first) == 6, f"{len(first)} sequences for num_samples=6")
    expect(len({tuple(tokens) for tokens in first}) > 1, "six samples are the same")
    expect(first == again, "the same seed gave other samples")


def greedy(probe: Probe) -> None:
    """temperature=0, top_k=1 and a tiny top_p each give the likeliest tokens."""
    sampler = probe.base_sampler()
    for name, value in {"temperature": 0.0, "top_k": 1, "top_p": 1e-6}.items():
        tokens = drawn(sampler, 5, max_tokens=8, **{name: value})[0]
        params = sampling_params(max_tokens=1)
        reply = sampler.sample(prompt([*PROMPT, *tokens]), 1, params, True, 1).result()
        logprobs = numbers(reply.prompt_logprobs, "prompt_logprobs")[len(PROMPT) - 1 :]
        best = [(row or [(-1, math.inf)])[0][1] for row in (reply.topk_prompt_logprobs or [])[len(PROMPT) :]]
        # Two tokens may be as likely as each other, up to rounding.
        what = f"logprobs with {name}={value:g} and the largest"
        expect_close(logprobs, best, what, atol=3 * probe.target.tolerance)


def sampler_and_trainer(probe: Probe) -> None:
    """Logprobs while sampling, of compute_logprobs and of the trainer's forward agree, on trained weights."""
    trainer = probe.trained()
    sampler = trainer.save_weights_and_get_sampling_client().result()
    sequence = sampler.sample(prompt(PROMPT), 1, sampling_params(max_tokens=24, seed=2)).result().sequences[0]
    tokens = [*PROMPT, *sequence.tokens]
    expected = forward_logprobs(trainer, tokens)
    expect_near(probe, sequence.logprobs, expected[len(PROMPT) - 1 :], "sampled tokens and forward")
    scored = numbers(sampler.compute_logprobs(prompt(tokens)).result(), "compute_logprobs")
    expect_near(probe, scored, expected, "compute_logprobs and forward")


def trained_weights_are_sampled(probe: Probe) -> None:
    """A sampler of trained weights has those weights, not the base model's nor those of an earlier step."""
    trainer = probe.trainer()
    tokens = token_ids(12, 0)  # of the data that is trained on

    def scored(sampler: tinker.SamplingClient) -> float:
        return sum(numbers(sampler.compute_logprobs(prompt(tokens)).result(), "compute_logprobs"))

    base, values = scored(probe.base_sampler()), []
    for _ in range(2):
        for _ in range(4):
            train(trainer, rate=2e-3)
        values.append(scored(trainer.save_weights_and_get_sampling_client().result()))
    expect(
        base < values[0] < values[1], f"what is trained on has logprobs of {base:.4g}, {values[0]:.4g}, {values[1]:.4g}"
    )


def compute_logprobs(probe: Probe) -> None:
    """compute_logprobs returns None for the first token, and the trainer's logprob for each other one."""
    tokens = token_ids(20, 4)
    logprobs = probe.base_sampler().compute_logprobs(prompt(tokens)).result()
    expect(len(logprobs) == len(tokens), f"{len(logprobs)} logprobs for {len(tokens)} tokens")
    expected = forward_logprobs(probe.trainer(), tokens)  # a new adapter is the base model
    expect_near(probe, numbers(logprobs, "compute_logprobs"), expected, "compute_logprobs and forward of a new adapter")


def prompt_logprobs(probe: Probe) -> None:
    """include_prompt_logprobs and topk_prompt_logprobs agree with compute_logprobs and with each other."""
    sampler, tokens = probe.base_sampler(), token_ids(20, 4)
    reply = sampler.sample(prompt(tokens), 1, sampling_params(max_tokens=1), True, TOPK).result()
    logprobs = numbers(reply.prompt_logprobs, "prompt_logprobs")
    expected = numbers(sampler.compute_logprobs(prompt(tokens)).result(), "compute_logprobs")
    expect_near(probe, logprobs, expected, "prompt_logprobs and compute_logprobs")
    rows = reply.topk_prompt_logprobs
    expect(rows is not None and len(rows) == len(tokens), "topk_prompt_logprobs has no entry for each token")
    assert rows is not None
    expect(not rows[0], f"topk_prompt_logprobs begins with {rows[0]}, and nothing precedes the first token")
    for position, (row, token, logprob) in enumerate(zip(rows[1:], tokens[1:], logprobs, strict=True), start=1):
        _expect_topk(row, token, logprob, f"topk_prompt_logprobs[{position}]")


def _expect_topk(row: Sequence[tuple[int, float]] | None, token: int, logprob: float, what: str) -> None:
    """Raise NonconformingError unless a row is the TOPK likeliest of a distribution in which `token` has `logprob`."""
    expect(row is not None and len(row) == TOPK, f"{what} has {len(row or ())} entries, expected {TOPK}")
    assert row is not None
    values = [value for _, value in row]
    expect(values == sorted(values, reverse=True), f"{what} is not in descending order: {values}")
    expect(len({token for token, _ in row}) == TOPK, f"{what} names a token twice")
    expect(sum(math.exp(value) for value in values) <= 1.001, f"{what}: the probabilities sum to more than 1")
    if token in dict(row):
        expect_close(dict(row)[token], logprob, f"{what}: of the token itself", atol=0.02)
    else:
        expect(logprob <= values[-1] + 0.02, f"{what} lacks token {token}, which is likelier than its last entry")


def sample_topk(probe: Probe) -> None:
    """topk_sample_logprobs has the likeliest tokens of every sampled position."""
    sampler = probe.base_sampler()
    params = sampling_params(max_tokens=8, seed=4)
    reply = offered(lambda: sampler.sample(prompt(PROMPT), 1, params, topk_sample_logprobs=TOPK).result())
    sequence = reply.sequences[0]
    rows = sequence.topk_logprobs
    expect(rows is not None and len(rows) == len(sequence.tokens), "topk_logprobs has no entry for each token")
    assert rows is not None
    for position, (row, token, logprob) in enumerate(zip(rows, sequence.tokens, sequence.logprobs or [], strict=True)):
        _expect_topk(row, token, logprob, f"topk_logprobs[{position}]")


def stop_ids(probe: Probe) -> None:
    """A stop token ends the sample, and stays in it with its logprob."""
    sampler = probe.base_sampler()
    tokens = drawn(sampler, 6, max_tokens=12)[0]
    at = max(tokens.index(token) for token in set(tokens))
    reply = sampler.sample(prompt(PROMPT), 1, sampling_params(max_tokens=12, seed=6, stop=[tokens[at]])).result()
    sequence = reply.sequences[0]
    expect(list(sequence.tokens) == tokens[: at + 1], f"stop={[tokens[at]]}: {sequence.tokens}, without it {tokens}")
    expect(sequence.stop_reason == "stop", f"stop_reason is {sequence.stop_reason!r}, expected 'stop'")
    expect(len(sequence.logprobs or []) == at + 1, f"{len(sequence.logprobs or [])} logprobs for {at + 1} tokens")


def stop_strings(probe: Probe) -> None:
    """A stop string ends the sample with the token that completes it."""
    tokenizer = _tokenizer(probe)
    sampler = probe.base_sampler()
    for seed in range(6):
        tokens = drawn(sampler, seed, max_tokens=24)[0]
        texts = [tokenizer.decode(tokens[:count]) for count in range(len(tokens) + 1)]
        wanted = texts[12][len(texts[10]) :].strip()
        if wanted and wanted.isascii() and wanted.isprintable():
            break
    else:
        raise NonconformingError("six samples of 24 tokens contain no text to stop at")
    ends = next(count for count, text in enumerate(texts) if wanted in text)
    reply = sampler.sample(prompt(PROMPT), 1, sampling_params(max_tokens=24, seed=seed, stop=[wanted])).result()
    sequence = reply.sequences[0]
    expect(list(sequence.tokens) == tokens[:ends], f"stop={[wanted]}: {sequence.tokens}, expected {tokens[:ends]}")
    expect(sequence.stop_reason == "stop", f"stop_reason is {sequence.stop_reason!r}, expected 'stop'")


def _tokenizer(probe: Probe) -> Any:
    if probe.target.tokenizer is None:
        return probe.trainer().get_tokenizer()
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(probe.target.tokenizer)


def prompt_logprobs_last_n(probe: Probe) -> None:
    """prompt_logprobs_last_n scores only the last tokens, with the same logprobs."""
    sampler, tokens, last = probe.base_sampler(), token_ids(20, 4), 5
    logprobs = offered(lambda: sampler.compute_logprobs(prompt(tokens), last).result())
    every = sampler.compute_logprobs(prompt(tokens)).result()
    expect(logprobs[:-last] == [None] * (len(tokens) - last), f"{len(tokens) - last} must be None: {logprobs[:-last]}")
    expect_near(probe, logprobs[-last:], every[-last:], f"the last {last} and those of the whole prompt")


def target_prompt_logprobs(probe: Probe) -> None:
    """target_prompt_logprobs scores the ids that it names at each position."""
    sampler, tokens = probe.base_sampler(), token_ids(12, 4)
    others = token_ids(len(tokens) - 1, 8)
    asked = tensor(np.stack([tokens[1:], others], axis=1), "int64")
    params = sampling_params(max_tokens=1)
    reply = offered(lambda: sampler.sample(prompt(tokens), 1, params, True, target_prompt_logprobs=asked).result())
    expect(reply.target_prompt_logprobs is not None, "target_prompt_logprobs is missing")
    assert reply.target_prompt_logprobs is not None
    logprobs = reply.target_prompt_logprobs.to_numpy().reshape(len(tokens) - 1, 2)
    expect_near(
        probe, logprobs[:, 0], numbers(reply.prompt_logprobs, "prompt_logprobs"), "those of the prompt's tokens"
    )
    swapped = [*tokens[:5], others[4], *tokens[6:]]
    alone = numbers(sampler.compute_logprobs(prompt(swapped)).result(), "compute_logprobs")
    expect_close(logprobs[4, 1], alone[4], "that of another token", atol=3 * probe.target.tolerance)


def prompt_alt_tokens(probe: Probe) -> None:
    """prompt_alt_tokens_k draws alternatives to each token of the prompt, with their logprobs."""
    sampler, tokens = probe.base_sampler(), token_ids(12, 4)
    params = sampling_params(max_tokens=1, seed=1)
    reply = offered(lambda: sampler.sample(prompt(tokens), 1, params, prompt_alt_tokens_k=2).result())
    drawn_ids, logprobs = (np.asarray(each.to_numpy()) for each in _pair(reply))
    expect(drawn_ids.shape == logprobs.shape == (len(tokens) - 1, 2), f"shapes {drawn_ids.shape}, {logprobs.shape}")
    swapped = [*tokens[:5], int(drawn_ids[4, 1]), *tokens[6:]]
    alone = numbers(sampler.compute_logprobs(prompt(swapped)).result(), "compute_logprobs")
    expect_close(logprobs[4, 1], alone[4], "logprob of a drawn token", atol=3 * probe.target.tolerance)


def _pair(reply: tinker.SampleResponse) -> tuple[tinker.TensorData, tinker.TensorData]:
    expect(reply.prompt_alt_tokens is not None, "prompt_alt_tokens is missing")
    assert reply.prompt_alt_tokens is not None
    return reply.prompt_alt_tokens.tokens, reply.prompt_alt_tokens.logprobs


def concurrent_requests(probe: Probe) -> None:
    """Concurrent requests each get their own result."""
    sampler = probe.base_sampler()
    prompts = [token_ids(6 + number, 20 + number) for number in range(12)]
    scores = [sampler.compute_logprobs(prompt(tokens)) for tokens in prompts]
    params = sampling_params(temperature=0.0, max_tokens=4)
    samples = [sampler.sample(prompt(tokens), 1, params, True) for tokens in prompts]
    for number, (tokens, score, reply) in enumerate(zip(prompts, scores, samples, strict=True)):
        alone = numbers(sampler.compute_logprobs(prompt(tokens)).result(), "compute_logprobs")
        together = numbers(score.result(), "compute_logprobs")
        expect(len(together) == len(alone), f"request {number} has {len(together)} logprobs, expected {len(alone)}")
        expect_near(probe, together, alone, f"request {number} among others and alone")
        sampled = numbers(reply.result().prompt_logprobs, "prompt_logprobs")
        expect(len(sampled) == len(alone), f"sample {number} has {len(sampled)} prompt logprobs, expected {len(alone)}")
        expect_near(probe, sampled, alone, f"sample {number} among others and alone")


def cancellation(probe: Probe) -> None:
    """Requests that are cancelled neither block nor change the ones after them."""
    sampler = probe.base_sampler()
    before = drawn(sampler, 9)
    longest = min(4096, (probe.context_length or 4096) - len(PROMPT) - 1)
    futures = [sampler.sample(prompt(PROMPT), 4, sampling_params(max_tokens=longest, seed=seed)) for seed in range(8)]
    for future in futures:
        future.future().cancel()
    expect(drawn(sampler, 9) == before, "the same seed gave other tokens after requests were cancelled")


CHECKS = tuple(
    Check(ask)
    for ask in (
        sample,
        seeds,
        num_samples,
        greedy,
        sampler_and_trainer,
        trained_weights_are_sampled,
        compute_logprobs,
        prompt_logprobs,
        sample_topk,
        stop_ids,
        stop_strings,
        prompt_logprobs_last_n,
        target_prompt_logprobs,
        prompt_alt_tokens,
        concurrent_requests,
        cancellation,
    )
)
