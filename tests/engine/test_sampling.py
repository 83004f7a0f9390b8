"""What a sample reports: the logprobs of the tokens, the stop token, the lengths."""

import numpy as np
import pytest
import tinker
import torch

from benchmarks.reference import Reference
from tests.engine.devices import here
from tests.engine.helpers import (
    assert_near,
    assert_same_tokens,
    datum,
    make_training_client,
    params,
    prompt,
    random_tokens,
    tolerance,
)
from tinker_local_backend import SamplingClient, ServiceClient, TrainingClient
from tinker_local_backend.engine.sampling.token_choice import RowParams, next_tokens, uniforms

PROMPTS = [random_tokens(n, n) for n in (1, 9, 30, 4)]


def sequences(client: SamplingClient, tokens: list[int], samples: int = 1, **fields) -> list[tinker.SampledSequence]:
    return list(client.sample(prompt(tokens), samples, params(**fields)).result().sequences)


@pytest.mark.parametrize(
    "limits", [{}, {"top_k": 5}, {"top_p": 0.6}, {"top_k": 50, "top_p": 0.8}, {"min_p": 0.3}], ids=str
)
@pytest.mark.parametrize("temperature", [0.5, 0.7, 1.0, 1.3])
def test_logprobs_are_those_of_the_tempered_distribution_before_truncation(
    training: TrainingClient, sampler: SamplingClient, reference: Reference, temperature: float, limits: dict
) -> None:
    """Against the trainer at the same temperature and against transformers, in a ragged batch."""
    fields = {"temperature": temperature, "seed": 1, "stop": [], **limits}
    futures = [sampler.sample(prompt(p), 2, params(6 + i, **fields)) for i, p in enumerate(PROMPTS)]
    adapter = reference.adapter_of(training)
    for tokens, future in zip(PROMPTS, futures, strict=True):
        for sequence in future.result().sequences:
            assert sequence.logprobs is not None
            expected = reference.completion_logprobs(tokens, sequence.tokens, adapter, 8.0, temperature)
            assert_near(sequence.logprobs, expected, atol=1e-4)
            whole = [*tokens, *sequence.tokens]
            scored = datum(whole[:-1], target_tokens=whole[1:], weights=np.zeros(len(whole) - 1, dtype=np.float32))
            output = training.forward([scored], "cross_entropy", {"temperature": temperature}).result()
            forced = output.loss_fn_outputs[0]["logprobs"].to_numpy()[len(tokens) - 1 :]
            assert_near(sequence.logprobs, forced, atol=1e-4)


def test_temperature_zero_is_the_argmax_and_reports_logprobs_of_temperature_one(
    training: TrainingClient, sampler: SamplingClient, reference: Reference
) -> None:
    adapter = reference.adapter_of(training)
    for tokens in PROMPTS:
        (sequence,) = sequences(sampler, tokens, max_tokens=6, temperature=0.0, stop=[])
        with torch.no_grad():
            scores = reference.logprobs([*tokens, *sequence.tokens][:-1], adapter, 8.0)[len(tokens) - 1 :]
        if here().is_reference:
            assert sequence.tokens == scores.argmax(dim=-1).tolist()
        chosen = scores.gather(1, torch.tensor(sequence.tokens)[:, None])[:, 0]
        assert_near(chosen, scores.amax(dim=-1), atol=1e-4)
        assert_near(sequence.logprobs, scores.amax(dim=-1), atol=1e-4)


def test_greedy_and_sampled_requests_share_a_batch(sampler: SamplingClient) -> None:
    alone = [sequences(sampler, PROMPTS[1], seed=3, temperature=t)[0].tokens for t in (0.0, 1.0, 0.5)]
    futures = [sampler.sample(prompt(PROMPTS[1]), 1, params(seed=3, temperature=t)) for t in (0.0, 1.0, 0.5)]
    assert_same_tokens((future.result().sequences[0].tokens for future in futures), alone)


def test_top_k_one_is_greedy(sampler: SamplingClient) -> None:
    for tokens in PROMPTS:
        greedy = sequences(sampler, tokens, temperature=0.0, stop=[])[0].tokens
        first_of_one = sequences(sampler, tokens, temperature=1.3, top_k=1, seed=5, stop=[])[0].tokens
        assert_same_tokens([first_of_one], [greedy])


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9])
def test_no_token_outside_the_nucleus(
    training: TrainingClient, sampler: SamplingClient, reference: Reference, top_p: float
) -> None:
    """The nucleus: the smallest set of most likely tokens whose mass reaches top_p."""
    tokens = PROMPTS[2]
    with torch.no_grad():
        probs = reference.logprobs(tokens, reference.adapter_of(training), 8.0)[-1].exp()
    # A token whose logprob is within rounding of another's may come before or after it.
    likelier = probs[None, :] > probs[:, None] * (1 if here().is_reference else 1 + tolerance(1e-4))
    nucleus = set(((likelier * probs).sum(dim=1) < top_p).nonzero()[:, 0].tolist())
    assert 1 <= len(nucleus) < (1000 if here().is_reference else 1200)
    drawn = {s.tokens[0] for s in sequences(sampler, tokens, 300, max_tokens=1, top_p=top_p, seed=0)}
    assert drawn <= nucleus
    assert len(drawn) > 1 or len(nucleus) == 1


@pytest.mark.parametrize(
    ("top_k", "top_p", "expected"), [(-1, 0.5, {0, 1}), (-1, 0.7, {0, 1, 2}), (-1, 0.3, {0}), (3, 1.0, {0, 1, 2})]
)
def test_every_token_of_the_nucleus_can_be_drawn(top_k: int, top_p: float, expected: set[int]) -> None:
    """Also the last one, which takes the mass over top_p."""
    tokens, _, _ = next_tokens(
        torch.log(torch.tensor([[0.4, 0.25, 0.2, 0.1, 0.05]], device=here().device)).expand(200, -1),
        RowParams([1.0] * 200, [top_k] * 200, [top_p] * 200, [0.0] * 200, range(200), here().device),
        np.zeros(200, dtype=np.uint64),
    )
    assert set(tokens.tolist()) == expected


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(-1, 1.0, 0.2), (-1, 1.0, 0.05), (-1, 0.6, 0.1), (4, 1.0, 0.3), (9, 0.8, 0.15), (-1, 1.0, 0.0)],
)
@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_what_is_drawn_under_min_p_is_what_a_float64_reference_draws(
    top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    """Tokens of at least min_p times the likeliest one's probability at this temperature; logprobs are of the whole."""
    rows, vocabulary = 400, 60
    logits_RV = np.random.default_rng(3).normal(scale=2.0, size=(rows, vocabulary)).astype(np.float32)
    columns = ([temperature] * rows, [top_k] * rows, [top_p] * rows, [min_p] * rows)
    positions = np.arange(rows, dtype=np.uint64)
    found, logprobs, _ = next_tokens(
        torch.tensor(logits_RV, device=here().device), RowParams(*columns, range(rows), here().device), positions
    )
    draws = uniforms(np.arange(rows, dtype=np.uint64), positions)
    kept_counts = set()
    for row, (logits, draw) in enumerate(zip(logits_RV.astype(np.float64) / temperature, draws, strict=True)):
        probs = np.exp(logits - logits.max())
        probs /= probs.sum()
        left = [token for token in np.argsort(-probs) if probs[token] >= min_p * probs.max()][
            : top_k if top_k > 0 else None
        ]
        mass_before = np.cumsum(probs[left]) - probs[left]
        kept = np.array(left)[mass_before < top_p * probs[left].sum()] if top_p < 1 else left
        kept_counts.add(len(kept))
        limited = np.where(np.isin(np.arange(vocabulary), kept), probs, 0.0)
        token = int(np.searchsorted(np.cumsum(limited), draw * limited.sum(), side="right"))
        assert int(found[row]) == token
        assert_near(logprobs[row : row + 1].cpu(), np.log(probs[token : token + 1]), atol=1e-5)
    assert len(kept_counts) > 1 or min_p == 0


def test_min_p_of_a_request_reaches_the_sampler(sampler: SamplingClient) -> None:
    """One alone is greedy, and rows of a batch keep their own; the SDK's class knows no min_p."""
    for tokens in PROMPTS:
        greedy = sequences(sampler, tokens, temperature=0.0, stop=[])[0].tokens
        assert_same_tokens(
            [sequences(sampler, tokens, temperature=1.3, min_p=1.0, seed=5, stop=[])[0].tokens], [greedy]
        )
    alone = [sequences(sampler, PROMPTS[1], seed=3, min_p=m)[0].tokens for m in (0.0, 1.0, 0.3)]
    futures = [sampler.sample(prompt(PROMPTS[1]), 1, params(seed=3, min_p=m)) for m in (0.0, 1.0, 0.3)]
    assert_same_tokens((future.result().sequences[0].tokens for future in futures), alone)
    assert len({*map(tuple, alone)}) > 1


def test_top_p_is_a_share_of_what_top_k_left() -> None:
    logits = torch.log(torch.tensor([[0.4, 0.2, 0.2, 0.1, 0.1]], device=here().device))
    # Of the top two, 2/3 and 1/3, the first alone reaches 0.6; of all five it would take two.
    tokens, logprobs, _ = next_tokens(
        logits.expand(200, -1),
        RowParams([1.0] * 200, [2] * 200, [0.6] * 200, [0.0] * 200, range(200), here().device),
        np.zeros(200, dtype=np.uint64),
    )
    assert set(tokens.tolist()) == {0}
    assert float(logprobs[0].exp()) == pytest.approx(0.4)


def common_token(client: SamplingClient, tokens: list[int], **fields) -> int:
    """A token that samples of this prompt contain, not at the start."""
    ids = [t for s in sequences(client, tokens, 8, max_tokens=12, stop=[], **fields) for t in s.tokens[2:]]
    return max(set(ids), key=ids.count)


def test_a_stop_token_is_kept_with_its_logprob_exactly_when_it_was_emitted(
    training: TrainingClient, sampler: SamplingClient, reference: Reference
) -> None:
    tokens, adapter = PROMPTS[1], reference.adapter_of(training)
    stop = common_token(sampler, tokens, seed=2)
    free = sequences(sampler, tokens, 8, max_tokens=12, seed=2, stop=[])
    stopped = sequences(sampler, tokens, 8, max_tokens=12, seed=2, stop=[stop])
    reasons = set()
    for long, short in zip(free, stopped, strict=True):
        end = long.tokens.index(stop) + 1 if stop in long.tokens else 12
        assert_same_tokens([short.tokens], [long.tokens[:end]])
        assert stop not in short.tokens[:-1] and len(short.tokens) <= 12
        assert short.stop_reason == ("stop" if stop in short.tokens else "length")
        assert short.logprobs is not None and len(short.logprobs) == len(short.tokens)
        expected = reference.completion_logprobs(tokens, short.tokens, adapter, 8.0)
        assert_near(short.logprobs, expected, atol=1e-4)
        reasons.add(short.stop_reason)
    assert reasons == {"stop", "length"}


def test_every_id_of_a_stop_list_is_a_stop_by_itself(sampler: SamplingClient) -> None:
    (free,) = sequences(sampler, PROMPTS[2], max_tokens=12, seed=9, stop=[])
    first, second = free.tokens[6], free.tokens[3]
    end = min(free.tokens.index(first), free.tokens.index(second)) + 1
    (both,) = sequences(sampler, PROMPTS[2], max_tokens=12, seed=9, stop=[first, second])
    if all(assert_same_tokens([both.tokens], [free.tokens[:end]])):
        assert both.stop_reason == "stop"


def test_a_stop_at_the_last_allowed_token_counts_as_a_stop(sampler: SamplingClient) -> None:
    (free,) = sequences(sampler, PROMPTS[2], max_tokens=4, seed=9, stop=[])
    end = free.tokens.index(free.tokens[-1]) + 1
    (sequence,) = sequences(sampler, PROMPTS[2], max_tokens=end, seed=9, stop=[free.tokens[-1]])
    if all(assert_same_tokens([sequence.tokens], [free.tokens[:end]])):
        assert sequence.stop_reason == "stop"


def test_no_stop_given_means_end_of_sequence_and_an_empty_list_means_none(
    service: ServiceClient, tied_model: str
) -> None:
    """A head adapter that pushes the model's end-of-sequence id up makes it come soon."""
    client = make_training_client(service, tied_model)
    tokens, end = PROMPTS[1], 1513
    for _ in range(25):
        data = datum(tokens, target_tokens=np.full(len(tokens), end), weights=np.ones(len(tokens), dtype=np.float32))
        client.forward_backward([data], "cross_entropy")
        client.optim_step(tinker.AdamParams(learning_rate=1e-2))
    snapshot = client.save_weights_and_get_sampling_client().result()
    for temperature in (0.0, 1.0):
        (default,) = sequences(snapshot, tokens, temperature=temperature, seed=0)
        assert default.tokens[-1] == end and end not in default.tokens[:-1]
        assert default.stop_reason == "stop"
    (never,) = sequences(snapshot, tokens, temperature=0.0, stop=[])
    assert never.tokens[0] == end and len(never.tokens) == 8 and never.stop_reason == "length"


@pytest.mark.parametrize("as_list", [False, True])
def test_a_stop_string_ends_a_sequence_also_across_token_borders(sampler: SamplingClient, as_list: bool) -> None:
    tokenizer = sampler.get_tokenizer()
    (free,) = sequences(sampler, PROMPTS[0], max_tokens=16, seed=4, stop=[])
    # The last character of one token and the first of the next.
    pieces = [str(tokenizer.decode([t])) for t in free.tokens]
    border = next(i for i in range(3, 12) if all("�" not in piece and piece for piece in pieces[i : i + 2]))
    stop = pieces[border][-1] + pieces[border + 1][:1]
    end = next(n for n in range(1, 17) if stop in tokenizer.decode(free.tokens[:n]))
    (sequence,) = sequences(
        sampler, PROMPTS[0], max_tokens=16, seed=4, stop=["never in any text", stop] if as_list else stop
    )
    assert sequence.logprobs is not None and len(sequence.logprobs) == len(sequence.tokens)
    if all(assert_same_tokens([sequence.tokens], [free.tokens[:end]])):
        assert sequence.stop_reason == "stop"


def test_strings_and_ids_in_one_list_are_stops_alike(sampler: SamplingClient) -> None:
    """The SDK's own check lets no such list through; the server's OpenAI-compatible routes make them."""
    tokens = sequences(sampler, PROMPTS[1], seed=4, max_tokens=8, stop=[])[0].tokens
    text = sampler.get_tokenizer().decode(tokens[2])
    for stop, length in ((["no such text", tokens[5]], 6), ([text, tokens[5]], 3)):
        mixed = tinker.SamplingParams.model_construct(**{**params(8, seed=4).model_dump(), "stop": stop})
        (sequence,) = sampler.sample(prompt(PROMPTS[1]), 1, mixed).result().sequences
        assert sequence.stop_reason == "stop"
        assert len(sequence.tokens) == length


def test_a_stop_string_in_the_prompt_does_not_stop(sampler: SamplingClient) -> None:
    tokens = sampler.get_tokenizer().encode("What is 7 + 5? STOP")
    (sequence,) = sequences(sampler, tokens, max_tokens=6, seed=0, stop=["STOP"])
    assert sequence.tokens


def test_compute_logprobs_are_those_of_transformers(
    training: TrainingClient, sampler: SamplingClient, base_sampler: SamplingClient, reference: Reference
) -> None:
    for tokens in PROMPTS:
        for client, adapter in ((sampler, reference.adapter_of(training)), (base_sampler, None)):
            found = client.compute_logprobs(prompt(tokens)).result()
            assert len(found) == len(tokens) and found[0] is None
            expected = reference.completion_logprobs(tokens[:1], tokens[1:], adapter, 8.0) if tokens[1:] else []
            assert_near(found[1:], expected, atol=1e-4)


def test_prompt_logprobs_come_with_a_sample_only_when_asked_for(sampler: SamplingClient) -> None:
    for temperature in (1.0, 0.5):
        request = params(3, seed=1, temperature=temperature)
        with_logprobs = sampler.sample(prompt(PROMPTS[1]), 2, request, include_prompt_logprobs=True)
        without = sampler.sample(prompt(PROMPTS[1]), 2, request)
        expected = sampler.compute_logprobs(prompt(PROMPTS[1])).result()
        found = with_logprobs.result().prompt_logprobs
        assert found is not None and found[0] is None
        assert_near(found[1:], expected[1:], atol=1e-4, rtol=1e-7)
        assert without.result().prompt_logprobs is None
        scored, plain = with_logprobs.result().sequences, without.result().sequences
        assert_same_tokens((s.tokens for s in scored), (s.tokens for s in plain))


def test_prompt_logprobs_are_there_as_an_array_too(sampler: SamplingClient) -> None:
    """float32, NaN for the first token, as the SDK documents the field."""
    response = sampler.sample(prompt(PROMPTS[1]), 1, params(1), include_prompt_logprobs=True).result()
    array, as_list = response.prompt_logprobs_np, response.prompt_logprobs
    assert array is not None and as_list is not None and array.dtype == np.float32
    assert np.isnan(array[0]) and as_list[0] is None
    np.testing.assert_array_equal(array[1:], np.array(as_list[1:], dtype=np.float32))


def test_sequence_ids_are_distinct(sampler: SamplingClient, base_sampler: SamplingClient) -> None:
    made = [s for client in (sampler, base_sampler) for _ in range(2) for s in sequences(client, PROMPTS[0], 3)]
    assert len({s.sequence_id for s in made}) == 12
    assert all(s.tokens_np is not None and s.tokens_np.dtype == np.int32 for s in made)


@pytest.mark.parametrize("vocabulary", [1536, 512, 700, 151_936])
def test_every_token_of_a_large_vocabulary_can_be_drawn(vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draw that lies in the middle of a token's share gives that token, also in a long tail of small shares."""
    probs = torch.full((vocabulary,), 0.5 / (vocabulary - 1), dtype=torch.float64)
    probs[3] = 0.5
    wanted = torch.tensor([0, 3, 4, vocabulary // 2, vocabulary - 2, vocabulary - 1])
    middle = (probs.cumsum(0) - probs / 2)[wanted].numpy()
    monkeypatch.setattr("tinker_local_backend.engine.sampling.token_choice.uniforms", lambda seeds, positions: middle)
    rows = len(wanted)
    tokens, logprobs, _ = next_tokens(
        probs.log().float().to(here().device).expand(rows, -1),
        RowParams([1.0] * rows, [-1] * rows, [1.0] * rows, [0.0] * rows, range(rows), here().device),
        np.zeros(rows, dtype=np.uint64),
    )
    assert tokens.tolist() == wanted.tolist()
    np.testing.assert_allclose(logprobs.cpu(), probs[wanted].log(), rtol=1e-5, atol=1e-5)
