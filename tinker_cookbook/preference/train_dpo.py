"""Direct preference optimization: raise the chosen reply over the rejected one, relative to a frozen reference policy.

    for each batch of pairs:
        reference logprobs of both replies                        (a sampling client that never changes)
        forward_backward_custom with the DPO loss + optim_step, submitted together

The reference is the policy that the run started from, or a named one. Every checkpoint records its path, and a resumed
run reads it from there. The loss is in dpo.py, the pairs come from dpo_datasets.py.

Reference logprobs are not prefetched: nothing else is computed while a batch trains, so that a resumed run equals an
uninterrupted one bitwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any

from tinker_cookbook.clients import SamplingClient
from tinker_cookbook.models import info as model_info
from tinker_cookbook.preference.dpo import (
    Config,
    DPOEvaluator,
    DPOOptions,
    LossType,
    check_pairs,
    compute_dpo_loss,
    compute_reference_logprobs,
    dpo_loss_fn,
)
from tinker_cookbook.preference.dpo_by_hand import create_dpo_clients, do_update, print_example
from tinker_cookbook.runs.config import CheckedData
from tinker_cookbook.runs.evaluation import scoring_usage
from tinker_cookbook.runs.outcome import RunSummary
from tinker_cookbook.runs.reference import open_reference
from tinker_cookbook.runs.session import Session
from tinker_cookbook.runs.steps import Batch, Metrics, count_loss_tokens, count_tokens
from tinker_cookbook.supervised.epochs import EpochData, EpochLoop, run_epochs
from tinker_cookbook.utils.lazy import tinker
from tinker_cookbook.utils.misc_utils import timed

__all__ = [
    "Config",
    "DPOOptions",
    "LossType",
    "check_config",
    "compute_dpo_loss",
    "create_dpo_clients",
    "do_update",
    "main",
    "main_async",
    "print_example",
]


def check_config(config: Config) -> EpochData:
    """Check everything that needs no model; returns the data that were read to check them.

    Raises:
        ConfigurationError: backend, model, reference, or nothing to train on.
        DataError, RendererError: a comparison that cannot be used; the message gives its location.
    """
    return _checked.check(config)


def _read(config: Config) -> EpochData:
    config.check_setup()
    if (reference := config.named_reference()) is not None:
        reference.check("reference", config.backend, config.base_url)
    return EpochData(config, partial(check_pairs, context=model_info.get_context_length(config.model_name)))


_checked: CheckedData[EpochData] = CheckedData(_read)


def main(config: Config) -> RunSummary | Coroutine[Any, Any, RunSummary]:
    """Run or resume. Inside an event loop, as in a notebook, await it: `await main(config)`."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(main_async(config))
    return main_async(config)


async def main_async(config: Config) -> RunSummary:
    """Run or resume a complete DPO run."""
    data, named = _checked.take(config), config.named_reference()

    async def make_loop(session: Session) -> EpochLoop:
        return _Loop(config, session, data, await open_reference(session, named))

    return await run_epochs(config, data, make_loop, {"reference": named})


class _Loop(EpochLoop):
    """Trains on pairs with the DPO loss. A batch is submitted when the previous one is done: see the module's
    docstring.
    """

    def __init__(self, config: Config, session: Session, data: EpochData, reference: SamplingClient) -> None:
        settings = (reference, config.dpo_beta, config.loss_type)
        super().__init__(config, session, data, [partial(DPOEvaluator, data.test, *settings)] if data.test else [])
        self._reference, self._loss_fn = (
            reference,
            partial(dpo_loss_fn, beta=config.dpo_beta, loss_type=config.loss_type),
        )

    async def read(self, step: int, metrics: Metrics) -> Batch | None:
        data = self.draw(step, metrics)
        if not data:
            return None
        with timed("get_ref_logprobs", metrics):
            reference_logprobs = await compute_reference_logprobs(self._reference, data)
        return Batch(data, self._loss_fn(reference_logprobs), partial(_report, data), usage=scoring_usage(data))


def _report(data: list[tinker.Datum], output: tinker.ForwardBackwardOutput) -> Metrics:
    return {
        "num_pairs": len(data) // 2,
        "num_tokens": count_tokens(data),
        "num_loss_tokens": count_loss_tokens(data),
        **output.metrics,
    }
