"""The loop that trains decisions: a batch is one forward_backward_custom with the score as the loss, and one optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import chz

from tinker_cookbook.clients import CustomLossFn, TrainingClient
from tinker_cookbook.decisions.data import split_decisions
from tinker_cookbook.decisions.rules import Rule, decision_loss
from tinker_cookbook.models import info as model_info
from tinker_cookbook.runs.config import CheckedData
from tinker_cookbook.runs.evaluation import TrainingClientEvaluator, forward_logprobs
from tinker_cookbook.runs.outcome import RunSummary
from tinker_cookbook.runs.session import Session
from tinker_cookbook.runs.steps import Batch, Metrics, count_loss_tokens, count_tokens
from tinker_cookbook.supervised.common import check_context
from tinker_cookbook.supervised.epochs import EpochConfig, EpochData, EpochLoop, EpochOptions, run_epochs
from tinker_cookbook.utils.lazy import tinker, torch


@chz.chz(typecheck=True)
class DecisionOptions(EpochOptions):
    """Settings of the loop."""

    rule: Rule = chz.field(
        default="cross_entropy",
        doc="the proper scoring rule to train on: cross_entropy, or brier, which is bounded",
    )


@chz.chz(typecheck=True)
class Config(DecisionOptions, EpochConfig):
    """A run on decisions (`DecisionDatasetBuilder`)."""


def check_config(config: Config) -> EpochData:
    """Check everything that needs no model; returns the data read for it.

    Raises:
        ConfigurationError: backend, model, or nothing to train on.
        DataError, RendererError: a row that cannot be used; the message gives its location.
    """
    return _checked.check(config)


def _read(config: Config) -> EpochData:
    config.check_setup()
    return EpochData(config, partial(check_batch, context=model_info.get_context_length(config.model_name)))


_checked: CheckedData[EpochData] = CheckedData(_read)


def check_batch(data: list[tinker.Datum], where: str, context: int | None = None) -> None:
    """Raise DataValidationError unless the datums are whole decisions that fit the context. `where` names the batch."""
    del where  # the errors name the datum or the row
    split_decisions(data)
    check_context(data, context)


async def main(config: Config) -> RunSummary:
    """Run or resume a complete run."""
    data = _checked.take(config)

    async def make_loop(session: Session) -> EpochLoop:
        return _Loop(config, session, data)

    return await run_epochs(config, data, make_loop, {})


class _Loop(EpochLoop):
    def __init__(self, config: Config, session: Session, data: EpochData) -> None:
        evaluators = [partial(DecisionEvaluator, data.test, config.rule)] if data.test else []
        super().__init__(config, session, data, evaluators)
        self._rule: Rule = config.rule

    async def read(self, step: int, metrics: Metrics) -> Batch | None:
        drawn = self.draw(step, metrics)
        if not drawn:
            return None
        data, targets = split_decisions(drawn)
        return Batch(data, decision_loss_fn(targets, self._rule), partial(_report, data, len(targets)))


def _report(data: list[tinker.Datum], decisions: int, output: tinker.ForwardBackwardOutput) -> Metrics:
    return {
        "num_decisions": decisions,
        "num_tokens": count_tokens(data),
        "num_loss_tokens": count_loss_tokens(data),
        **output.metrics,
    }


def decision_loss_fn(targets_D: Sequence[Sequence[float]], rule: Rule) -> CustomLossFn:
    """The loss for forward_backward_custom on the datums of these decisions, choice by choice."""

    def loss_fn(data: list[tinker.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        # Weight 0 selects by index, not by multiplication: a logprob there may be -inf.
        sums = [
            values[datum.loss_fn_inputs["weights"].to_torch() != 0].double().sum()
            for datum, values in zip(data, logprobs, strict=True)
        ]
        scores, start = list[torch.Tensor](), 0
        for target in targets_D:
            scores.append(torch.stack(sums[start : start + len(target)]))
            start += len(target)
        return decision_loss(scores, targets_D, rule)

    return loss_fn


class DecisionEvaluator(TrainingClientEvaluator):
    """The metrics of `rules.decision_loss` on held-out decisions, as <name>/brier, ..."""

    def __init__(self, batches: Sequence[list[tinker.Datum]], rule: Rule, name: str = "test"):
        split = [split_decisions(batch) for batch in batches]
        self._batches = [data for data, _ in split]
        self._targets = [target for _, targets in split for target in targets]
        self._rule: Rule = rule
        self._name = name

    async def __call__(self, training_client: TrainingClient) -> dict[str, float]:
        logprobs = [values.to_torch() for values in await forward_logprobs(training_client, self._batches)]
        data = [datum for batch in self._batches for datum in batch]
        _, metrics = decision_loss_fn(self._targets, self._rule)(data, logprobs)
        return {f"{self._name}/{key}": value for key, value in metrics.items()}
