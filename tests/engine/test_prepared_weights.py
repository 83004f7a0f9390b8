"""Decoding with prepared weights, packed and with the snapshot of all rows in them: the same to rounding, and forgotten."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine.devices import here
from tests.engine.direct import Direct, alone, assert_same_samples, frozen_adapter, request
from tests.engine.helpers import (
    STEP,
    assert_near,
    cross_entropy_datum,
    datum,
    make_training_client,
    params,
    prompt,
    random_tokens,
)
from tests.engine.test_families import write_family
from tinker_local_backend import ServiceClient
from tinker_local_backend.engine.model import decoder, products
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.model.decoder import LlamaLikeDecoder
from tinker_local_backend.engine.model.lora import Adapter, LoraLinear, Spans, spans_of
from tinker_local_backend.engine.model.lora_spec import LoraSpec
from tinker_local_backend.engine.models import load_model
from tinker_local_backend.engine.sampling.requests import SamplingRequest
from tinker_local_backend.engine.sampling.sampler import SamplingResult

pytestmark = pytest.mark.skipif(
    not here().is_reference, reason="weights are prepared on a CPU, and the bounds for float32"
)

FAMILIES = ["llama-untied", "qwen2-window"]  # without biases, and with


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    return load_model(write_family(request.param, tmp_path_factory.mktemp("family")))


@pytest.fixture(scope="module")
def model(tied_model: str) -> BaseModel:
    return load_model(tied_model)


@pytest.fixture
def soon(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """After three steps. By default packed by oneDNN, whatever the processor."""
    way = getattr(request, "param", "packed")
    monkeypatch.setattr(decoder, "PREPARE_AFTER", 3)
    if way != "plain":
        monkeypatch.setattr(products, "MIN_PACKED", 1)
        monkeypatch.setattr(products, "onednn_is_usable", lambda: True)
    if way == "no memory":

        def refuse(*arguments: object) -> torch.Tensor:
            raise RuntimeError("could not create a primitive")  # as oneDNN says it

        monkeypatch.setattr(products, "by_onednn", refuse)


def holds(model: BaseModel, adapter: Adapter | None) -> bool:
    """Whether the weights are prepared for the snapshot, or the base model, and all linears have their copy."""
    prepared = decoder_of(model).prepared
    return prepared._prepared is not None and prepared._prepared() is (adapter or decoder._BASE)


def decoder_of(model: BaseModel) -> LlamaLikeDecoder:
    assert model.decoder is not None
    return model.decoder


def unmerged(model: BaseModel, one: SamplingRequest, monkeypatch: pytest.MonkeyPatch) -> SamplingResult:
    with monkeypatch.context() as patch:
        patch.setattr(decoder, "PREPARE_AFTER", 1 << 30)
        return alone(model, one)


@contextmanager
def held_in_steps(model: BaseModel, adapter: Adapter | None) -> Iterator[list[bool]]:
    """For each decode step within: whether it went by weights that are prepared for the snapshot, or for the base model."""
    held: list[bool] = []
    begin_step = decoder.PreparedWeights.begin_step

    def recorded(self: decoder.PreparedWeights, spans: Spans) -> None:
        begin_step(self, spans)
        held.append(holds(model, adapter))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder.PreparedWeights, "begin_step", recorded)
        yield held


@pytest.mark.parametrize(
    ("without", "soon"),
    [("nothing", "packed"), ("nothing", "plain"), ("nothing", "no memory"), ("head", "packed"), ("some", "packed")],
    indirect=["soon"],
)
def test_tokens_and_logprobs_are_those_of_the_thin_products(
    without: str, family: BaseModel, soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = family
    adapter = frozen_adapter(model, 4, seed=2)
    left_out = {"nothing": (), "head": ("lm_head",), "some": ("k_proj", "o_proj", "up_proj")}[without]
    for name in [name for name in adapter.a if name.endswith(left_out)] if left_out else []:
        del adapter.a[name], adapter.b[name]
    one = request(random_tokens(12, 1), adapter, samples=3, max_tokens=20, topk_logprobs=3)
    expected = unmerged(model, one, monkeypatch)
    with held_in_steps(model, adapter) as held:
        found = alone(model, one)
    assert held == [False] * 3 + [True] * 16
    assert_same_samples(found, expected)
    base = unmerged(model, request(one.prompt, None, samples=3, max_tokens=20), monkeypatch)
    assert [s.tokens for s in base.sequences] != [s.tokens for s in found.sequences]


def test_sampled_logprobs_are_the_trainers(tmp_path: Path, untied_model: str, soon: None) -> None:
    """Also for a second snapshot, of which nothing is known beforehand, and for the first one after that."""
    with ServiceClient(home=tmp_path) as service:
        client = make_training_client(service, untied_model)
        tokens, scored, snapshots = random_tokens(9, 3), [], []
        for _ in range(2):
            snapshots.append(client.save_weights_and_get_sampling_client().result())
            (sequence,) = snapshots[-1].sample(prompt(tokens), 1, params(40, seed=1, stop=[])).result().sequences
            both = [*tokens, *sequence.tokens]
            wanted = {"target_tokens": np.array(both[1:]), "weights": np.ones(len(both) - 1, dtype=np.float32)}
            output = client.forward([datum(both[:-1], **wanted)], "cross_entropy").result().loss_fn_outputs[0]
            assert_near(sequence.logprobs, output["logprobs"].to_numpy()[len(tokens) - 1 :], atol=1e-5, rtol=1.3e-6)
            scored.append(sequence.tokens)
            client.forward_backward([cross_entropy_datum(20, 1)], "cross_entropy")
            client.optim_step(STEP).result()
        again = snapshots[0].sample(prompt(tokens), 1, params(40, seed=1, stop=[])).result().sequences[0].tokens
        assert again == scored[0] != scored[1]


def test_weights_are_prepared_after_a_number_of_steps_and_forgotten(model: BaseModel, soon: None) -> None:
    """When nothing is left to do. What trains meanwhile changes nothing."""
    adapter, direct = frozen_adapter(model, 4, seed=1), Direct(model)
    direct.submit(request(random_tokens(5, 1), adapter, max_tokens=9))
    with held_in_steps(model, adapter) as held:
        while direct.generator.busy:
            direct.generator.step()
            direct.generator.evict_prefixes()
    assert held == [False] * 3 + [True] * 5 and not holds(model, adapter)
    assert decoder_of(model).prepared._copies == {}


def test_the_same_steps_give_the_same_bits(model: BaseModel, soon: None) -> None:
    """Whatever was sampled before them."""
    adapter, other = (frozen_adapter(model, 4, seed) for seed in (1, 2))
    results = []
    for before in (None, other):
        direct = Direct(model)
        if before is not None:
            direct.run(request(random_tokens(8, 3), before, max_tokens=10))
        results.append(direct.run(request(random_tokens(9, 4), adapter, samples=2, max_tokens=12))[0])
    assert [s.logprobs for s in results[0].sequences] == [s.logprobs for s in results[1].sequences]


def test_a_model_that_was_just_loaded_gives_the_bits_of_one_that_was_idle(tied_model: str, soon: None) -> None:
    """The first is that of a run that is resumed. What is compared when it is loaded is no step of a sampler."""
    model, one, results = load_model(tied_model), request(random_tokens(9, 4), None, max_tokens=12), []
    for _ in range(2):
        with held_in_steps(model, None) as held:
            results.append(alone(model, one))
        assert held == [False] * 3 + [True] * 8
    first, second = (result.sequences[0].logprobs for result in results)
    assert first == second


def test_rows_of_several_snapshots_get_their_own(model: BaseModel, soon: None) -> None:
    first, second = (frozen_adapter(model, 4, seed) for seed in (1, 2))
    requests = [
        request(random_tokens(6, i), adapter, max_tokens=6 * (i + 1), seed=i)
        for i, adapter in enumerate([second, None, first, first])  # which alone is left at the end
    ]
    direct = Direct(model)
    submitted = direct.submit(*requests)
    with held_in_steps(model, None) as base, held_in_steps(model, first) as held:
        direct.finish()
    assert base[4] and not held[4] and held[-1]  # rows of several go through the base model's
    for one, slip in zip(requests, submitted, strict=True):
        assert_same_samples(slip.result, alone(model, one))


def test_base_rows_are_not_touched_by_what_is_merged(model: BaseModel, soon: None) -> None:
    adapter, direct = frozen_adapter(model, 4, seed=1), Direct(model)
    one = request(random_tokens(6, 1), None, max_tokens=5)
    direct.submit(request(random_tokens(6, 2), adapter, max_tokens=30))
    for _ in range(6):
        direct.generator.step()
    assert holds(model, adapter)
    (slip,) = direct.submit(one)
    direct.finish()
    assert_same_samples(slip.result, alone(model, one))


def test_what_is_being_trained_or_too_large_is_not_merged(
    model: BaseModel, soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    linears, trained = decoder_of(model).prepared._linears, model.new_adapter(LoraSpec(4), 0)
    for adapter, most, used in (
        (trained, decoder.MAX_BYTES, True),
        (frozen_adapter(model, 4, 1), 1000, False),
    ):
        monkeypatch.setattr(decoder, "MAX_BYTES", most)
        prepared, spans = decoder.PreparedWeights(linears), spans_of(adapter)
        for _ in range(10):
            prepared.begin_step(spans)
        made = prepared.products(spans)
        assert (
            made.rest == (spans if used else []) and bool(made.copies) == used
        )  # what is trained goes through the base model's
        prepared.reset()


def test_in_16_bits_no_snapshot_is_merged(soon: None, tied_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """W + B A would be rounded to what W is rounded to."""
    model = load_model(tied_model, dtype=torch.bfloat16)
    adapter = frozen_adapter(model, 4, seed=1)
    one = request(random_tokens(6, 2), adapter, max_tokens=10)
    expected = unmerged(model, one, monkeypatch)
    with held_in_steps(model, None) as base, held_in_steps(model, adapter) as held:
        found = alone(model, one)
    assert base == [False] * 3 + [True] * 6 and not any(held)
    assert_same_samples(found, expected, atol=0.1)


def test_a_snapshot_that_nobody_has_any_more_is_not_kept(model: BaseModel, soon: None) -> None:
    prepared, adapter = decoder_of(model).prepared, frozen_adapter(model, 4, seed=1)
    model.free_prepared()
    for _ in range(5):
        prepared.begin_step(spans_of(adapter))
    assert holds(model, adapter) and prepared._prepared is not None
    del adapter
    assert prepared._prepared() is None and prepared.products([]).copies == {}


def test_without_memory_for_the_copies_decoding_goes_on(
    tied_model: str, soon: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, prepare, calls = load_model(tied_model), decoder._copy, []
    one = request(random_tokens(6, 2), frozen_adapter(model, 4, seed=1), max_tokens=14)
    expected = unmerged(model, one, monkeypatch)

    def scarce(part: LoraLinear, adapter: Adapter) -> torch.Tensor | None:
        calls.append(part)
        if len(calls) > 1:
            raise MemoryError
        return prepare(part, adapter)

    monkeypatch.setattr(decoder, "_copy", scarce)
    direct = Direct(model)
    with caplog.at_level(logging.WARNING):
        (found,) = direct.run(one)
    assert_same_samples(found, expected)
    assert len(calls) == 2 and direct.generator.stats.out_of_memory == 0
    assert (
        decoder_of(model).prepared._copies == {} and caplog.text.count("out of memory for a copy of the weights") == 1
    )
