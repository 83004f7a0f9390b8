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
from tinker_local_backend.engine.base_model import BaseModel
from tinker_local_backend.engine.kv_cache import KVCache

BUDGET = 500
WAITING = 200


class Meter:
    """All slabs that are alive, looked at after every allocation."""

    def __init__(self) -> None:
        self.slabs: list[weakref.ref[torch.Tensor]] = []
        self.most = 0
        """bytes"""
        self.most_tokens = 0
        """rows x length that a resize asked for"""

    def look(self) -> None:
        alive = [slab for reference in self.slabs if (slab := reference()) is not None]
        self.slabs = [weakref.ref(slab) for slab in alive]
        self.most = max(self.most, sum(slab.untyped_storage().nbytes() for slab in alive))


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Meter]:
    measured, empty, resize = Meter(), KVCache._empty, KVCache.resize

    def observed_empty(self: KVCache, rows: int, length: int) -> torch.Tensor:
        slab = empty(self, rows, length)
        measured.slabs.append(weakref.ref(slab))
        measured.look()
        return slab

    def observed_resize(self: KVCache, rows: int, length: int) -> None:
        resize(self, rows, length)
        measured.most_tokens = max(measured.most_tokens, rows * length)

    monkeypatch.setattr(KVCache, "_empty", observed_empty)
    monkeypatch.setattr(KVCache, "resize", observed_resize)
    yield measured


@pytest.fixture(scope="module")
def model(tied_model: str) -> BaseModel:
    return BaseModel(tied_model)


def assert_within_budget(meter: Meter, model: BaseModel) -> None:
    """All layers together are within the budget; while the slab grows one layer may be there twice."""
    allowed = BUDGET * model.kv_bytes_per_token()
    layers = model.config.num_hidden_layers
    assert BUDGET // 2 < meter.most_tokens <= BUDGET
    assert allowed // 2 < meter.most <= allowed + allowed // layers


def test_two_hundred_waiting_requests_take_the_budget_and_no_more(meter: Meter, model: BaseModel) -> None:
    """Of all lengths, so that the slab is reshaped over and over."""
    direct = Direct(model, BUDGET)
    requests = [
        request(random_tokens(1 + 7 * (i % 9), i % 50), samples=1 + i % 3, max_tokens=1 + i % 13, seed=i)
        for i in range(WAITING)
    ]
    submitted = direct.submit(*requests)
    waiting = []
    while direct.generator.busy:
        direct.generator.step()
        waiting.append(len(direct.generator._waiting))
        assert sum(slab.untyped_storage().nbytes() for slab in direct.generator._cache._slabs) <= (
            BUDGET * model.kv_bytes_per_token()
        )
    assert max(waiting) > WAITING // 2
    assert_within_budget(meter, model)
    for one, slip in list(zip(requests, submitted, strict=True))[::9]:
        assert_same_samples(slip.result, alone(model, one))


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


@pytest.mark.parametrize("shape", [(20, 25), (3, 160), (10, 50)], ids=str)
def test_growing_takes_one_more_layer_for_a_moment(meter: Meter, shape: tuple[int, int]) -> None:
    """From every shape to every other."""
    layers, token = 8, 2 * 2 * 4 * 4
    cache = KVCache(layers, 2, 4, torch.float32, here().device, BUDGET)
    for rows, length in ((5, 100), shape, (1, 500), shape):
        before = cache.rows * cache.length
        meter.most = 0
        cache.resize(rows, length)
        larger = max(before, rows * length)
        assert meter.most <= (larger * layers + before) * token
    cache.resize(0, 0)
    meter.most = 0
    meter.look()
    assert meter.most == 0
