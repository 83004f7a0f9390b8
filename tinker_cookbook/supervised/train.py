"""Supervised fine-tuning: batches of weighted tokens, cross-entropy, Adam with a schedule."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from functools import partial

import chz
from rich.console import Console

from tinker_cookbook.clients import TrainingClient
from tinker_cookbook.data.rows import located
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.models import info as model_info
from tinker_cookbook.models.hyperparameters import warn_if_low
from tinker_cookbook.renderers.datum_text import example_text
from tinker_cookbook.runs.config import CheckedData
from tinker_cookbook.runs.evaluation import Evaluator, TrainingClientEvaluator, forward_logprobs, run_evaluators
from tinker_cookbook.runs.outcome import RunSummary
from tinker_cookbook.runs.session import Session
from tinker_cookbook.runs.steps import Batch, Metrics, count_loss_tokens, count_tokens
from tinker_cookbook.supervised.common import check_context, nll_metrics
from tinker_cookbook.supervised.epochs import (
    EpochConfig,
    EpochData,
    EpochLoop,
    EpochOptions,
    run_epochs,
)
from tinker_cookbook.supervised.types import ChatDatasetBuilder
from tinker_cookbook.utils import trace
from tinker_cookbook.utils.lazy import tinker

SHOWN_TOKENS = 512


@chz.chz(typecheck=True)
class SupervisedOptions(EpochOptions):
    """Settings of the supervised loop."""

    submit_ahead: int = chz.field(
        default=1, doc="batches submitted before the oldest is awaited", validator=chz.validators.ge(0)
    )


@chz.chz(typecheck=True)
class Config(SupervisedOptions, EpochConfig):
    """A supervised run."""

    @chz.validate
    def _check_renderer(self) -> None:
        """Check that the renderer recorded with the checkpoints is the one that made the data."""
        name, builder = self.renderer_name, self.dataset_builder
        used = builder.common_config.renderer_name if isinstance(builder, ChatDatasetBuilder) else name
        if name is not None and used != name:
            raise ConfigurationError(
                f"renderer_name={name!r}, but the dataset is rendered by {used!r}; name the same one, or leave it out"
            )


def check_config(config: Config) -> EpochData:
    """Check everything that needs no model; returns the data that were read to check them."""
    return _checked.check(config)


def _read(config: Config) -> EpochData:
    config.check_setup()
    warn_if_low(config.learning_rate, config.model_name)
    return EpochData(config, partial(_check_lengths, model_info.get_context_length(config.model_name)))


_checked: CheckedData[EpochData] = CheckedData(_read)


def _check_lengths(context: int | None, data: list[tinker.Datum], where: str) -> None:
    if not data:
        raise ConfigurationError(f"{where} of the dataset is empty; a batch needs at least one datum")
    with located(where):
        check_context(data, context)


@dataclass
class SubmittedBatch:
    """A submitted batch, for custom loops: the futures to await, and the metrics of its row."""

    fwd_bwd_future: Awaitable[tinker.ForwardBackwardOutput]
    optim_step_future: Awaitable[tinker.OptimStepResponse]
    metrics: Metrics
    data: list[tinker.Datum]
    step: int
    epoch_idx: int
    batch_idx: int
    eval_metrics: dict[str, float] | None = None
    """from evaluations before this step; None: there were none"""
    infrequent_eval_metrics: dict[str, float] | None = None
    num_tokens: int = 0
    """positions that the model reads"""


@trace.scope
async def run_evals(evaluators: Sequence[Evaluator], training_client: TrainingClient, step: int) -> dict[str, float]:
    """`run_evaluators` before step `step` is submitted, that is with the weights after the previous steps."""
    trace.update_scope_context({"step": step})
    return await run_evaluators(evaluators, training_client)


class NLLEvaluator(TrainingClientEvaluator):
    """Held-out loss: forward passes over all batches; metrics are named <name>/nll and <name>/bpb."""

    def __init__(self, batches: list[list[tinker.Datum]], name: str = "test"):
        self._batches, self._name = batches, name

    async def __call__(self, training_client: TrainingClient) -> dict[str, float]:
        logprobs = await forward_logprobs(training_client, self._batches)
        data = [datum for batch in self._batches for datum in batch]
        return nll_metrics(data, logprobs, training_client.get_tokenizer(), f"{self._name}/")


async def main(config: Config) -> RunSummary:
    """Run or resume a complete supervised run."""
    data = _checked.take(config)
    evaluators = [partial(NLLEvaluator, data.test)] if data.test else []

    async def make_loop(session: Session) -> EpochLoop:
        return _Loop(config, session, data, evaluators, config.submit_ahead)

    return await run_epochs(config, data, make_loop)


class _Loop(EpochLoop):
    """Cross-entropy on weighted tokens."""

    async def read(self, step: int, metrics: Metrics) -> Batch | None:
        data = self.draw(step, metrics)
        if not data:
            return None
        if step == 0:
            self._show(data[0])
        return Batch(data, "cross_entropy", partial(self._report, data))

    def _show(self, datum: tinker.Datum) -> None:
        """Print the first example, so that a wrong renderer or selection is noticed at once."""
        console = Console(soft_wrap=True, highlight=False)
        console.print("The first example (green: trained, yellow: not trained)", style="bold")
        tokenizer = self.session.training_client.get_tokenizer()
        console.print(example_text(datum, tokenizer, max_tokens=SHOWN_TOKENS))

    def _report(self, data: list[tinker.Datum], output: tinker.ForwardBackwardOutput) -> Metrics:
        logprobs = [fields["logprobs"] for fields in output.loss_fn_outputs]
        return {
            "num_sequences": len(data),
            "num_tokens": count_tokens(data),
            "num_loss_tokens": count_loss_tokens(data),
            **nll_metrics(data, logprobs, self.session.training_client.get_tokenizer(), "train_mean_"),
        }
