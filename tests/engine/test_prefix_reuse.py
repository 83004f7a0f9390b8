"""Prefixes that are not computed again: the results are those of a request that runs alone, for fewer tokens of prefill."""

import asyncio
import math
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.engine.devices import here
from tests.engine.direct import Direct, alone, assert_same_samples, frozen_adapter, prefilled_tokens, request, reused
from tests.engine.helpers import (
    STEP,
    assert_near,
    assert_same_tokens,
    cross_entropy_datum,
    make_training_client,
    params,
    prompt,
    random_tokens,
)
from tinker_local_backend import LocalBackendError, RequestError, SamplingClient, ServiceClient
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.model.lora import Adapter
from tinker_local_backend.engine.models import load_model
from tinker_local_backend.engine.sampling.generation import Generator
from tinker_local_backend.engine.sampling.pages import pages_for
from tinker_local_backend.engine.sampling.requests import PromptScoring, SamplingRequest

HEADER = random_tokens(40, 1)


@pytest.fixture(scope="module")
def model(tied_model: str) -> BaseModel:
    return load_model(tied_model)


@pytest.fixture(scope="module")
def adapters(model: BaseModel) -> list[Adapter | None]:
    """The base model and three adapters."""
    return [None, *(frozen_adapter(model, rank, seed) for rank, seed in ((2, 1), (4, 2), (4, 3)))]


@pytest.fixture
def direct(model: BaseModel) -> Direct:
    return Direct(model)


def nothing_is_kept(generator: Generator) -> bool:
    """Of what was sampled: no page is findable, and a cache that grows has given its memory back."""
    return generator.stats.pages_idle == 0 and (generator.fixed_pages or generator._cache.bytes == 0)


def run_and_compare(direct: Direct, model: BaseModel, requests: Sequence[SamplingRequest]) -> list[tuple[int, ...]]:
    """All at once and each alone. Returns what the cache holds afterwards of each request's first sample."""
    held: list[tuple[int, ...]] = []
    for one, found in zip(requests, direct.run(*requests), strict=True):
        assert_same_samples(found, alone(model, one))
        held.append((*one.prompt, *found.sequences[0].tokens[:-1]))  # the last token has no key yet
    return held


def test_rounds_of_conversations_go_on_where_they_were(
    direct: Direct, model: BaseModel, adapters: list[Adapter | None]
) -> None:
    """Four rounds of six conversations under four adapters, two samples each; each goes on from the first."""
    conversations = [(adapters[i % 4], random_tokens(20 + 3 * i, i)) for i in range(6)]
    held = [0] * 6
    for turn in range(4):
        requests = [
            request(tokens, adapter, samples=2, max_tokens=5, seed=10 * turn + i, temperature=0.7 + 0.1 * i)
            for i, (adapter, tokens) in enumerate(conversations)
        ]
        with prefilled_tokens() as passes:
            results = direct.run(*requests)
        assert [result.cached_tokens for result in results] == held
        assert sum(passes) == sum(len(one.prompt) for one in requests) - sum(held)
        for one, result in zip(requests, results, strict=True):
            assert_same_samples(result, alone(model, one))
        held = [len(one.prompt) + 4 for one in requests]
        conversations = [
            (one.adapter, [*one.prompt, *result.sequences[0].tokens, *random_tokens(7, 100 * turn + i)])
            for i, (one, result) in enumerate(zip(requests, results, strict=True))
        ]


def test_a_header_of_many_prompts_is_computed_once(direct: Direct, model: BaseModel) -> None:
    """Within a batch, and not at all in the next one."""
    questions = [[*HEADER, 10 + i, *random_tokens(3 + i % 5, i)] for i in range(12)]
    for batch, known in ((questions[:6], 0), (questions[6:], len(HEADER))):
        requests = [request(tokens, max_tokens=4, seed=i) for i, tokens in enumerate(batch)]
        with prefilled_tokens() as passes:
            results = direct.run(*requests)
        tails = sum(len(tokens) - len(HEADER) for tokens in batch)
        assert passes == [tails + len(HEADER) - known]
        assert [result.cached_tokens for result in results] == [known] * 6
        for one, result in zip(requests, results, strict=True):
            assert_same_samples(result, alone(model, one))


def test_one_prompt_under_several_adapters_is_each_ones_own(
    direct: Direct, model: BaseModel, adapters: list[Adapter | None]
) -> None:
    first, second = adapters[:2], adapters[1:]
    requests = [request(HEADER, adapter, seed=3) for adapter in first]
    run_and_compare(direct, model, requests)
    results = direct.run(*(request(HEADER, adapter, seed=3) for adapter in second))
    assert [result.cached_tokens for result in results] == [len(HEADER) - 1, 0, 0]
    for adapter, result in zip(second, results, strict=True):
        assert_same_samples(result, alone(model, request(HEADER, adapter, seed=3)))
    assert len({tuple(result.sequences[0].tokens) for result in results}) == 3


def test_equal_requests_at_once_are_prefilled_once_and_hit_nothing(direct: Direct) -> None:
    with prefilled_tokens() as passes:
        results = direct.run(*(request(HEADER, seed=seed, samples=2) for seed in range(5)))
    assert passes == [len(HEADER)]
    assert [result.cached_tokens for result in results] == [0] * 5


def test_a_prompt_that_is_scored_is_computed_whole(direct: Direct, model: BaseModel) -> None:
    """Its logprobs need all its hidden states; beside it others still reuse what there is."""
    direct.run(request(HEADER))
    scored = request([*HEADER, 5], scoring=PromptScoring(logprobs=True))
    scoring, plain = direct.run(scored, request([*HEADER, 6], seed=4))
    assert (scoring.cached_tokens, plain.cached_tokens) == (0, reused(model, len(HEADER), len(HEADER) - 1))
    expected = alone(model, scored)
    assert_same_samples(scoring, expected)
    assert scoring.prompt.logprobs is not None and expected.prompt.logprobs is not None
    assert_near(scoring.prompt.logprobs[1:], expected.prompt.logprobs[1:], atol=1e-5, rtol=1.3e-6)
    assert_same_samples(plain, alone(model, request([*HEADER, 6], seed=4)))


def test_more_samples_than_the_budget_has_rows(model: BaseModel) -> None:
    """They come in portions of four; only the first one prefills the prompt."""
    small, one = Direct(model, budget=120), request(HEADER[:20], samples=11, max_tokens=10)
    with prefilled_tokens() as passes:
        (result,) = small.run(one)
    assert_same_samples(result, alone(model, one))
    assert passes == [20, 1, 1]
    assert result.cached_tokens == 0


@pytest.mark.usefixtures("one_token_a_step")
def test_a_cancelled_sequence_leaves_nothing_wrong_behind(
    direct: Direct, model: BaseModel, adapters: list[Adapter | None]
) -> None:
    """Half of a batch is cancelled after some tokens; the rest goes on, and prompts go on from what the cancelled left."""
    requests = [request(random_tokens(20 + i, i), adapters[i % 4], max_tokens=20, seed=i) for i in range(8)]
    submitted = direct.submit(*requests)
    for _ in range(8):  # a prefill with the first token, and seven more
        direct.generator.step()
    for slip in submitted[::2]:
        slip.cancelled = True
    late = [
        request([*one.prompt, *alone(model, one).sequences[0].tokens, 3], one.adapter, seed=i)
        for i, one in enumerate(requests)
    ]
    submitted_late = direct.submit(*late)
    direct.finish()
    for one, slip in [*zip(requests[1::2], submitted[1::2], strict=True), *zip(late, submitted_late, strict=True)]:
        assert_same_samples(slip.result, alone(model, one))
    assert not any(slip.outcomes for slip in submitted[::2])
    # Of a sequence that still runs only the prompt can be used.
    prompts = [reused(model, len(one.prompt), len(one.prompt) - 1) for one in requests]
    expected = [prompts[i] if i % 2 else len(one.prompt) + 7 for i, one in enumerate(requests)]
    found = [slip.result.cached_tokens for slip in submitted_late]
    assert all(least <= cached for least, cached in zip(prompts, found, strict=True))
    if here().is_reference:  # elsewhere a sequence may have parted from the one that ran alone
        assert found == expected
    assert sum(cached == most for cached, most in zip(found, expected, strict=True)) > len(found) // 2


def diverged(model: BaseModel, module: str) -> Adapter:
    adapter = frozen_adapter(model, 2, 9)
    modules = (module,) if module == "lm_head" else (module, "kv_b_proj")  # latent attention has both in one
    for name, matrix in adapter.b.items():
        if name.endswith(modules):
            matrix.fill_(math.nan)
    return adapter


@pytest.mark.parametrize("module", ["k_proj", "v_proj", "lm_head"])
@pytest.mark.parametrize("place", [0, 2, 4])
def test_an_adapter_that_has_diverged_poisons_no_page_that_others_use(
    direct: Direct, model: BaseModel, module: str, place: int
) -> None:
    """Its prompt is the longest, so its pages reach beyond what the others write in them later."""
    requests = [request(random_tokens(4 + 5 * i, i), max_tokens=50, seed=i) for i in range(4)]
    broken = request([*HEADER, *HEADER], diverged(model, module), samples=2)
    submitted = direct.submit(*requests[:place], broken, *requests[place:])
    direct.finish()
    with pytest.raises(RequestError, match="weights have diverged"):
        _ = submitted.pop(place).result
    for one, slip in zip(requests, submitted, strict=True):
        assert_same_samples(slip.result, alone(model, one))
    assert all(pages.isfinite().all() for pages in direct.generator._cache._stored())
    later = [request([*HEADER, *HEADER, 5], max_tokens=20, seed=i) for i in range(8)]
    for one, result in zip(later, direct.run(*later), strict=True):
        assert_same_samples(result, alone(model, one))


@pytest.mark.parametrize("budget", [200, 700, 4000])
def test_a_long_random_history(model: BaseModel, adapters: list[Adapter | None], budget: int) -> None:
    """Conversations that branch, headers, cancellations and new adapters, at three sizes of cache."""
    rng, direct = random.Random(budget), Direct(model, budget)
    known: list[list[int]] = [HEADER, HEADER[:20], random_tokens(25, 7)]
    hits = 0
    for turn in range(14):
        requests = []
        for _ in range(rng.randint(1, 6)):
            start = rng.choice(known)
            tokens = [
                *start[: rng.randint(len(start) // 2, len(start))],
                *random_tokens(rng.randint(1, 6), rng.randint(0, 5)),
            ]
            adapter = rng.choice(adapters)
            samples, most = rng.randint(1, 3), rng.randint(1, 9)
            requests.append(request(tokens, adapter, samples, most, rng.randint(0, 99), top_k=rng.choice([-1, 20])))
        submitted = direct.submit(*requests)
        for _ in range(rng.randint(0, 6)):
            direct.generator.step()
        cancelled = {i for i in range(len(requests)) if rng.random() < 0.15 and not submitted[i].outcomes}
        for i in cancelled:
            submitted[i].cancelled = True
        while direct.generator.busy:
            direct.generator.step()
            assert direct.generator._cache.pages <= pages_for(budget)
        for i, (one, slip) in enumerate(zip(requests, submitted, strict=True)):
            if i not in cancelled:
                assert_same_samples(slip.result, alone(model, one))
                hits += slip.result.cached_tokens
                known.append([*one.prompt, *slip.result.sequences[-1].tokens][:80])
        if turn % 5 == 4:
            direct.generator.evict_prefixes()
            assert nothing_is_kept(direct.generator)
    assert hits > 0


def debate(policy: SamplingClient, judge: SamplingClient) -> list[tuple[SamplingClient, list[int], int]]:
    """Three debates at once: two turns of the policy, each followed by a judge on the base model. (who, prompt, hits)"""
    calls: list[tuple[SamplingClient, list[int], int]] = []

    async def one_debate(seed: int) -> None:
        transcript = random_tokens(30, seed)
        for turn in range(3):
            for who in (policy, judge):
                response = await who.sample(prompt(transcript), 1, params(6, seed=seed, stop=[]))
                calls.append((who, list(transcript), response.prompt_cache_hit_tokens))
                assert_same_tokens([response.sequences[0].tokens], [answer(who, transcript, seed)])
                transcript += [*response.sequences[0].tokens, *random_tokens(3, 50 + turn)]

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for seed in range(3):
                group.create_task(one_debate(seed))

    asyncio.run(main())
    return calls


def answer(client: SamplingClient, tokens: list[int], seed: int) -> list[int]:
    """In a generator of its own."""
    return alone(client._model, request(tokens, client._weights, max_tokens=6, seed=seed)).sequences[0].tokens


def test_turns_of_policy_and_judge_each_go_on_from_their_own(home: Path, tied_model: str) -> None:
    """In lockstep, so that who has ended before whom does not depend on timing."""
    with ServiceClient(home=home, deterministic=True) as service:
        sampler = make_training_client(service, tied_model).save_weights_and_get_sampling_client().result()
        calls = debate(sampler, service.create_sampling_client(base_model=tied_model).result())
        for who, transcript, hits in calls:
            # Each saw the transcript two utterances of 9 tokens ago, and its own answer to it but for the last token.
            seen = len(transcript) - 18
            first = seen < (30 if who is sampler else 39)
            assert hits == (0 if first else seen + 5)


def test_after_training_and_saving_nothing_is_reused(service: ServiceClient, tied_model: str) -> None:
    client = make_training_client(service, tied_model)
    snapshot = client.save_weights_and_get_sampling_client().result()
    generator = snapshot._engine._generators[tied_model]
    assert isinstance(generator, Generator)

    def hits() -> int:
        response = snapshot.sample(prompt(HEADER), 1, params(3, seed=1, stop=[])).result()
        expected = alone(snapshot._model, request(HEADER, snapshot._weights, max_tokens=3, seed=1))
        assert_same_tokens([response.sequences[0].tokens], [expected.sequences[0].tokens])
        assert not nothing_is_kept(generator)
        return response.prompt_cache_hit_tokens

    assert hits() == 0
    assert hits() == len(HEADER) - 1
    for train in (
        lambda: client.forward([cross_entropy_datum(5, 0)], "cross_entropy"),
        lambda: client.forward_backward([cross_entropy_datum(5, 0)], "cross_entropy"),
        lambda: client.optim_step(STEP),
        lambda: client.save_state("kept"),  # a run that goes on from it has a new sampler
    ):
        train().result()
        assert nothing_is_kept(generator)
        assert hits() == 0
    with pytest.raises(LocalBackendError):
        client.forward([], "cross_entropy").result()
    assert hits() in (0, len(HEADER) - 1)
