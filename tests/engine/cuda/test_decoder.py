"""Captured bursts against the reference generator, and what a step must not do, planted and caught."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.models import random_module
from benchmarks.gpu.stand_ins import CaptureError, graphs_for
from benchmarks.models import SHAPES, word_tokenizer
from tests.engine.devices import here
from tests.engine.direct import Direct, assert_same_samples, frozen_adapter, request
from tests.engine.helpers import random_tokens
from tinker_local_backend.engine.cuda import step as step_module
from tinker_local_backend.engine.cuda.adapter_slots import SLOTS, AdapterSlots
from tinker_local_backend.engine.cuda.decoder import BUCKETS, BURST, Decoder
from tinker_local_backend.engine.cuda.execution import CudaExecution
from tinker_local_backend.engine.cuda.generation import BurstGenerator
from tinker_local_backend.engine.cuda.graphs import Graphs, Uncaptured
from tinker_local_backend.engine.cuda.step import DecodeRow, StepState, decode_step
from tinker_local_backend.engine.model.attention import Reference
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.models import adopt_module, load_model
from tinker_local_backend.engine.sampling.requests import SamplingRequest, StopRule


@pytest.fixture(scope="module")
def model(tied_model: str) -> BaseModel:
    model = load_model(tied_model, here().device, here().dtype)
    model.execution = Reference()  # what is compared is chosen here, test by test
    return model


class Captured(Direct):
    """A generator of its own that decodes in captured bursts."""

    def __init__(self, model: BaseModel, budget: int = 8192):
        self.generator: Any = BurstGenerator(model, budget, itertools.count(1000).__next__, graphs_for(model.device))


def mixed_requests(model: BaseModel) -> list[SamplingRequest]:
    """Adapters of several ranks and none; temperatures, limits, stops, lengths that end anywhere within a burst."""
    adapters = [None, *(frozen_adapter(model, rank, seed) for rank, seed in ((4, 1), (16, 2), (3, 3)))]
    return [
        request(
            random_tokens(5 + 9 * i, seed=i),
            weights=adapters[i % 4],
            samples=1 + i % 3,
            max_tokens=(1, 9, 8, 16, 21)[i],
            seed=i,
            temperature=(1.0, 0.7, 0.0)[i % 3],
            top_k=(-1, 5)[i % 2],
            top_p=(1.0, 0.9, 1.0)[i % 3],
            min_p=(0.0, 0.2)[i // 2 % 2],
            stop=StopRule(frozenset(range(300))) if i == 3 else StopRule(),
        )
        for i in range(5)
    ]


def test_bursts_give_what_the_reference_gives(model: BaseModel) -> None:
    requests = mixed_requests(model)
    for found, expected in zip(Captured(model).run(*requests), Direct(model).run(*requests), strict=True):
        assert_same_samples(found, expected)
        assert [s.stop_reason for s in found.sequences] == [s.stop_reason for s in expected.sequences]


@pytest.mark.slow
def test_likeliest_tokens_are_those_of_every_step(model: BaseModel) -> None:
    asked = request(random_tokens(9, seed=1), max_tokens=20, topk_logprobs=3, temperature=0.8)
    (found,), (expected,) = Captured(model).run(asked)[0].sequences, Direct(model).run(asked)[0].sequences
    assert len(found.topk) == len(found.tokens) == 20
    for (ids, values), (wanted_ids, wanted_values) in zip(found.topk, expected.topk, strict=True):
        assert ids.tolist() == wanted_ids.tolist()
        assert abs(values - wanted_values).max() < 1e-4


@pytest.mark.slow
def test_more_adapters_than_slots_take_turns(model: BaseModel) -> None:
    requests = [
        request(random_tokens(6, seed=i), frozen_adapter(model, 4, i), max_tokens=11, seed=i) for i in range(SLOTS + 2)
    ]
    for found, expected in zip(Captured(model).run(*requests), Direct(model).run(*requests), strict=True):
        assert_same_samples(found, expected)


@pytest.mark.slow
def test_a_pool_that_is_nearly_full_gives_the_same(model: BaseModel) -> None:
    """Four sequences of 100 tokens in pages for six of 32: bursts shrink, and the youngest begin again."""
    requests = [request(random_tokens(30, seed=i), max_tokens=70, seed=i) for i in range(4)]
    tight = Captured(model, budget=192)
    for found, expected in zip(tight.run(*requests), Direct(model).run(*requests), strict=True):
        assert_same_samples(found, expected)
    assert tight.generator.stats.restarts > 0
    assert tight.generator.stats.pages == 6 and tight.generator.stats.pages_read == 0


@pytest.mark.slow
def test_addresses_stay(model: BaseModel) -> None:
    captured = Captured(model)
    cache = captured.generator._cache
    addresses = [cache.layer(0)[0].data_ptr(), captured.generator.decoder.state.tokens.data_ptr()]
    captured.run(*mixed_requests(model))
    captured.generator.evict_prefixes()
    captured.run(*mixed_requests(model))
    assert addresses == [cache.layer(0)[0].data_ptr(), captured.generator.decoder.state.tokens.data_ptr()]


def test_a_batch_of_every_size_has_its_bucket() -> None:
    assert BUCKETS[0] == 1 and BUCKETS[-1] == 512 and list(BUCKETS) == sorted(set(BUCKETS))
    # Rows that a batch pays for in vain: never more than there are rows.
    assert all(larger <= 2 * (smaller + 1) for smaller, larger in itertools.pairwise(BUCKETS))


# What a captured step must not do


def decoder_of(model: BaseModel) -> Decoder:
    return Decoder(model, model.new_cache(16), graphs_for(model.device), 128)


def some_rows(count: int = 3) -> list[DecodeRow]:
    return [
        DecodeRow(request([100 + i]), 100 + i, 3 * i, 99, [4 * i, 4 * i + 1, 4 * i + 2], 0, i, 0) for i in range(count)
    ]


def with_step(monkeypatch: pytest.MonkeyPatch, plant: Callable[[Any, torch.Tensor], None]) -> None:
    """Let every step end with something planted, which is given its state and its logits."""
    original = step_module.decode_step

    def planted(model: Any, cache: Any, state: Any, *arguments: Any) -> torch.Tensor:
        tempered = original(model, cache, state, *arguments)
        plant(state, tempered)
        return tempered

    monkeypatch.setattr("tinker_local_backend.engine.cuda.decoder.decode_step", planted)


@torch.inference_mode()
def test_a_planted_wait_for_the_device_is_caught(model: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def plant(state: Any, tempered: torch.Tensor) -> None:
        if float(tempered.max()) > 1e9:
            state.tokens.zero_()

    with_step(monkeypatch, plant)
    with pytest.raises((CaptureError, RuntimeError), match=r"waits for the device|capturing|during capture"):
        decoder_of(model).run(some_rows(), 2)


@torch.inference_mode()
def test_a_planted_tensor_of_python_values_is_caught(model: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def plant(state: Any, tempered: torch.Tensor) -> None:
        state.drawn.add_(torch.tensor([0], device=state.drawn.device))

    with_step(monkeypatch, plant)
    with pytest.raises((CaptureError, RuntimeError), match=r"Python values|capturing|during CUDA graph capture"):
        decoder_of(model).run(some_rows(), 2)


@torch.inference_mode()
def test_replays_give_what_eager_steps_give(model: BaseModel) -> None:
    assert replay_equals_eager(model)


@torch.inference_mode()
def test_a_planted_index_that_the_capture_bakes_in_is_caught(model: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    row = 0

    def plant(state: Any, tempered: torch.Tensor) -> None:
        state.tokens[row].fill_(7)  # an index from Python: a replay has that of the capture

    def before(burst: int) -> None:
        nonlocal row
        row = burst

    with_step(monkeypatch, plant)
    assert not replay_equals_eager(model, before)
    assert replay_equals_eager(model, before, Uncaptured()), (
        "the index alone changes nothing where Python runs the step"
    )


def replay_equals_eager(
    model: BaseModel, before: Callable[[int], None] = lambda burst: None, graphs: Graphs | None = None
) -> bool:
    """Whether a captured step gives in two bursts, told `before`, what it gives when Python runs it again each time."""
    results = []
    for way in (graphs or graphs_for(model.device), Uncaptured()):
        decoder, bursts = Decoder(model, model.new_cache(16), way, 128), []
        for number in range(2):
            before(number)
            burst = decoder.run(some_rows(), BURST)
            bursts.append((burst.tokens.tolist(), burst.logprobs.round(4).tolist()))
        results.append(bursts)
    return results[0] == results[1]


@pytest.fixture(autouse=True)
def same_noise() -> Iterator[None]:
    """Nothing here draws from global random state."""
    before = torch.random.get_rng_state()
    yield
    assert torch.equal(before, torch.random.get_rng_state())


LAUNCHES = {"lora_add": 2, "paged_attention": 2}
"""Kernels of an operation; the others launch one."""


class Launches(TorchDispatchMode):
    """Counts the kernels that operations would launch on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            name = func.name().partition("::")[2]
            self.names.add(name.partition(".")[0])
            self.count += LAUNCHES.get(name, 1)
        return func(*args, **(kwargs or {}))


@torch.inference_mode()
def test_a_layer_launches_eighteen_kernels_with_adapters_and_ten_without() -> None:
    """Every product with its adapters 3, and 6 between them: two norms, heads, two for attention, SwiGLU."""
    device, counts = torch.device("cpu"), []
    for layers in (2, 3):
        shape = replace(SHAPES["tiny"], layers=layers)
        model = adopt_module("random/tiny", random_module(shape, device, torch.float32), word_tokenizer(shape.vocab))
        model.execution = CudaExecution(model, graphs_for(device))
        slots = AdapterSlots(model.products, model.dtype, device, model.targets)
        slots.fit([model.new_adapter(model.widest_spec(4), 0)])
        for used in (slots, None):
            state, cache, launches = StepState(8, 4, 4, device), model.new_cache(16), Launches()
            with launches:
                decode_step(model, cache, state, used, 8, False)
            counts.append(launches.count)
    assert [counts[2] - counts[0], counts[3] - counts[1]] == [18, 10]


@torch.inference_mode()
def test_limits_cost_one_kernel_and_no_sort(model: BaseModel) -> None:
    """The other two: the mass of the whole row, which the logprob is relative to, and its conversion to float64."""
    counted = []
    for limited in (False, True):
        state, launches = StepState(8, 4, 4, model.device), Launches()
        with launches:
            decode_step(model, model.new_cache(16), state, None, 8, limited)
        counted.append(launches)
    without, limited = counted
    assert not {"sort", "argsort", "topk", "cumsum"} & (limited.names - without.names)
    assert limited.names - without.names >= {"truncate"} and limited.count - without.count <= 3
