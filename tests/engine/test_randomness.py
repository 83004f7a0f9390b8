"""A seed means the same tokens whatever else is going on, and nothing here touches anybody else's random state."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.reference import Reference
from tests.engine.devices import here
from tests.engine.helpers import (
    STEP,
    assert_repeats,
    assert_same_tokens,
    cross_entropy_datum,
    make_training_client,
    params,
    prompt,
    random_tokens,
    tokens_of,
)
from tinker_local_backend import SamplingClient, ServiceClient, TrainingClient
from tinker_local_backend.engine.sampling.token_choice import mix_seed, uniforms

TOKENS = random_tokens(9, 0)


def test_a_seed_gives_the_same_tokens_alone_and_within_a_full_batch(
    sampler: SamplingClient, base_sampler: SamplingClient
) -> None:
    alone = tokens_of(sampler, TOKENS, 3, seed=11)
    others = [sampler.sample(prompt(random_tokens(5 + i, i)), 2, params(20, seed=i)) for i in range(12)]
    others += [base_sampler.sample(prompt(TOKENS), 2, params(5)) for _ in range(3)]
    same_prompt = sampler.sample(prompt(TOKENS), 4, params(seed=12))
    crowded = sampler.sample(prompt(TOKENS), 3, params(seed=11))
    later = [sampler.sample(prompt(TOKENS), 1, params(2, seed=i)) for i in range(5)]
    assert_same_tokens((s.tokens for s in crowded.result().sequences), alone)
    for future in (*others, same_prompt, *later):
        assert future.result().sequences


def test_more_samples_begin_with_those_of_fewer(sampler: SamplingClient) -> None:
    assert_same_tokens(tokens_of(sampler, TOKENS, 4, seed=11)[:2], tokens_of(sampler, TOKENS, 2, seed=11))


def test_a_longer_limit_begins_with_the_shorter_completion(sampler: SamplingClient) -> None:
    short, long = (tokens_of(sampler, TOKENS, max_tokens=n, seed=2, stop=[])[0] for n in (4, 12))
    assert_same_tokens([long[:4]], [short])


def test_samples_of_a_request_differ(sampler: SamplingClient) -> None:
    samples = tokens_of(sampler, TOKENS, 8, seed=3, stop=[])
    assert len({tuple(s) for s in samples}) == 8


def test_other_seeds_and_no_seed_give_other_tokens(sampler: SamplingClient) -> None:
    seeded = [tuple(tokens_of(sampler, TOKENS, seed=seed, stop=[])[0]) for seed in (0, 1, 2, 2**63, -1)]
    unseeded = [tuple(tokens_of(sampler, TOKENS, stop=[])[0]) for _ in range(4)]
    assert len({*seeded, *unseeded}) == 9


def test_neighbouring_seeds_share_no_sample(sampler: SamplingClient) -> None:
    """Seed s, sample 1 must not be seed s + 1, sample 0."""
    samples = [tuple(s) for seed in range(4) for s in tokens_of(sampler, TOKENS, 4, seed=seed, stop=[])]
    assert len(set(samples)) == 16


def unseeded_run(home: Path, model: str) -> list:
    """Adapter seeds and samples for which the caller names no seed."""
    with ServiceClient(home=home) as service:
        client = service.create_lora_training_client(model, rank=2).result()
        matrix = client._run.state.adapter.a["lm_head"].tolist()
        snapshot = client.save_weights_and_get_sampling_client().result()
        return [matrix, *(tokens_of(snapshot, TOKENS, 2) for _ in range(3))]


def test_tinker_local_seed_makes_everything_without_a_seed_reproducible(
    tmp_path: Path, tied_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_LOCAL_SEED", "5")
    first, second = unseeded_run(tmp_path, tied_model), unseeded_run(tmp_path, tied_model)
    monkeypatch.setenv("TINKER_LOCAL_SEED", "6")
    third = unseeded_run(tmp_path, tied_model)
    assert_repeats(first, second)
    assert all(a != b for a, b in zip(first, third, strict=True))
    assert first[1] != first[2]


def test_no_global_random_state_moves(tmp_path: Path, tied_model: str) -> None:
    """Neither by constructing, nor by training, nor by sampling with or without a seed."""

    def state() -> tuple:
        kind, keys, *rest = np.random.get_state()  # pyright: ignore[reportAssignmentType]
        device = torch.cuda.get_rng_state(here().device).tolist() if here().device.type == "cuda" else None
        return torch.get_rng_state().tolist(), device, random.getstate(), kind, np.asarray(keys).tolist(), rest

    before = state()
    with ServiceClient(home=tmp_path) as service:
        for seed in (None, 1):
            client = service.create_lora_training_client(tied_model, rank=2, seed=seed).result()
            client.forward_backward([cross_entropy_datum(6, 0)], "cross_entropy")
            client.optim_step(STEP)
            snapshot = client.save_weights_and_get_sampling_client("here").result()
            tokens_of(snapshot, TOKENS, 2, seed=seed)
            service.create_sampling_client(f"tinker://{client.model_id}/sampler_weights/here").result()
    assert state() == before


def test_global_seeds_do_not_reach_the_engine(sampler: SamplingClient) -> None:
    runs = []
    for _ in range(2):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            runs.append(tokens_of(sampler, TOKENS, 2, stop=[]))
    assert runs[0] != runs[1]


@pytest.mark.parametrize("limits", [{}, {"temperature": 0.7, "top_k": 12}], ids=str)
def test_first_tokens_are_distributed_like_the_softmax(
    training: TrainingClient, sampler: SamplingClient, reference: Reference, limits: dict
) -> None:
    """Pearson's statistic over 4000 samples, rare tokens pooled; its mean is df, its standard deviation sqrt(2 df)."""
    n, tokens = 4000, random_tokens(6, 1)
    with torch.no_grad():
        scores = reference.logprobs(tokens, reference.adapter_of(training), 8.0, limits.get("temperature", 1.0))[-1]
    probs = scores.exp()
    if "top_k" in limits:
        keep = probs.topk(limits["top_k"]).indices
        probs = torch.zeros_like(probs).index_copy(0, keep, probs[keep] / probs[keep].sum())
    expected = probs.numpy() * n
    futures = [sampler.sample(prompt(tokens), 500, params(1, seed=seed, stop=[], **limits)) for seed in range(n // 500)]
    counts = np.zeros_like(expected)
    for future in futures:
        for sequence in future.result().sequences:
            counts[sequence.tokens[0]] += 1
    assert counts[expected == 0].sum() == 0
    common = expected >= 10
    cells = [(counts[common], expected[common])]
    rest = expected[~common].sum()
    if rest >= 10:
        cells.append((np.array([counts[~common].sum()]), np.array([rest])))
    statistic = sum(float(((c - e) ** 2 / e).sum()) for c, e in cells)
    freedom = int(common.sum()) + (rest >= 10) - 1
    assert freedom >= 5
    assert statistic < freedom + 5 * np.sqrt(2 * freedom)


def test_uniforms_are_uniform_and_independent_across_seeds_and_positions() -> None:
    grid = np.stack(
        [uniforms(np.full(200, mix_seed(7, i), dtype=np.uint64), np.arange(200, dtype=np.uint64)) for i in range(200)]
    ).astype(np.float64)
    assert grid.min() >= 0 and grid.max() < 1
    counts, _ = np.histogram(grid, bins=50, range=(0, 1))
    assert ((counts - 800) ** 2 / 800).sum() < 49 + 5 * np.sqrt(98)
    centred = grid - 0.5
    for left, right in ((centred[1:], centred[:-1]), (centred[:, 1:], centred[:, :-1])):
        correlation = (left * right).mean() * 12
        assert abs(correlation) < 5 / np.sqrt(left.size)


def test_a_draw_depends_on_seed_and_position_only() -> None:
    seeds, positions = np.array([3, 9, 3], dtype=np.uint64), np.array([0, 4, 4], dtype=np.uint64)
    together = uniforms(seeds, positions)
    apart = [uniforms(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(3)]
    assert together.tolist() == apart
    assert len(set(apart)) == 3
    assert mix_seed(1, 2) != mix_seed(2, 1)
    assert mix_seed(1, 2) == mix_seed(1, 2)


def test_two_clients_with_one_seed_train_to_the_same_bits(service: ServiceClient, tied_model: str) -> None:
    """On the CPU; elsewhere to the same numbers up to rounding."""
    results = []
    for _ in range(2):
        client = make_training_client(service, tied_model)
        for step in range(3):
            client.forward_backward([cross_entropy_datum(7, step), cross_entropy_datum(3, step)], "cross_entropy")
            client.optim_step(STEP)
        snapshot = client.save_weights_and_get_sampling_client().result()
        sequences = snapshot.sample(prompt(TOKENS), 2, params(seed=0)).result().sequences
        results.append([(s.tokens, s.logprobs) for s in sequences])
    assert_repeats(*results)
