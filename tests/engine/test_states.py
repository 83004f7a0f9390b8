"""What samplers of models with states compute, what they keep, and that a state of something else would be noticed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.reference import Reference
from tests.engine.devices import here
from tests.engine.direct import Direct, frozen_adapter, prefilled_tokens, request
from tests.engine.helpers import random_tokens, tolerance
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.model.mixers import MixerCache
from tinker_local_backend.engine.model.mixing import PackedMixing
from tinker_local_backend.engine.models import load_model
from tinker_local_backend.engine.sampling.pages import PageStore
from tinker_local_backend.engine.sampling.prefix_cache import Page, PrefixCache, PrefixMatch
from tinker_local_backend.engine.sampling.requests import PromptScoring, SamplingRequest
from tinker_local_backend.engine.sampling.state_pool import StatePool

ARCHITECTURES = ("qwen3_5_text", "nemotron_h", "jamba")
"""A gated delta rule, Mamba 2, and Mamba 1."""

CLOSE, WRONG = 1e-4, 1e-2
"""Of logprobs: rounding, and a mistake."""


@dataclass
class Sampled:
    model: BaseModel
    reference: Reference

    def difference(self, direct: Direct, requests: Sequence[SamplingRequest]) -> float:
        """The largest one of a sampled logprob from that of transformers in float64, of requests that run at once."""
        differences = []
        for one, result in zip(requests, direct.run(*requests), strict=True):
            for sequence in result.sequences:
                adapter: dict[str, torch.Tensor] = {}
                if one.adapter is not None:
                    named = one.adapter.named_parameters()
                    # Mamba 1 reads the weight of its dt_proj itself: an adapter there changes nothing, and is not trained.
                    adapter = {name: m.detach().cpu().double() for name, m in named if "mamba.dt_proj" not in name}
                scale = 1.0 if one.adapter is None else one.adapter.spec.scale
                expected = self.reference.completion_logprobs(one.prompt, sequence.tokens, adapter, scale)
                differences.append(np.abs(np.array(sequence.logprobs) - expected).max())
        return float(max(differences))

    def is_right(self, direct: Direct, requests: Sequence[SamplingRequest]) -> bool:
        return self.difference(direct, requests) < (tolerance(CLOSE) if here().dtype == torch.float32 else 0.5)


@pytest.fixture(scope="module", params=[*ARCHITECTURES[:2], pytest.param(ARCHITECTURES[2], marks=pytest.mark.slow)])
def sampled(request: pytest.FixtureRequest, written_model: Callable[[str], str]) -> Sampled:
    path = written_model(request.param)
    return Sampled(load_model(path), Reference(path))


def test_conversations_under_several_adapters(sampled: Sampled) -> None:
    """Three turns of four, two samples each; the last turn goes on from states that were kept at the end of the others."""
    model = sampled.model
    adapters = [None, frozen_adapter(model, 2, 1)] if not model._uncovered else [None]
    direct, conversations = Direct(model), [random_tokens(n, n) for n in (1, 2, 33, 70)]
    held, requests = [0] * len(conversations), []
    for turn in range(3):
        requests = [
            request(tokens, adapters[i % len(adapters)], samples=2, max_tokens=6, seed=10 * turn + i)
            for i, tokens in enumerate(conversations)
        ]
        results = direct.run(*requests)
        assert [result.cached_tokens for result in results] == [n if n >= 16 else 0 for n in held]
        assert sampled.is_right(Direct(model), requests)
        held = [len(one.prompt) + 5 for one in requests]
        conversations = [
            [*one.prompt, *result.sequences[0].tokens, *random_tokens(4, turn)]
            for one, result in zip(requests, results, strict=True)
        ]
    requests = [replace(one, prompt=tuple(tokens)) for one, tokens in zip(requests, conversations, strict=True)]
    assert sampled.is_right(direct, requests)


def test_states_do_not_grow_with_the_length_of_a_sequence(sampled: Sampled) -> None:
    """Unlike its keys and values."""
    sizes, pages = [], []
    for tokens in (50, 500) if sampled.model.config.model_type == ARCHITECTURES[0] else (30, 100):
        direct = Direct(sampled.model)
        (slip,) = direct.submit(request(random_tokens(20, 1), max_tokens=tokens))
        most = most_pages = 0
        while not slip.outcomes:
            direct.generator.step()
            states = direct.generator._store.states
            assert states is not None
            most = max(most, sum(stored.nbytes for stored in states.cache._stored.values()))
            most_pages = max(most_pages, direct.generator.stats.pages_read)
        sizes.append(most)
        pages.append(most_pages)
        assert len(slip.result.sequences[0].tokens) == tokens
        assert direct.generator.stats.states_idle == 2, "before the prompt's last token, and at the end"
    assert sizes[0] == sizes[1] > 0 and pages[0] < pages[1]


def test_what_is_told_of_states(sampled: Sampled) -> None:
    direct = Direct(sampled.model)
    expected = sum(shape.bytes for shape in sampled.model._state_shapes.values())
    assert (direct.generator.stats.states, direct.generator.stats.states_idle) == (0, 0)
    assert direct.generator.stats.state_bytes == expected > 0
    slips = direct.submit(*(request(random_tokens(20 + i, i), samples=2, max_tokens=9 + i) for i in range(3)))
    direct.generator.step()
    stats = direct.generator.stats
    assert (stats.states, stats.states_idle) == (6, 3)
    slips[0].cancelled = True
    direct.finish()
    stats = direct.generator.stats
    assert stats.states == 0 and 3 + 4 <= stats.states_idle <= 3 + 6
    direct.generator.evict_prefixes()
    assert direct.generator.stats.states_idle == 0
    assert direct.generator._store.states is not None and direct.generator._store.states.cache.slots == 0


def test_a_prompt_that_is_only_scored_keeps_no_state(sampled: Sampled) -> None:
    direct, scoring = Direct(sampled.model, prefill_tokens=16), PromptScoring(logprobs=True)
    for length in (10, 50):
        tokens = random_tokens(length, 4)
        (result,) = direct.run(request(tokens, samples=0, scoring=scoring))
        expected = sampled.reference.completion_logprobs(tokens[:1], tokens[1:])
        assert result.prompt.logprobs is not None
        assert np.abs(result.prompt.logprobs[1:] - expected).max() < (tolerance(CLOSE) if here().is_reference else 0.5)
        assert (direct.generator.stats.states, direct.generator.stats.states_idle) == (0, 0)


# Mistakes that the comparison with transformers must find


def twice(prompt: Sequence[int]) -> list[SamplingRequest]:
    return [request(prompt, max_tokens=12, seed=1), request([*prompt, 7, 8], max_tokens=12, seed=2)]


def test_a_slot_that_is_not_cleared(sampled: Sampled, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots are used again without being erased: a sequence that begins must not read what another has left in its slot."""
    first, second = twice(random_tokens(30, 1))
    direct = Direct(sampled.model)
    assert sampled.is_right(direct, [first])
    direct.generator._pool.evict()  # all slots are free, with the states in them
    assert sampled.is_right(direct, [second])
    direct.generator._pool.evict()
    initial = PackedMixing._initial

    def left(self: PackedMixing, batch: Any, of_prefixes: Any) -> Any:
        states, targets = self.states, batch.targets
        if batch.slots is None and batch.prefixes is None and targets is not None and states is not None:
            return lambda key: states.read(key, targets)
        return initial(self, batch, of_prefixes)

    monkeypatch.setattr(PackedMixing, "_initial", left)
    if sampled.model._continues:  # Mamba 1 does not read a state with more than one token
        assert sampled.difference(direct, [second]) > WRONG


def test_a_slot_of_another_sequence(sampled: Sampled, monkeypatch: pytest.MonkeyPatch) -> None:
    """Running sequences decode with the states of one another."""
    requests = [request(random_tokens(20 + i, i), max_tokens=8, seed=i) for i in range(3)]
    assert sampled.is_right(Direct(sampled.model), requests)
    read = MixerCache._get

    def shifted(self: MixerCache, key: Any) -> Any:
        known, state = key in self.states, read(self, key)
        if known or state is None or len(state) < 3:
            return state
        self.states[key] = state.roll(1, 0)
        return self.states[key]

    monkeypatch.setattr(MixerCache, "_get", shifted)
    assert sampled.difference(Direct(sampled.model), requests) > WRONG


def test_a_state_of_another_page(sampled: Sampled, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt goes on from a state that is kept for another conversation."""
    first, second = twice(random_tokens(40, 1))
    direct = Direct(sampled.model)
    assert sampled.is_right(direct, [request(random_tokens(40, 2)), first, second])
    lookup = PrefixCache.lookup

    def wrong(self: PrefixCache, *arguments: Any) -> PrefixMatch:
        match, states = lookup(self, *arguments), direct.generator._store.states
        assert states is not None
        others = [page.states[tokens] for page, tokens in states._kept if page.states[tokens] != match.state]
        return match if match.state is None else replace(match, state=others[0])

    monkeypatch.setattr(PrefixCache, "lookup", wrong)
    assert sampled.difference(direct, [second]) > WRONG


@pytest.mark.parametrize("late", [1, -1], ids=["late", "early"])
def test_a_state_one_token_late_or_early(sampled: Sampled, monkeypatch: pytest.MonkeyPatch, late: int) -> None:
    """It is kept as that after one token less, or more, than it has seen."""
    first, second = twice(random_tokens(40, 1))
    assert sampled.is_right(Direct(sampled.model), [first])
    keep = StatePool.keep
    monkeypatch.setattr(StatePool, "keep", lambda self, page, tokens, slot: keep(self, page, tokens - late, slot))
    direct = Direct(sampled.model)
    assert sampled.is_right(direct, [first])
    with prefilled_tokens() as passes:
        assert sampled.difference(direct, [second]) > WRONG
    assert sum(passes) < len(second.prompt), "it goes on from what is cached"


def test_a_state_of_another_adapter(sampled: Sampled, monkeypatch: pytest.MonkeyPatch) -> None:
    if sampled.model._uncovered:
        pytest.skip("no adapter")
    first, second = twice(random_tokens(40, 1))
    other = replace(second, weights=frozen_adapter(sampled.model, 2, 1))
    direct = Direct(sampled.model)
    assert sampled.is_right(direct, [first]) and sampled.is_right(direct, [other])
    cache_prefix = PageStore.cache_prefix
    lookup = PrefixCache.lookup
    monkeypatch.setattr(PageStore, "cache_prefix", lambda self, adapter, *rest: cache_prefix(self, None, *rest))
    monkeypatch.setattr(PrefixCache, "lookup", lambda self, adapter, *rest: lookup(self, None, *rest))
    assert sampled.difference(direct, [other]) > WRONG


def test_a_prefix_of_another_group(sampled: Sampled, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within one pass, prompts with two common beginnings of one length go on from the states of each other's."""
    heads = random_tokens(30, 1), random_tokens(30, 2)
    requests = [request([*head, *random_tokens(6 + i, i)], max_tokens=4, seed=i) for head in heads for i in range(2)]
    assert sampled.is_right(Direct(sampled.model), requests)
    initial = PackedMixing._initial

    def swapped(self: PackedMixing, batch: Any, of_prefixes: Any) -> Any:
        if batch.prefixes is not None:
            batch = replace(batch, prefixes=1 - batch.prefixes)
        return initial(self, batch, of_prefixes)

    monkeypatch.setattr(PackedMixing, "_initial", swapped)
    if sampled.model._continues:  # Mamba 1 computes the prefix again
        assert sampled.difference(Direct(sampled.model), requests) > WRONG


def test_a_dropped_page_takes_its_states_along(sampled: Sampled) -> None:
    """Slots of pages that the pool has given to others hold something else soon."""
    direct = Direct(sampled.model, budget=200)
    for n in range(6):
        assert sampled.is_right(direct, twice(random_tokens(40, n % 2)))
        states = direct.generator._store.states
        assert states is not None
        pages: set[Page] = {page for page, _ in states._kept}
        assert all(page.parent is not None for page in pages)
