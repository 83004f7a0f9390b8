"""The arrays of the running sequences are at every step what they would be if they were made anew."""

import random
from pathlib import Path

import pytest
from transformers import MistralConfig

from tests.engine.conftest import SHAPE, write_model
from tests.engine.direct import Direct, frozen_adapter, request
from tests.engine.helpers import random_tokens
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.models import load_model
from tinker_local_backend.engine.sampling.decode_batch import DecodeBatch, Running
from tinker_local_backend.engine.sampling.generation import Generator
from tinker_local_backend.engine.sampling.pages import PAGE_TOKENS
from tinker_local_backend.engine.sampling.requests import Origin, SamplingRequest
from tinker_local_backend.engine.sampling.shares import tenant_of


@pytest.fixture(scope="module", params=["everything", "the last 40 tokens"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    config = MistralConfig(**SHAPE, sliding_window=40 if request.param != "everything" else None)
    folder: Path = tmp_path_factory.mktemp("models") / "seen"
    return load_model(write_model(config, folder, 4))


def assert_follows(generator: Generator, model: BaseModel) -> None:
    for tenants, batch in generator._batches.batches.items():
        rows = [row for row in generator._running if tenant_of(row.ticket) in tenants]
        assert_as_new(batch, rows, model)


def assert_as_new(batch: DecodeBatch, rows: list[Running], model: BaseModel) -> None:
    fresh = DecodeBatch(rows, model.device)
    assert [id(row) for row in batch.rows] == [id(row) for row in fresh.rows]
    assert batch._columns.tolist() == fresh._columns.tolist()
    assert batch._slots_N.tolist() == fresh._slots_N.tolist()
    if not batch.rows:
        return
    assert [(str(rows), id(adapter)) for rows, adapter in batch.spans] == [
        (str(rows), id(adapter)) for rows, adapter in fresh.spans
    ]
    assert batch.params.seeds_R.tolist() == fresh.params.seeds_R.tolist()
    assert batch.params.rules.divisors_R.tolist() == fresh.params.rules.divisors_R.tolist()
    flags = [(rules.any_greedy, rules.any_limit, rules.all_plain) for rules in (batch.params.rules, fresh.params.rules)]
    assert flags[0] == flags[1]


@pytest.mark.parametrize("overhead", [0, 8], ids=["tenants in turns", "tenants together"])
@pytest.mark.parametrize(
    "pages", [8, pytest.param(200, marks=pytest.mark.slow)], ids=["hardly any room", "room for all"]
)
def test_rows_that_come_grow_and_go(model: BaseModel, pages: int, overhead: int) -> None:
    rng = random.Random(1)
    adapters = [None, frozen_adapter(model, 2, 1), frozen_adapter(model, 3, 2)]

    def draw(i: int) -> SamplingRequest:
        tokens = random_tokens(rng.choice([3, 31, 40, 64]), rng.randrange(3))
        more = {"temperature": rng.choice([0.0, 1.0, 1.0, 0.7]), "top_k": rng.choice([-1, -1, 5])}
        more["origin"] = Origin(tenant := rng.choice(["alice", "alice", "bob"]), (tenant,))
        return request(tokens, rng.choice(adapters), rng.choice([1, 2]), rng.choice([1, 4, 50, 70]), seed=i, **more)

    direct = Direct(model, pages * PAGE_TOKENS)
    generator = direct.generator
    generator._batches._overhead = overhead
    waiting = [draw(i) for i in range(16)]
    submitted = []
    while generator.busy or waiting:
        for _ in range(rng.choice([0, 0, 1, 3])):
            submitted.extend(direct.submit(waiting.pop()) if waiting else [])
        if submitted and rng.random() < 0.03:
            submitted[-1].cancelled = True
        generator.step()
        assert_follows(generator, model)
    assert all(slip.outcomes or slip.cancelled for slip in submitted)
    if pages == 8:
        assert generator.stats.restarts > 0
