"""Rounds of evaluation: what is due when, one snapshot for all that sample, and no metric reported twice."""

import asyncio
from typing import Any

import pytest
import tinker
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import FakeServiceClient, FakeTrainingClient
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.runs.evaluation import (
    EvaluationRounds,
    SamplingClientEvaluator,
    TrainingClientEvaluator,
    run_evaluators,
)
from tinker_cookbook.supervised.train import SubmittedBatch, run_evals


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


def test_a_loop_of_ones_own_runs_evaluators_and_holds_what_it_submitted() -> None:
    class Counts(TrainingClientEvaluator):
        async def __call__(self, training_client: Any) -> dict[str, float]:
            return {"test/weights": training_client.weights}

    async def loop() -> tuple[dict[str, float], SubmittedBatch]:
        trainer = await FakeServiceClient().create_lora_training_client("x")
        measured = await run_evals([Counts()], trainer, 0)
        passes = trainer.forward_backward([], "cross_entropy")
        submitted = SubmittedBatch(
            passes, trainer.optim_step(tinker.AdamParams()), {}, [], 0, 0, 0, eval_metrics=measured
        )
        await submitted.fwd_bwd_future
        submitted.metrics |= (await submitted.optim_step_future).metrics or {}
        return await run_evals([Counts()], trainer, 1), submitted

    after, submitted = asyncio.run(loop())
    assert (submitted.eval_metrics, after) == ({"test/weights": 0}, {"test/weights": 1})
    assert submitted.metrics == {"grad_norm": 1.0} and submitted.num_tokens == 0
