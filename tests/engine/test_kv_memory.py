"""Bytes that the KV cache really holds while two hundred requests wait for room."""

import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.engine.devices import here
from tests.engine.direct import Direct, alone, assert_same_samples, request
from tests.engine.helpers import params, prompt, random_tokens
from tinker_local_backend import SamplingClient, ServiceClient
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.model.kv_cache import KVCache, LayerShape
from tinker_local_backend.engine.models import load_model
from tinker_local_backend.engine.sampling.pages import MIN_GROWTH, PAGE_TOKENS, pages_for

BUDGET = 500
ALLOWED = pages_for(BUDGET) * PAGE_TOKENS
WAITING = 200


class Meter:
    """All tensors of pages that are alive, looked at after every allocation."""

    def __init__(self) -> None:
        self.tensors: list[weakref.ref[torch.Tensor]] = []
        self.most = 0
        """bytes"""
        self.most_tokens = 0
        """that a resize made room for"""

    def look(self) -> None:
        alive = [tensor for reference in self.tensors if (tensor := reference()) is not None]
        self.tensors = [weakref.ref(tensor) for tensor in alive]
        self.most = max(self.most, sum(tensor.untyped_storage().nbytes() for tensor in alive))


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Meter]:
    measured, empty, resize = Meter(), KVCache._empty, KVCache.resize

    def observed_empty(self: KVCache, pages: int, layer: LayerShape, dim: int) -> torch.Tensor:
        tensor = empty(self, pages, layer, dim)
        measured.tensors.append(weakref.ref(tensor))
        measured.look()
        return tensor

    def observed_resize(self: KVCache, pages: int) -> None:
        resize(self, pages)
        measured.most_tokens = max(measured.most_tokens, pages * PAGE_TOKENS)

    monkeypatch.setattr(KVCache, "_empty", observed_empty)
    monkeypatch.setattr(KVCache, "resize", observed_resize)
    yield measured


@pytest.fixture(scope="module")
def model(tied_model: str) -> BaseModel:
    return load_model(tied_model)


def assert_within_budget(meter: Meter, model: BaseModel) -> None:
    """All layers together are within the budget; while the pool grows one layer may be there twice."""
    allowed = ALLOWED * model.kv_bytes_per_token()
    layers = model.config.num_hidden_layers
    assert ALLOWED // 2 < meter.most_tokens <= ALLOWED
    assert allowed // 2 < meter.most <= allowed + allowed // layers


@pytest.mark.slow
@pytest.mark.cpu_promise  # a cache that grows
def test_two_hundred_waiting_requests_take_the_budget_and_no_more(meter: Meter, model: BaseModel) -> None:
    """Of all lengths."""
    direct = Direct(model, BUDGET)
    requests = [
        request(random_tokens(1 + 7 * (i % 9), i % 50), samples=1 + i % 3, max_tokens=1 + i % 13, seed=i)
        for i in range(WAITING)
    ]
    submitted = direct.submit(*requests)
    waiting = []
    while direct.generator.busy:
        direct.generator.step()
        waiting.append(direct.generator.stats.waiting)
        assert direct.generator._cache.bytes <= ALLOWED * model.kv_bytes_per_token()
    assert max(waiting) > WAITING // 2
    assert_within_budget(meter, model)
    for one, slip in list(zip(requests, submitted, strict=True))[::9]:
        assert_same_samples(slip.result, alone(model, one))


@pytest.mark.cpu_promise  # a cache that grows
def test_the_same_through_a_client(
    meter: Meter, model: BaseModel, tmp_path: Path, tied_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_LOCAL_KV_CACHE_TOKENS", str(BUDGET))
    with ServiceClient(home=tmp_path) as service:
        client: SamplingClient = service.create_sampling_client(base_model=tied_model).result()
        futures = [
            client.sample(prompt(random_tokens(5 + i % 40, i)), 2, params(1 + i % 9, seed=i, stop=[]))
            for i in range(WAITING)
        ]
        for i, future in enumerate(futures):
            assert [len(s.tokens) for s in future.result().sequences] == [1 + i % 9] * 2
    assert_within_budget(meter, model)


@pytest.mark.parametrize("pages", [3, 10, 16])
def test_growing_takes_one_more_layer_for_a_moment(meter: Meter, pages: int) -> None:
    """From every size to every other."""
    layers, page = 8, 2 * 2 * 4 * 4 * PAGE_TOKENS
    cache = KVCache(dict.fromkeys(range(layers), LayerShape(2, 4, 4)), torch.float32, here().device)
    for wanted in (5, pages, 12, pages):
        before = cache.pages
        meter.most = 0
        cache.resize(wanted)
        assert meter.most <= (max(before, wanted) * layers + before) * page
    cache.resize(0)
    meter.most = 0
    meter.look()
    assert meter.most == 0


def test_a_growth_that_fails_leaves_nothing_to_give_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layers had room."""
    cache = KVCache(dict.fromkeys(range(3), LayerShape(2, 4, 4)), torch.float32, here().device)
    empty, grown = KVCache._empty, []

    def scarce(self: KVCache, pages: int, layer: LayerShape, dim: int) -> torch.Tensor:
        if len(grown) == 2:
            raise MemoryError
        grown.append(pages)
        return empty(self, pages, layer, dim)

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(KVCache, "_empty", scarce)
        cache.resize(10)
    assert cache.bytes > 0
    cache.resize(0)
    assert cache.bytes == 0


@pytest.mark.cpu_promise  # a cache that grows
def test_a_long_sequence_makes_short_ones_no_dearer(model: BaseModel) -> None:
    """64 of 80 tokens and one of 200: no more than what each takes, rounded up to pages, and half as much for growth."""
    direct = Direct(model)
    submitted = direct.submit(
        *(request(random_tokens(60, i), max_tokens=21, seed=i) for i in range(64)),
        request(random_tokens(60, 99), max_tokens=141, seed=99),
    )
    most = 0
    while direct.generator.busy:
        direct.generator.step()
        most = max(most, direct.generator.stats.pages_read)
        assert direct.generator._cache.bytes <= 1.5 * most * PAGE_TOKENS * model.kv_bytes_per_token() + (
            MIN_GROWTH * PAGE_TOKENS * model.kv_bytes_per_token()
        )
    assert most <= 64 * pages_for(80) + pages_for(200)
    assert all(len(slip.result.sequences[0].tokens) in (21, 141) for slip in submitted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_keep_what_they_hold_and_new_ones_are_zero(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the memory held before; from small tensors to large ones, which are allocated in another way."""
    empty = KVCache._empty
    monkeypatch.setattr(KVCache, "_empty", lambda self, *shape: empty(self, *shape).fill_(torch.nan))
    cache = KVCache(dict.fromkeys(range(2), LayerShape(4, 64, 64)), dtype, here().device)
    held = torch.zeros(0, 4, PAGE_TOKENS, 64, dtype=dtype)
    for pages in (10, 300, 40, 301):
        cache.resize(pages)
        for stored in cache._stored():
            kept = min(len(held), pages)
            assert torch.equal(stored[:kept].cpu(), held[:kept]) and not stored[kept:].any()
            assert stored.data_ptr() % 64 == 0
            stored.copy_(torch.randn(stored.shape, generator=torch.Generator().manual_seed(pages)))
        held = cache.layer(0)[0].cpu().clone()
