"""Requests straight to a Generator, without clients or threads: the test itself turns the crank."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from benchmarks.gpu.stand_ins import graphs_for
from tests.engine.helpers import assert_samples_agree
from tinker_local_backend.engine.cuda.generation import BurstGenerator
from tinker_local_backend.engine.model.attention import PackedPlan
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.model.lora import Adapter
from tinker_local_backend.engine.models import new_generator
from tinker_local_backend.engine.sampling.generation import Generator
from tinker_local_backend.engine.sampling.inflight import InflightWeights
from tinker_local_backend.engine.sampling.requests import SamplingRequest, StopRule
from tinker_local_backend.engine.sampling.sampler import SamplingResult, Ticket


def request(
    tokens: Sequence[int],
    weights: Adapter | InflightWeights | None = None,
    samples: int = 1,
    max_tokens: int = 8,
    seed: int = 0,
    **fields: Any,
) -> SamplingRequest:
    """Without a stop, unless one is given."""
    return SamplingRequest(tuple(tokens), weights, samples, max_tokens, seed=seed, **{"stop": StopRule(), **fields})


def frozen_adapter(model: BaseModel, rank: int, seed: int) -> Adapter:
    """A snapshot that changes every logit."""
    adapter = model.new_adapter(model.widest_spec(rank), seed)
    generator = torch.Generator().manual_seed(seed + 100)
    with torch.no_grad():
        for name, matrix in sorted(adapter.b.items()):
            matrix.copy_(torch.randn(matrix.shape, generator=generator) * (0.02 if "lm_head" in name else 0.05))
    return adapter.snapshot(model.dtype)


@dataclass(eq=False)
class Submitted:
    """What becomes of a request."""

    outcomes: list[SamplingResult | BaseException] = field(default_factory=list)
    cancelled: bool = False

    @property
    def result(self) -> SamplingResult:
        (outcome,) = self.outcomes
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


class Direct:
    """A generator of its own on a model that others use too."""

    def __init__(self, model: BaseModel, budget: int = 8192, **bounds: Any):
        """`bounds`: prefill_tokens and max_running, where they are not the engine's own."""
        seeds = itertools.count(1000).__next__
        self.generator = new_generator(model, budget, seeds)
        if bounds and isinstance(self.generator, BurstGenerator):
            self.generator = BurstGenerator(model, budget, seeds, graphs_for(model.device), **bounds)
        elif bounds:
            self.generator = Generator(model, budget, seeds, **bounds)

    def submit(self, *requests: SamplingRequest) -> list[Submitted]:
        submitted = []
        for one in requests:
            slip = Submitted()
            self.generator.add(Ticket(one, slip.outcomes.append, lambda slip=slip: slip.cancelled))
            submitted.append(slip)
        return submitted

    def finish(self) -> None:
        """Step until nothing is left to do."""
        for _ in range(10_000):
            if not self.generator.busy:
                return
            self.generator.step()
        raise AssertionError("the generator never comes to an end")

    def run(self, *requests: SamplingRequest) -> list[SamplingResult]:
        """All at once, to the end."""
        submitted = self.submit(*requests)
        self.finish()
        return [slip.result for slip in submitted]


def alone(model: BaseModel, one: SamplingRequest) -> SamplingResult:
    """What a request gives in a generator that has never seen another."""
    return Direct(model).run(one)[0]


def assert_same_samples(found: SamplingResult, expected: SamplingResult, atol: float = 1e-5) -> None:
    """The same tokens, and logprobs up to rounding."""
    assert_samples_agree(found.sequences, expected.sequences, atol)


def reused(model: BaseModel, common: int, *kept: int) -> int:
    """Tokens of a cached common prefix that are not computed again: all of them, or in a model with states, those up to the
    last position at which a state is kept.
    """
    return max((n for n in kept if n <= common), default=0) if model.mixers else common


@contextmanager
def prefilled_tokens() -> Iterator[list[int]]:
    """The number of tokens of each prefill pass within."""
    passes: list[int] = []
    hidden_states = BaseModel.hidden_states

    def counted(self: BaseModel, tokens_T: torch.Tensor, positions_T: torch.Tensor, plan: Any, *rest: Any):
        if isinstance(plan, PackedPlan):
            passes.append(len(tokens_T))
        return hidden_states(self, tokens_T, positions_T, plan, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BaseModel, "hidden_states", counted)
        yield passes
