"""What may be asked beside a sample: scores of the prompt and the likeliest tokens, against transformers in float64."""

import math
from typing import Any

import numpy as np
import pytest
import tinker
import torch

from benchmarks.reference import Reference
from tests.engine.devices import here
from tests.engine.helpers import (
    VOCABULARY,
    assert_near,
    assert_same_tokens,
    at_once,
    make_training_client,
    params,
    prompt,
    random_tokens,
)
from tinker_local_backend import RequestError, SamplingClient, ServiceClient, TrainingClient
from tinker_local_backend.engine.model import head

N = 30
TOKENS = random_tokens(N, 3)
ATOL = 1e-4


def sample(client: SamplingClient, tokens: list[int] = TOKENS, temperature: float = 1.0, **fields: Any) -> Any:
    """One request for one token. What comes with it depends on the fields."""
    return client.sample(prompt(tokens), 1, params(1, temperature, seed=5, stop=[]), **fields).result()


@pytest.fixture
def expected(training: TrainingClient, reference: Reference) -> torch.Tensor:
    """(N - 1, vocabulary): row i has the logprobs of prompt position i + 1."""
    with torch.no_grad():
        return reference.logprobs(TOKENS, reference.adapter_of(training), 8.0)[:-1]


def targets(width: int, seed: int = 0, holes: float = 0.5) -> np.ndarray:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, VOCABULARY, (N - 1, width))
    return np.where(rng.random(ids.shape) < holes, -1, ids)


def looked_up(scores: torch.Tensor, ids: np.ndarray) -> np.ndarray:
    """The scores of these ids, 0 for -1."""
    table = torch.from_numpy(ids.astype(np.int64))
    return torch.where(table >= 0, scores.gather(1, table.clamp(min=0)), 0.0).numpy()


def assert_likeliest(ids: np.ndarray, logprobs: np.ndarray, scores: torch.Tensor) -> None:
    """The k likeliest tokens of each row, in order."""
    k = ids.shape[1]
    assert_near(logprobs, scores.topk(k).values, ATOL)
    assert_near(looked_up(scores, ids), logprobs, ATOL)
    assert all(len(set(row)) == k for row in ids.tolist())


@pytest.mark.parametrize("k", [1, 5, VOCABULARY])
def test_topk_prompt_logprobs(sampler: SamplingClient, expected: torch.Tensor, k: int) -> None:
    response = sample(sampler, topk_prompt_logprobs=k)
    table = response.topk_prompt_logprobs_np
    assert table.token_ids.shape == table.logprobs.shape == (N, k)
    assert (table.token_ids.dtype, table.logprobs.dtype) == (np.int32, np.float32)
    assert_likeliest(table.token_ids[1:], table.logprobs[1:], expected)
    rows = response.topk_prompt_logprobs
    assert rows[0] is None and len(rows) == N
    assert rows[1:] == [
        list(zip(*pair, strict=True))
        for pair in zip(table.token_ids[1:].tolist(), table.logprobs[1:].tolist(), strict=True)
    ]
    assert response.prompt_logprobs is None


@pytest.mark.parametrize("temperature", [1.0, 0.0, 0.5])
def test_scores_of_the_prompt_are_those_of_temperature_one(
    sampler: SamplingClient, expected: torch.Tensor, temperature: float
) -> None:
    ids = targets(2)
    response = sample(
        sampler,
        temperature=temperature,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
        target_prompt_logprobs=tinker.TensorData.from_numpy(ids),
    )
    own = looked_up(expected, np.array(TOKENS[1:])[:, None])[:, 0]
    assert_near(response.prompt_logprobs_np[1:], own, ATOL)
    table = response.topk_prompt_logprobs_np
    assert_likeliest(table.token_ids[1:], table.logprobs[1:], expected)
    assert_near(response.target_prompt_logprobs.to_numpy(), looked_up(expected, ids), ATOL)


@pytest.mark.parametrize("width", [1, 7])
def test_target_prompt_logprobs_of_a_dense_tensor(sampler: SamplingClient, expected: torch.Tensor, width: int) -> None:
    ids = targets(width)
    found = sample(sampler, target_prompt_logprobs=tinker.TensorData.from_numpy(ids)).target_prompt_logprobs
    assert (found.dtype, found.shape, found.sparse_crow_indices) == ("float32", [N - 1, width], None)
    assert_near(found.to_numpy(), looked_up(expected, ids), ATOL)
    assert (found.to_numpy()[ids == -1] == 0).all()


def test_target_prompt_logprobs_of_a_sparse_tensor_come_in_its_layout(
    sampler: SamplingClient, expected: torch.Tensor
) -> None:
    """Rows without any id, and id 0, which must not be taken for nothing."""
    ids = targets(6, holes=0.85)
    ids[3], ids[4, 2], ids[5] = -1, 0, np.arange(6)
    given = tinker.TensorData.from_torch_sparse(torch.from_numpy(ids), pad_value=-1)
    assert given.sparse_crow_indices is not None
    found = sample(sampler, target_prompt_logprobs=given).target_prompt_logprobs
    assert (found.sparse_crow_indices, found.sparse_col_indices) == (
        given.sparse_crow_indices,
        given.sparse_col_indices,
    )
    assert (found.dtype, found.shape, len(found.data)) == ("float32", [N - 1, 6], (ids >= 0).sum())
    assert_near(found.to_numpy(), looked_up(expected, ids), ATOL)


def test_targets_may_change_after_the_call(sampler: SamplingClient, expected: torch.Tensor) -> None:
    ids = targets(2)
    before = ids.copy()
    blocker = sampler.sample(prompt(TOKENS), 4, params(40, stop=[]))
    future = sampler.sample(prompt(TOKENS), 1, params(1), target_prompt_logprobs=tinker.TensorData.from_numpy(ids))
    ids[:] = 10**6
    found = future.result().target_prompt_logprobs
    assert found is not None
    assert_near(found.to_numpy(), looked_up(expected, before), ATOL)
    blocker.result()


@pytest.mark.parametrize("last_n", [1, 4, N - 1])
def test_only_the_last_prompt_logprobs(sampler: SamplingClient, expected: torch.Tensor, last_n: int) -> None:
    """Earlier positions are empty; targets and alternatives are not concerned."""
    ids = targets(2)
    fields: dict[str, Any] = {
        "include_prompt_logprobs": True,
        "topk_prompt_logprobs": 3,
        "target_prompt_logprobs": tinker.TensorData.from_numpy(ids),
        "prompt_alt_tokens_k": 2,
    }
    whole, part = sample(sampler, **fields), sample(sampler, prompt_logprobs_last_n=last_n, **fields)
    assert part.prompt_logprobs[:-last_n] == [None] * (N - last_n)
    assert_near(part.prompt_logprobs_np[-last_n:], whole.prompt_logprobs_np[-last_n:], atol=1e-6, rtol=1e-7)
    assert part.topk_prompt_logprobs[:-last_n] == [None] * (N - last_n)
    for found, wanted in zip(part.topk_prompt_logprobs[-last_n:], whole.topk_prompt_logprobs[-last_n:], strict=True):
        assert [token for token, _ in found] == [token for token, _ in wanted]
        assert_near([x for _, x in found], [x for _, x in wanted], atol=1e-6, rtol=1e-7)
    assert_near(part.target_prompt_logprobs.to_numpy(), looked_up(expected, ids), ATOL)
    assert_same_draws(part.prompt_alt_tokens.tokens.to_numpy(), whole.prompt_alt_tokens.tokens.to_numpy())


def assert_same_draws(found: np.ndarray, expected: np.ndarray) -> None:
    """Tokens that are each drawn by themselves."""
    assert found.shape == expected.shape
    assert_same_tokens(found.reshape(-1, 1).tolist(), expected.reshape(-1, 1).tolist())


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_alternatives_follow_the_tempered_distribution(
    training: TrainingClient, sampler: SamplingClient, reference: Reference, temperature: float
) -> None:
    """Pearson's statistic per position, tokens pooled by their probability to cells of about 16; its mean is df, its standard
    deviation sqrt(2 df).
    """
    k, tokens = 1500, TOKENS[:7]
    with torch.no_grad():
        scores = reference.logprobs(tokens, reference.adapter_of(training), 8.0, temperature)[:-1]
    alternatives = sample(sampler, tokens, temperature, prompt_alt_tokens_k=k).prompt_alt_tokens
    ids, logprobs = alternatives.tokens.to_numpy(), alternatives.logprobs.to_numpy()
    assert ids.shape == logprobs.shape == (6, k) and (ids.dtype, logprobs.dtype) == (np.int64, np.float32)
    assert_near(logprobs, looked_up(scores, ids), ATOL)
    for row, probs in zip(ids, scores.exp().numpy(), strict=True):
        counts, wanted = np.bincount(row, minlength=VOCABULARY), probs * k
        order = np.argsort(-wanted)
        before = np.cumsum(wanted[order]) - wanted[order]
        cell = np.minimum(before // 16, (k - 16) // 16).astype(int)  # what is left joins the last one
        drawn, expected = (np.bincount(cell, weights=values[order]) for values in (counts, wanted))
        drawn, expected = drawn[expected > 0], expected[expected > 0]
        statistic, freedom = ((drawn - expected) ** 2 / expected).sum(), len(drawn) - 1
        assert freedom >= 3 and expected.min() >= 5
        assert statistic < freedom + 5 * math.sqrt(2 * freedom)


def test_alternatives_of_temperature_zero_are_the_likeliest(sampler: SamplingClient, expected: torch.Tensor) -> None:
    ids = sample(sampler, temperature=0.0, prompt_alt_tokens_k=2).prompt_alt_tokens.tokens.to_numpy()
    np.testing.assert_array_equal(ids[:, 0], ids[:, 1])
    assert_near(looked_up(expected, ids[:, :1]), expected.amax(dim=-1, keepdim=True), ATOL)
    if here().is_reference:
        np.testing.assert_array_equal(ids[:, 0], expected.argmax(dim=-1))


def test_alternatives_depend_on_the_seed_and_on_nothing_else(
    sampler: SamplingClient, base_sampler: SamplingClient
) -> None:
    def ask(seed: int, k: int = 4, client: SamplingClient = sampler) -> tinker.APIFuture[Any]:
        return client.sample(prompt(TOKENS), 2, params(2, seed=seed, stop=[]), prompt_alt_tokens_k=k)

    first = ask(1).result()
    draws = first.prompt_alt_tokens.tokens.to_numpy()
    busy = at_once(
        lambda: [ask(3), base_sampler.sample(prompt(TOKENS[:9]), 3, params(9)), ask(9, client=base_sampler), ask(1)]
    )
    assert_same_draws(busy[-1].prompt_alt_tokens.tokens.to_numpy(), draws)
    assert_same_draws(ask(1, k=2).result().prompt_alt_tokens.tokens.to_numpy(), draws[:, :2])
    assert (busy[0].prompt_alt_tokens.tokens.to_numpy() != draws).any()
    assert all((draws[:, i] != draws[:, j]).any() for i in range(4) for j in range(i))
    plain = sampler.sample(prompt(TOKENS), 2, params(2, seed=1, stop=[])).result()
    assert_same_tokens((s.tokens for s in first.sequences), (s.tokens for s in plain.sequences))


def test_a_prompt_of_one_token_has_nothing_to_score(sampler: SamplingClient) -> None:
    response = sample(
        sampler,
        TOKENS[:1],
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
        target_prompt_logprobs=tinker.TensorData.from_numpy(np.zeros((0, 3), dtype=np.int64)),
        prompt_alt_tokens_k=2,
    )
    assert response.prompt_logprobs == [None] and response.topk_prompt_logprobs == [None]
    assert response.target_prompt_logprobs.shape == [0, 3]
    assert response.prompt_alt_tokens.tokens.shape == response.prompt_alt_tokens.logprobs.shape == [0, 2]


@pytest.mark.parametrize("last_n", [None, 3, 8, 20])
def test_long_prompts_are_scored_in_chunks(
    sampler: SamplingClient, monkeypatch: pytest.MonkeyPatch, last_n: int | None
) -> None:
    """Seven positions at a time give what one piece gives."""
    fields: dict[str, Any] = {
        "include_prompt_logprobs": True,
        "topk_prompt_logprobs": 3,
        "target_prompt_logprobs": tinker.TensorData.from_numpy(targets(2)),
        "prompt_alt_tokens_k": 3,
        "prompt_logprobs_last_n": last_n,
    }
    whole = sample(sampler, **fields)
    scored = sample(sampler, include_prompt_logprobs=True, prompt_logprobs_last_n=last_n)
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", 7 * VOCABULARY)
    parts = sample(sampler, **fields)
    parts_scored = sample(sampler, include_prompt_logprobs=True, prompt_logprobs_last_n=last_n)
    arrays = [
        (
            r.prompt_logprobs_np,
            p.prompt_logprobs_np,
            r.topk_prompt_logprobs_np.logprobs,
            r.target_prompt_logprobs.to_numpy(),
        )
        for r, p in ((whole, scored), (parts, parts_scored))
    ]
    for left, right in zip(*arrays, strict=True):
        assert_near(left, right, atol=1e-5)
    assert_same_draws(whole.topk_prompt_logprobs_np.token_ids, parts.topk_prompt_logprobs_np.token_ids)
    one, other = whole.prompt_alt_tokens, parts.prompt_alt_tokens
    assert_same_draws(one.tokens.to_numpy(), other.tokens.to_numpy())
    same = one.tokens.to_numpy() == other.tokens.to_numpy()
    assert_near(one.logprobs.to_numpy()[same], other.logprobs.to_numpy()[same], atol=1e-5)
    assert np.isfinite(whole.prompt_logprobs_np).sum() == (last_n or N - 1)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_the_likeliest_tokens_come_with_each_sample(
    training: TrainingClient, sampler: SamplingClient, reference: Reference, temperature: float
) -> None:
    """Requests of one batch that ask for different numbers of them, or for none."""
    adapter, widths = reference.adapter_of(training), (3, 0, 1, 20)
    request = params(6, temperature, seed=2, stop=[], top_k=8)
    responses = at_once(
        lambda: [sampler.sample(prompt(TOKENS[:9]), 2, request, topk_sample_logprobs=k) for k in widths]
    )
    for k, response in zip(widths, responses, strict=True):
        for sequence in response.sequences:
            if k == 0:
                assert sequence.topk_logprobs is None and sequence.topk_logprobs_np is None
                continue
            whole = [*TOKENS[:9], *sequence.tokens]
            with torch.no_grad():
                scores = reference.logprobs(whole[:-1], adapter, 8.0, temperature or 1.0)[8:]
            table = sequence.topk_logprobs_np
            assert table.token_ids.shape == (6, k) and table.token_ids.dtype == np.int32
            assert_likeliest(table.token_ids, table.logprobs, scores)
            rows = sequence.topk_logprobs
            assert [len(row) for row in rows] == [k] * 6
            if k == 20:  # more than top_k lets through: every sampled token is among them, with its own logprob
                found = [dict(row)[token] for row, token in zip(rows, sequence.tokens, strict=True)]
                assert_near(found, sequence.logprobs, atol=1e-5, rtol=1e-7)
            if temperature == 0:
                assert [row[0][0] for row in rows] == sequence.tokens


def test_the_likeliest_tokens_end_where_the_sample_ends(sampler: SamplingClient) -> None:
    (free,) = sampler.sample(prompt(TOKENS), 1, params(6, seed=2, stop=[])).result().sequences
    stopped = sampler.sample(prompt(TOKENS), 1, params(6, seed=2, stop=[free.tokens[2]]), topk_sample_logprobs=2)
    (sequence,) = stopped.result().sequences
    rows = sequence.topk_logprobs
    assert rows is not None and len(rows) == len(sequence.tokens) <= 3


def dense(array: object, dtype: Any = np.int64) -> tinker.TensorData:
    return tinker.TensorData.from_numpy(np.asarray(array, dtype=dtype))


BAD = {
    "top k of prompt below 0": ({"topk_prompt_logprobs": -1}, "topk_prompt_logprobs must .* 1536, got -1"),
    "top k of prompt above": ({"topk_prompt_logprobs": 1537}, "topk_prompt_logprobs must .* got 1537"),
    "half a top k": ({"topk_prompt_logprobs": 1.5}, "topk_prompt_logprobs must be an integer .* got 1.5"),
    "top k of sample below 0": ({"topk_sample_logprobs": -2}, "topk_sample_logprobs must .* got -2"),
    "top k of sample no number": ({"topk_sample_logprobs": "5"}, "topk_sample_logprobs must .* got 5"),
    "alternatives below 0": ({"prompt_alt_tokens_k": -1}, "prompt_alt_tokens_k must .* got -1"),
    "alternatives above": ({"prompt_alt_tokens_k": 2000}, "prompt_alt_tokens_k must .* got 2000"),
    "last 0": ({"include_prompt_logprobs": True, "prompt_logprobs_last_n": 0}, r"prompt_logprobs_last_n .* 1\.\.29"),
    "last all": ({"include_prompt_logprobs": True, "prompt_logprobs_last_n": N}, "prompt_logprobs_last_n .* got 30"),
    "last half": ({"include_prompt_logprobs": True, "prompt_logprobs_last_n": 2.5}, "prompt_logprobs_last_n .* got 2.5"),
    "last of nothing": ({"prompt_logprobs_last_n": 3}, "prompt_logprobs_last_n .* set include_prompt_logprobs"),
    "float targets": ({"target_prompt_logprobs": dense(targets(2), np.float32)}, "target_prompt_logprobs is float32"),
    "flat targets": ({"target_prompt_logprobs": dense(range(29))}, r"target_prompt_logprobs has shape \(29,\)"),
    "a row too many": ({"target_prompt_logprobs": dense([[1]] * N)}, r"has shape \(30, 1\); .* must be \(29, K\)"),
    "target too large": (
        {"target_prompt_logprobs": dense([[1536]] * (N - 1))}, "target_prompt_logprobs holds ids .* to 1536"
    ),
    "target below -1": ({"target_prompt_logprobs": dense([[-2]] * (N - 1))}, "target_prompt_logprobs holds ids from -2"),
    "inconsistent sparse targets": (
        {"target_prompt_logprobs": tinker.TensorData([1], "int64", [N - 1, 2], [0] * N, [0])},
        "target_prompt_logprobs is not a consistent tensor",
    ),
    "half a sparse tensor": (
        {"target_prompt_logprobs": tinker.TensorData([1], "int64", [N - 1, 2], [0] * N)},
        "target_prompt_logprobs is not a consistent tensor",
    ),
    "half a sample": ({"num_samples": 1.5}, "num_samples must be at least 1, got 1.5"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_values_are_refused_at_the_call(base_sampler: SamplingClient, name: str) -> None:
    fields, message = BAD[name]
    with pytest.raises(RequestError, match=message):
        base_sampler.sample(prompt(TOKENS), **{"num_samples": 1, "sampling_params": params(), **fields})
    assert sample(base_sampler).sequences


def test_scores_of_weights_that_have_diverged_are_an_error_and_others_go_on(
    service: ServiceClient, tied_model: str, base_sampler: SamplingClient
) -> None:
    client = make_training_client(service, tied_model)
    with torch.no_grad():
        client._run.state.adapter.b["lm_head"].fill_(math.nan)
    snapshot = client.save_weights_and_get_sampling_client().result()
    broken, scored = snapshot.compute_logprobs(prompt(TOKENS)), base_sampler.compute_logprobs(prompt(TOKENS))
    with pytest.raises(RequestError, match=r"at prompt positions 1\.\.29 .*weights have diverged"):
        broken.result()
    assert all(x is not None for x in scored.result()[1:])
