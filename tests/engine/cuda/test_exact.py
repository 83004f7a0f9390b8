"""Steps of one size and prompts that are computed alone: a sample has the same bits whatever else runs."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.gpu.stand_ins import graphs_for
from tests.engine.cuda.test_decoder import mixed_requests
from tests.engine.devices import here
from tests.engine.direct import Direct, assert_same_samples, frozen_adapter, request
from tests.engine.helpers import random_tokens
from tinker_local_backend import ModelLoadError, RequestError
from tinker_local_backend.engine.cuda.execution import CudaExecution
from tinker_local_backend.engine.cuda.generation import BurstGenerator
from tinker_local_backend.engine.model.attention import Reference
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.models import load_model, new_generator
from tinker_local_backend.engine.sampling.pages import PAGE_TOKENS
from tinker_local_backend.engine.sampling.requests import SamplingRequest
from tinker_local_backend.engine.sampling.sampler import SamplingResult
from tinker_local_backend.samplers.choice import make_sampler

ROWS = 8
BUDGET = 40
"""Tokens of a prefill pass, of which a chunk has a quarter."""


@pytest.fixture(scope="module")
def model(tied_model: str) -> BaseModel:
    model = load_model(tied_model, here().device, here().dtype)
    model.execution = Reference()
    return model


class Exact(Direct):
    """A generator of its own. `passes`: tokens of each of its passes through the model."""

    def __init__(self, model: BaseModel, exact_rows: int | None = ROWS):
        self.generator: Any = BurstGenerator(
            model,
            8192,
            itertools.count(1000).__next__,
            graphs_for(model.device),
            prefill_tokens=BUDGET,
            exact_rows=exact_rows,
        )
        self.passes: list[int] = []

    def run(self, *requests: SamplingRequest) -> list[SamplingResult]:
        model = self.generator._model
        original = model.hidden_states

        def noted(tokens_T: torch.Tensor, *rest: Any) -> torch.Tensor:
            self.passes.append(len(tokens_T))
            return original(tokens_T, *rest)

        with mock.patch.object(model, "hidden_states", noted):
            return super().run(*requests)


def bits(results: Sequence[SamplingResult]) -> list[Any]:
    return [[(s.tokens, s.logprobs, s.stop_reason) for s in result.sequences] for result in results]


def crowd(model: BaseModel) -> list[SamplingRequest]:
    """Others: adapters and none, limits and none, short and long."""
    adapter = frozen_adapter(model, 4, 9)
    fields: list[dict[str, Any]] = [{}, {"top_p": 0.7}, {"temperature": 0.5, "weights": adapter}, {"top_k": 3}]
    return [
        request(random_tokens(3 + 11 * i, seed=50 + i), max_tokens=4 + 9 * i, seed=i, **some)
        for i, some in enumerate(fields)
    ]


def wanted(model: BaseModel) -> list[SamplingRequest]:
    """One after the other; the second prompt ends with a page, which its samples share."""
    return [
        request(random_tokens(37, seed=1), max_tokens=19, seed=4, temperature=0.8),
        request(
            random_tokens(PAGE_TOKENS, seed=2), samples=3, max_tokens=10, seed=5, weights=frozen_adapter(model, 4, 1)
        ),
        request(random_tokens(1, seed=3), max_tokens=12, seed=6, top_k=20, top_p=0.9),
    ]


@pytest.fixture
def alone(model: BaseModel) -> Iterator[list[Any]]:
    yield [bits(Exact(model).run(one))[0] for one in wanted(model)]


def test_the_same_bits_alone_and_in_a_crowd(model: BaseModel, alone: list[Any]) -> None:
    ours, others = wanted(model), crowd(model)
    for mixed in (
        [*ours, *others],
        [*others, *reversed(ours)],
        [others[0], ours[0], others[1], ours[1], others[3], ours[2]],
    ):
        found = dict(zip(map(id, mixed), bits(Exact(model).run(*mixed)), strict=True))
        assert [found[id(one)] for one in ours] == alone


def test_the_same_bits_again_with_a_cache_that_knows_the_prompts(model: BaseModel, alone: list[Any]) -> None:
    exact = Exact(model)
    assert [bits(exact.run(one))[0] for one in wanted(model) for _ in range(2)] == [
        one for one in alone for _ in range(2)
    ]


def test_tokens_are_those_of_the_reference(model: BaseModel) -> None:
    requests = [*wanted(model), *mixed_requests(model)]
    for found, expected in zip(Exact(model).run(*requests), Direct(model).run(*requests), strict=True):
        assert_same_samples(found, expected)
        assert [s.stop_reason for s in found.sequences] == [s.stop_reason for s in expected.sequences]


def test_steps_have_one_size_and_chunks_of_a_prompt_too(model: BaseModel) -> None:
    """37 tokens in chunks of a quarter of the budget, whether something runs or not. Other generators join what they can."""
    exact, usual = Exact(model), Exact(model, exact_rows=None)
    for generator in (exact, usual):
        generator.run(*crowd(model), *wanted(model))
    chunks = {BUDGET // 4, *(len(one.prompt) % (BUDGET // 4) for one in [*crowd(model), *wanted(model)])}
    assert set(exact.passes) <= {ROWS, *chunks}
    assert not set(usual.passes) <= {ROWS, *chunks}


def test_a_diverged_adapter_is_named(model: BaseModel) -> None:
    adapter = frozen_adapter(model, 4, 2)
    for matrix in adapter.b.values():
        matrix.fill_(torch.nan)
    broken = request(random_tokens(5, seed=1), weights=adapter, max_tokens=3)
    with pytest.raises(RequestError, match="diverged"):
        Exact(model).run(broken)


def test_the_variable_reaches_the_generator_and_is_refused_elsewhere(
    model: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_LOCAL_EXACT_ROWS", "4")
    with pytest.raises(ModelLoadError, match="TINKER_LOCAL_EXACT_ROWS=4 needs captured decode steps"):
        new_generator(model, 512, lambda: 0)
    with mock.patch.object(model, "execution", CudaExecution(model, graphs_for(model.device))):
        made: Any = new_generator(model, 512, lambda: 0)
    model.join(None)
    assert made.decoder._exact_rows == made._backoff.running == 4 and made._scheduler.isolates_prompts
    monkeypatch.setenv("TINKER_LOCAL_SAMPLER", "vllm")
    with pytest.raises(RequestError, match="for the engine's sampler, but TINKER_LOCAL_SAMPLER=vllm"):
        make_sampler(model, 512, lambda: 0, lambda call: None)
    monkeypatch.setenv("TINKER_LOCAL_EXACT_ROWS", "513")
    with pytest.raises(RequestError, match="must be at most 512"):
        new_generator(model, 512, lambda: 0)
