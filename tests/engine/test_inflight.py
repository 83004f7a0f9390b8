"""Weights that change while sequences are sampled: each token says which weights drew it, and its logprob is theirs."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.reference import expert_tensor, experts_with
from tests.engine.direct import Direct, assert_same_samples, frozen_adapter, request
from tests.engine.helpers import assert_near, make_training_client, params, prompt, random_tokens, tokens_of
from tinker_local_backend import ServiceClient
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.model.lora import Adapter
from tinker_local_backend.engine.models import load_model
from tinker_local_backend.engine.sampling.inflight import InflightWeights, PublishedWeights
from tinker_local_backend.errors import RequestError
from tinker_local_backend.sequence import LocalSequence


@pytest.fixture(scope="module")
def model(tied_model: str) -> BaseModel:
    return load_model(tied_model)


@pytest.fixture
def adapters(model: BaseModel) -> list[Adapter]:
    """They leave alone what expands a latent: transformers keeps latents of tokens, and the engine their keys and values."""
    adapters = [frozen_adapter(model, 4, seed) for seed in range(3)]
    for adapter in adapters:
        for name, matrix in adapter.b.items():
            if name.endswith("kv_b_proj"):
                matrix.zero_()
    return adapters


def merged(folder: str, adapter: Adapter) -> Any:
    """transformers' own model in float64, with the adapter in its weights."""
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager").eval()
    whole.lm_head.weight = torch.nn.Parameter(whole.lm_head.weight.detach().clone())  # the head's adapter is its own
    for name, a in adapter.a.items():
        delta = adapter.spec.scale * adapter.b[name].detach().cpu().double() @ a.detach().cpu().double()
        with torch.no_grad():
            if delta.dim() == 2:
                whole.get_parameter(f"{name}.weight").add_(delta)
                continue
            parent, _, leaf = name.rpartition(".")
            experts = whole.get_submodule(parent)
            weights = getattr(experts, expert_tensor(experts, leaf))
            weights.copy_(experts_with(experts, leaf, weights, delta))
    return whole


@torch.no_grad()
def reference_logprobs(models: Sequence[Any], start: Sequence[int], tokens: Sequence[int], versions: Sequence[int]):
    """Logprobs of the tokens, each under the model of its version, on what earlier models kept of the tokens before."""
    cache, logprobs, fed = DynamicCache(config=models[0].config), [], list(start)
    for token, version in zip(tokens, versions, strict=True):
        logits = models[version](torch.tensor([fed]), past_key_values=cache, use_cache=True).logits[0, -1]
        logprobs.append(float(logits.log_softmax(-1)[token]))
        fed = [token]
    return np.array(logprobs)


@pytest.mark.usefixtures("one_token_a_step")
def test_each_token_has_the_logprob_of_the_weights_that_drew_it(
    tied_model: str, model: BaseModel, adapters: list[Adapter]
) -> None:
    """Three versions in one reply: on the present weights, on the cache of the earlier ones."""
    published = PublishedWeights(adapters[0])
    weights, start = InflightWeights(published), random_tokens(7, 3)
    direct = Direct(model)
    inflight, snapshot = direct.submit(
        request(start, weights, max_tokens=40, seed=5), request(start, adapters[0], max_tokens=40, seed=5)
    )
    for adapter in adapters[1:]:
        for _ in range(3):
            direct.generator.step()
        published.publish(adapter)
    direct.finish()
    (sequence,), (fixed,) = inflight.result.sequences, snapshot.result.sequences
    versions = sequence.versions
    assert versions == sorted(versions) and set(versions) == {0, 1, 2} and len(versions) == len(sequence.tokens) == 40
    assert fixed.versions == []

    models = [merged(tied_model, adapter) for adapter in adapters]
    expected = reference_logprobs(models, start, sequence.tokens, versions)
    assert_near(np.array(sequence.logprobs), expected, atol=2e-5)
    # One version for all of it is something else, and so are the present weights on a cache of their own.
    for version in range(3):
        assert (
            abs(np.array(sequence.logprobs) - reference_logprobs(models, start, sequence.tokens, [version] * 40)).max()
            > 0.01
        )
    switch = versions.index(1)
    assert sequence.tokens[:switch] == fixed.tokens[:switch]
    assert_near(np.array(fixed.logprobs), reference_logprobs(models, start, fixed.tokens, [0] * 40), atol=2e-5)


@pytest.mark.usefixtures("one_token_a_step")
def test_neighbours_keep_their_weights(model: BaseModel, adapters: list[Adapter]) -> None:
    """Snapshots in the same batch draw what they draw alone, before and after weights are published."""
    published = PublishedWeights(adapters[0])
    direct = Direct(model)
    kept = [request(random_tokens(5 + i, i), adapters[i % 3], max_tokens=24, seed=i) for i in range(4)]
    submitted = direct.submit(
        *kept, *(request(random_tokens(6, i), InflightWeights(published), max_tokens=24) for i in range(2))
    )
    direct.generator.step()
    direct.generator.step()
    published.publish(adapters[1])
    direct.finish()
    for one, slip in zip(kept, submitted, strict=False):
        assert_same_samples(slip.result, Direct(model).run(one)[0])
    assert all(set(slip.result.sequences[0].versions) == {0, 1} for slip in submitted[4:])


def test_a_client_shares_cached_prefixes_with_itself_alone(model: BaseModel, adapters: list[Adapter]) -> None:
    published = PublishedWeights(adapters[0])
    one, other = InflightWeights(published), InflightWeights(published)
    direct, start = Direct(model), random_tokens(64, 1)
    cached = [
        direct.run(request(start, weights, seed=i))[0].cached_tokens for i, weights in enumerate((one, one, other))
    ]
    assert cached[0] == cached[2] == 0 and cached[1] > 0


def test_clients_follow_what_is_published(service: ServiceClient, tied_model: str) -> None:
    """Later saves update earlier clients; a snapshot of the same moment gives the same tokens; training alone changes nothing."""
    training = make_training_client(service, tied_model, seed=1)
    first = training.save_weights_and_get_sampling_client(kind="inflight").result()
    start = random_tokens(6, 2)
    before = tokens_of(first, start, seed=3)
    run = training._run
    with torch.no_grad():
        for matrix in run.state.adapter.b.values():
            matrix.add_(0.3)
    assert tokens_of(first, start, seed=3) == before, "nothing is published yet"
    second = training.save_weights_and_get_sampling_client(kind="inflight").result()
    snapshot = training.save_weights_and_get_sampling_client().result()
    after = tokens_of(snapshot, start, seed=3)
    assert tokens_of(first, start, seed=3) == tokens_of(second, start, seed=3) == after != before

    (sequence,) = first.sample(prompt(start), 1, params(seed=3)).result().sequences
    assert isinstance(sequence, LocalSequence) and sequence.weight_versions_np is not None
    assert sequence.weight_versions_np.tolist() == [1] * len(sequence.tokens)
    (fixed,) = snapshot.sample(prompt(start), 1, params(seed=3)).result().sequences
    assert isinstance(fixed, LocalSequence) and fixed.weight_versions_np is None


def test_an_unknown_kind_is_refused(service: ServiceClient, tied_model: str) -> None:
    training = make_training_client(service, tied_model)
    with pytest.raises(RequestError, match="kind='live' is neither snapshot nor inflight"):
        training.save_weights_and_get_sampling_client(kind="live")  # pyright: ignore[reportArgumentType]
