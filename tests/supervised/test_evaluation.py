"""Rounds of evaluation: what is due when, one snapshot for all that sample, and no metric reported twice."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import FakeServiceClient, FakeTrainingClient
from tinker_cookbook.eval.evaluators import (
    EvaluationRounds,
    SamplingClientEvaluator,
    TrainingClientEvaluator,
    run_evaluators,
)
from tinker_cookbook.exceptions import ConfigurationError


class Trainer(TrainingClientEvaluator):
    async def __call__(self, training_client: Any) -> dict[str, float]:
        return {"trainer/weights": training_client.weights}


class Sampler(SamplingClientEvaluator):
    def __init__(self, name: str):
        self.name = name

    async def __call__(self, sampling_client: Any) -> dict[str, float]:
        return {f"{self.name}/weights": sampling_client.weights}


def trainer(weights: int = 3) -> FakeTrainingClient:
    return FakeTrainingClient(FakeServiceClient(), "run", weights)


def test_one_snapshot_is_made_when_the_first_needs_it() -> None:
    client = trainer()
    metrics = asyncio.run(run_evaluators([Trainer(), Sampler("a"), Sampler("b")], client))
    assert metrics == {"trainer/weights": 3, "a/weights": 3, "b/weights": 3}
    assert client.service.calls.count("submit snapshot") == 1
    client = trainer()
    asyncio.run(run_evaluators([Trainer()], client))
    assert client.service.calls == []


def test_a_snapshot_that_the_loop_has_is_used() -> None:
    client = trainer()
    given = client.service.new_sampler(9)
    assert asyncio.run(run_evaluators([Sampler("a")], client, given)) == {"a/weights": 9}
    assert client.service.calls == []


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigurationError, match=r"Sampler reports \['a/weights'\], as an evaluator before it does"):
        asyncio.run(run_evaluators([Sampler("a"), Sampler("a")], trainer()))
    stranger: Any = lambda client: {}  # noqa: E731
    with pytest.raises(ConfigurationError, match="neither a TrainingClientEvaluator nor a SamplingClientEvaluator"):
        asyncio.run(run_evaluators([stranger], trainer()))


@given(st.integers(0, 5), st.integers(0, 5), st.integers(0, 30))
def test_what_is_due(every: int, rarely: int, step: int) -> None:
    rounds = EvaluationRounds.build([Trainer], every, [lambda: Sampler("rare")], rarely)
    kinds = {type(evaluator) for evaluator in rounds.due(step)}
    assert (Trainer in kinds) == (every > 0 and step % every == 0)
    assert (Sampler in kinds) == (rarely > 0 and step % rarely == 0)
    assert {type(evaluator) for evaluator in rounds.at_end()} == {
        *([Trainer] if every else []),
        *([Sampler] if rarely else []),
    }
