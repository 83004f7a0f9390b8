"""The KV cache budget: requests wait for room, all of them finish, and memory stays within what was allowed."""

from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from tests.engine.devices import here
from tests.engine.helpers import (
    assert_repeats,
    assert_same_tokens,
    at_once,
    params,
    prompt,
    random_tokens,
    tokens_of,
)
from tinker_local_backend import RequestError, SamplingClient, ServiceClient
from tinker_local_backend.engine.model.kv_cache import KVCache
from tinker_local_backend.engine.sampling.pages import PAGE_TOKENS, pages_for

BUDGET = 120
ALLOWED = pages_for(BUDGET) * PAGE_TOKENS
"""whole pages"""


@pytest.fixture
def small(tmp_path: Path, tied_model: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[SamplingClient]:
    """A base sampler with room for 120 tokens."""
    monkeypatch.setenv("TINKER_LOCAL_KV_CACHE_TOKENS", str(BUDGET))
    with ServiceClient(home=tmp_path) as service:
        yield service.create_sampling_client(base_model=tied_model).result()


@pytest.fixture
def most_room(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """The most tokens that any cache has had room for since."""
    sizes = [0]
    resize = KVCache.resize

    def recorded(self: KVCache, pages: int) -> None:
        resize(self, pages)
        sizes.append(self.pages * PAGE_TOKENS)

    monkeypatch.setattr(KVCache, "resize", recorded)
    return lambda: max(sizes)


def ragged(client: SamplingClient, count: int = 30) -> list[list[int]]:
    """Tokens of many waiting requests of different lengths, some with several samples, all submitted at once."""
    responses = at_once(
        lambda: [
            client.sample(prompt(random_tokens(3 + 5 * (i % 5), i)), 1 + i % 3, params(2 + 3 * (i % 4), seed=i))
            for i in range(count)
        ]
    )
    return [s.tokens for response in responses for s in response.sequences]


def test_waiting_requests_all_finish_with_the_results_of_a_large_budget(
    small: SamplingClient, base_sampler: SamplingClient
) -> None:
    assert_same_tokens(ragged(small), ragged(base_sampler))


def test_memory_stays_within_the_budget(small: SamplingClient, most_room: Callable[[], int]) -> None:
    ragged(small)
    room = most_room()
    assert room <= ALLOWED
    assert (room > 0) == here().keeps_bits, "elsewhere the cache is made whole, before anything is sampled"


def test_a_long_request_after_many_short_ones_stays_within_the_budget(
    small: SamplingClient, most_room: Callable[[], int]
) -> None:
    """Six sequences of 20 tokens, of which one is left when one of 60 tokens joins it."""
    tokens = random_tokens(4, 0)
    at_once(
        lambda: [
            *(small.sample(prompt(random_tokens(4, i)), 1, params(1, stop=[])) for i in range(5)),
            small.sample(prompt(tokens), 1, params(16, stop=[])),
            small.sample(prompt(tokens), 1, params(56, stop=[])),
        ]
    )
    assert most_room() <= ALLOWED


def test_scoring_a_long_prompt_beside_samples_stays_within_the_budget(
    small: SamplingClient, most_room: Callable[[], int]
) -> None:
    at_once(
        lambda: [
            small.sample(prompt(random_tokens(4, 0)), 10, params(6, stop=[])),
            small.compute_logprobs(prompt(random_tokens(100, 1))),
            small.sample(prompt(random_tokens(4, 2)), 1, params(6, stop=[])),
        ]
    )
    assert most_room() <= ALLOWED


def test_many_samples_of_one_request_stay_within_the_budget(
    small: SamplingClient, base_sampler: SamplingClient, most_room: Callable[[], int]
) -> None:
    """Either refused with a message or run in portions, but never more memory than was allowed."""
    try:
        found = tokens_of(small, random_tokens(10, 0), 20, max_tokens=10, seed=0)
    except RequestError as error:
        assert "num_samples" in str(error)
        return
    assert most_room() <= ALLOWED
    assert_same_tokens(found, tokens_of(base_sampler, random_tokens(10, 0), 20, max_tokens=10, seed=0))


def test_a_request_longer_than_the_budget_is_refused_at_once(small: SamplingClient) -> None:
    with pytest.raises(RequestError, match="TINKER_LOCAL_KV_CACHE_TOKENS"):
        small.sample(prompt(random_tokens(100, 0)), 1, params(21))
    (exact,) = tokens_of(small, random_tokens(100, 0), max_tokens=20, stop=[])
    assert len(exact) == 20


def test_scores_need_no_cache(small: SamplingClient, base_sampler: SamplingClient) -> None:
    tokens = random_tokens(200, 3)
    assert_repeats(*(client.compute_logprobs(prompt(tokens)).result() for client in (small, base_sampler)))


def test_a_cancelled_request_gives_its_place_to_the_next(small: SamplingClient) -> None:
    """Each of the first requests alone fills the budget, so the last can run only when they are gone."""
    hogs = [small.sample(prompt(random_tokens(4, i)), 1, params(116, stop=[])) for i in range(3)]
    last = small.sample(prompt(random_tokens(4, 9)), 2, params(6, seed=1, stop=[]))
    for hog in hogs:
        assert hog.future().cancel()
        with pytest.raises(CancelledError):
            hog.result()
    assert all(len(s.tokens) == 6 for s in last.result().sequences)


def test_cancelling_one_request_of_a_batch_changes_nothing_in_the_others(
    small: SamplingClient, base_sampler: SamplingClient
) -> None:
    requests = [(random_tokens(3 + i, i), params(12, seed=i, stop=[])) for i in range(8)]
    expected = [base_sampler.sample(prompt(t), 1, p).result().sequences[0].tokens for t, p in requests]
    futures = [small.sample(prompt(t), 1, p) for t, p in requests]
    cancelled = [futures[i].future().cancel() for i in (0, 3, 4)]
    assert any(cancelled)
    left = (1, 2, 5, 6, 7)
    assert_same_tokens((futures[i].result().sequences[0].tokens for i in left), (expected[i] for i in left))


@pytest.mark.parametrize("name", ["TINKER_LOCAL_KV_CACHE_TOKENS", "TINKER_LOCAL_SEED"])
def test_a_setting_that_is_no_number_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "many")
    with pytest.raises(RequestError, match=f"{name}='many' must be an integer"):
        ServiceClient(home=tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TINKER_LOCAL_KV_CACHE_TOKENS", "0"),
        ("TINKER_LOCAL_KV_CACHE_TOKENS", "-1"),
        ("TINKER_LOCAL_SEED", "-1"),
    ],
)
def test_a_setting_out_of_range_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(RequestError, match=name):
        ServiceClient(home=tmp_path)
