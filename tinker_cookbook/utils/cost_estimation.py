"""Tokens that a run has used, by billing category, and an estimate of their cost on the hosted service.

A sampled token that is trained on is billed twice, for sampling and for training; a prompt is billed on every turn, at
a lower rate if the service had it cached. So there are four separate counts (`TokenUsage`). They cover what a loop
sends and receives, but not evaluations, failed requests and rollouts still in flight at the end.

Rates come from the service's published price list, downloaded once per process and never written to disk. If the
model's entry is missing or incomplete, there are counts but no costs.
"""

from __future__ import annotations

import json
import logging
import urllib.request
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass
from operator import add

from tinker_cookbook.utils.git_rev import installed_version
from tinker_cookbook.utils.narrowing import is_list, is_object

logger = logging.getLogger(__name__)

TOKENS_PER_MILLION = 1_000_000

PRICING_URL = "https://tinker-docs.thinkingmachines.ai/tinker/models.json"
"""The hosted service's price list: a JSON list with an object per model."""


@dataclass(frozen=True)
class TokenUsage:
    """Tokens by billing category."""

    sampled: int = 0
    """returned by sampling requests"""
    prefill_cached: int = 0
    """prompt tokens in the service's cache"""
    prefill_uncached: int = 0
    """other prompt tokens"""
    trained: int = 0
    """tokens of datums, targets or not"""

    def __add__(self, other: TokenUsage) -> TokenUsage:
        return TokenUsage(*map(add, astuple(self), astuple(other)))

    def metrics(self, prefix: str) -> dict[str, int]:
        """The counts as metrics `<prefix>/<kind>`."""
        return {f"{prefix}/{kind}": count for kind, count in asdict(self).items()}


@dataclass(frozen=True)
class TokenCostRates:
    """Price of a million tokens of each kind, in US dollars."""

    prefill_usd_per_million: float
    cached_prefill_usd_per_million: float
    sample_usd_per_million: float
    train_usd_per_million: float

    def estimate_usd(self, usage: TokenUsage) -> float:
        """US dollars: the sum over the kinds of count x rate, divided by a million."""
        return (
            usage.prefill_uncached * self.prefill_usd_per_million
            + usage.prefill_cached * self.cached_prefill_usd_per_million
            + usage.sampled * self.sample_usd_per_million
            + usage.trained * self.train_usd_per_million
        ) / TOKENS_PER_MILLION


def rates_from_pricing_entry(entry: Mapping[str, object]) -> TokenCostRates | None:
    """The rates of an entry in the price list, with prices such as "$1.87". None: one of the four is missing."""
    prices = [_price(entry.get(name)) for name in ("prefill", "cached_prefill", "sample", "train")]
    known = [price for price in prices if price is not None]
    return TokenCostRates(*known) if len(known) == len(prices) else None


def _price(value: object) -> float | None:
    try:
        return float(str(value).strip().removeprefix("$").replace(",", ""))
    except ValueError:
        return None


_pricing_fetched = False
_pricing_entries: list[dict[str, object]] | None = None
"""The price list of this process; also None if the download failed."""


def load_model_pricing(*, url: str = PRICING_URL, timeout: float = 5.0) -> list[dict[str, object]] | None:
    """The price list. The first call downloads it, for the whole process.

    Args:
        timeout: seconds.

    Returns:
        One dict per model; None if the download failed, which is logged once and not retried.
    """
    global _pricing_fetched, _pricing_entries
    if not _pricing_fetched:
        _pricing_fetched = True
        try:
            _pricing_entries = _download_pricing(url, timeout)
        except Exception as error:  # any error: a run must not fail because of prices
            reason = f"{type(error).__name__}: {error}"
            logger.warning("Could not fetch the prices from %s (%s): tokens are counted, without costs", url, reason)
    return _pricing_entries


def _download_pricing(url: str, timeout: float) -> list[dict[str, object]]:
    # The site answers urllib's default User-Agent with 403.
    request = urllib.request.Request(url, headers={"User-Agent": f"tinker-cookbook/{installed_version()}"})
    with urllib.request.urlopen(request, timeout=timeout) as response:
        entries = json.load(response)
    if not is_list(entries) or not all(is_object(entry) for entry in entries):
        raise ValueError("it is not a JSON list of objects")
    return entries


def fetch_model_pricing(model_name: str, *, url: str = PRICING_URL, timeout: float = 5.0) -> TokenCostRates | None:
    """The rates of a model. None, with a warning, if the list is not available, or lacks one of the model's prices.

    Args:
        model_name: the service's name, with its `:peft:` suffix: longer contexts have other prices.
    """
    entries = load_model_pricing(url=url, timeout=timeout)
    if entries is None:
        return None
    entry = next((entry for entry in entries if entry.get("tinker_id") == model_name), None)
    if entry is None:
        logger.warning("%s is not listed in %s: its tokens are counted, without costs", model_name, url)
        return None
    rates = rates_from_pricing_entry(entry)
    if rates is None:
        logger.warning("The entry of %s in %s is incomplete (%s): tokens without costs", model_name, url, entry)
        return None
    logger.info("Prices of %s: %s%s", model_name, rates, f" ({entry['note']})" if entry.get("note") else "")
    return rates


class CostTracker:
    """Adds up a run's tokens step by step, and returns them as metrics.

    Args:
        rates: for costs; None: only counts tokens.
        cumulative: usage of earlier processes of the run, from its checkpoint.
        discarded: the part of it that was never trained on.
    """

    def __init__(
        self,
        rates: TokenCostRates | None = None,
        *,
        cumulative: TokenUsage = TokenUsage(),
        discarded: TokenUsage = TokenUsage(),
    ) -> None:
        self.rates = rates
        self.cumulative = cumulative
        """all usage so far; saved in the checkpoint"""
        self.discarded = discarded
        """the part of `cumulative` sampled for groups that were dropped before training; saved in the checkpoint"""
        self.step = TokenUsage()
        """usage of the last step"""

    def record_step(self, usage: TokenUsage) -> dict[str, float]:
        """Start a step with its usage. Returns its metrics.

        Those are `tokens/<kind>`, `tokens/cumulative/<kind>` and, with rates, `cost/step_usd` and `cost/cumulative_usd`.
        """
        self.step = TokenUsage()
        return self.extend_step(usage)

    def extend_step(self, usage: TokenUsage) -> dict[str, float]:
        """Add more usage to the step. Returns the metrics of the whole step."""
        self.step += usage
        self.cumulative += usage
        metrics: dict[str, float] = {**self.step.metrics("tokens"), **self.cumulative.metrics("tokens/cumulative")}
        if self.rates is not None:
            metrics["cost/step_usd"] = self.rates.estimate_usd(self.step)
            metrics["cost/cumulative_usd"] = self.rates.estimate_usd(self.cumulative)
        return metrics

    def record_discarded_sampling(self, usage: TokenUsage) -> None:
        """Count the sampled tokens of a group that is not trained on. They belong to no step."""
        self.cumulative += usage
        self.discarded += usage

    def cumulative_metrics(self) -> dict[str, float]:
        """The totals: `tokens/cumulative/<kind>`, `tokens/discarded/<kind>` and their costs."""
        metrics: dict[str, float] = {
            **self.cumulative.metrics("tokens/cumulative"),
            **self.discarded.metrics("tokens/discarded"),
        }
        if self.rates is not None:
            metrics["cost/cumulative_usd"] = self.rates.estimate_usd(self.cumulative)
            metrics["cost/discarded_usd"] = self.rates.estimate_usd(self.discarded)
        return metrics
