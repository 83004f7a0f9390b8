"""What tokens cost: a table that the user gives, or the hosted service's price list."""

import chz

from tinker_cookbook import backends
from tinker_cookbook.utils.cost_estimation import TokenCostRates, fetch_model_pricing
from tinker_cookbook.utils.fields import FieldGroup


def _price(of: str) -> float:
    return chz.field(default=0.0, doc=f"US dollars for a million tokens {of}", validator=chz.validators.ge(0))


@chz.chz(typecheck=True)
class PriceConfig:
    """Prices in US dollars per million tokens."""

    sample: float = _price("that are sampled")
    prefill: float = _price("of prompts")
    cached_prefill: float = _price("of prompts that the cache had")
    train: float = _price("of datums that are trained on")

    def rates(self) -> TokenCostRates:
        """The same for `CostTracker`."""
        return TokenCostRates(
            prefill_usd_per_million=self.prefill,
            cached_prefill_usd_per_million=self.cached_prefill,
            sample_usd_per_million=self.sample,
            train_usd_per_million=self.train,
        )


@chz.chz(typecheck=True)
class Prices(FieldGroup):
    """What the tokens of a run cost."""

    prices: PriceConfig | None = chz.field(
        default=None,
        doc="prices for cost/*, prices.sample=1.5 for example; None: the hosted service's list if it trains, else no costs",
    )


def rates_of_run(
    prices: PriceConfig | None, model_name: str, backend: str | None, base_url: str | None
) -> TokenCostRates | None:
    """The prices of a run. None, if the user gives none: on the local engine, on another server, or with a warning for a model
    that the hosted service's list does not have. May download that list: call it in a thread.
    """
    if prices is not None:
        return prices.rates()
    if backends.resolve_backend(backend) == "local" or base_url is not None:
        return None
    return fetch_model_pricing(model_name)
