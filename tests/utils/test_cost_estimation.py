"""Tokens by what they are billed as, and what they cost."""

import http.server
import json
import logging
from collections.abc import Iterator

import pytest

from tests.waiting import start_serving
from tinker_cookbook.utils import cost_estimation
from tinker_cookbook.utils.cost_estimation import (
    CostTracker,
    TokenCostRates,
    TokenUsage,
    fetch_model_pricing,
    load_model_pricing,
    rates_from_pricing_entry,
)

ENTRY = {"tinker_id": "a/b", "prefill": "$2", "cached_prefill": "$0.50", "sample": "$1,000", "train": "6"}
RATES = TokenCostRates(2.0, 0.5, 1000.0, 6.0)


def test_each_kind_has_its_own_rate() -> None:
    """Powers of ten tell which rate met which count."""
    usage = TokenUsage(sampled=1_000, prefill_cached=100_000, prefill_uncached=10_000_000, trained=1_000_000_000)
    assert RATES.estimate_usd(usage) == pytest.approx(1.0 + 0.05 + 20.0 + 6000.0)


def test_a_price_list_entry_must_be_complete() -> None:
    assert rates_from_pricing_entry(ENTRY) == RATES
    for name in ("prefill", "cached_prefill", "sample", "train"):
        assert rates_from_pricing_entry({**ENTRY, name: "n/a"}) is None
        assert rates_from_pricing_entry({key: value for key, value in ENTRY.items() if key != name}) is None


def test_steps_add_up_and_a_resumed_run_goes_on() -> None:
    tracker = CostTracker(RATES, cumulative=TokenUsage(trained=500_000), discarded=TokenUsage(sampled=3))
    first = tracker.record_step(TokenUsage(sampled=1, trained=500_000))
    assert first["tokens/trained"] == 500_000
    assert first["tokens/cumulative/trained"] == 1_000_000
    assert first["cost/step_usd"] == pytest.approx(3.001)
    assert first["cost/cumulative_usd"] == pytest.approx(6.001)
    later = tracker.extend_step(TokenUsage(prefill_uncached=1_000_000))
    assert later["tokens/sampled"] == 1, "the whole step again"
    assert later["cost/step_usd"] == pytest.approx(5.001)
    second = tracker.record_step(TokenUsage(prefill_cached=7))
    assert (second["tokens/sampled"], second["tokens/prefill_cached"]) == (0, 7)
    assert tracker.cumulative == TokenUsage(1, 7, 1_000_000, 1_000_000)


def test_what_is_never_trained_on_is_in_the_totals_and_in_no_step() -> None:
    tracker = CostTracker(RATES)
    tracker.record_discarded_sampling(TokenUsage(sampled=2_000))
    metrics = tracker.record_step(TokenUsage(sampled=1_000))
    assert (metrics["tokens/sampled"], metrics["tokens/cumulative/sampled"]) == (1_000, 3_000)
    totals = tracker.cumulative_metrics()
    assert (totals["tokens/cumulative/sampled"], totals["tokens/discarded/sampled"]) == (3_000, 2_000)
    assert (totals["cost/cumulative_usd"], totals["cost/discarded_usd"]) == (pytest.approx(3.0), pytest.approx(2.0))


def test_without_rates_there_are_no_costs() -> None:
    tracker = CostTracker()
    names = {*tracker.record_step(TokenUsage(sampled=1)), *tracker.cumulative_metrics()}
    assert len(names) == 12
    assert not any(name.startswith("cost/") for name in names)


@pytest.fixture
def price_list(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[str]]]:
    """Where a list with ENTRY and an incomplete one is served, and who asked for it."""
    monkeypatch.setattr(cost_estimation, "_pricing_fetched", False)
    monkeypatch.setattr(cost_estimation, "_pricing_entries", None)
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers["User-Agent"])
            body = json.dumps([ENTRY, {**ENTRY, "tinker_id": "a/part", "train": ""}] if self.path == "/ok" else {})
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = start_serving(server)
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_price_list_is_read_once(price_list: tuple[str, list[str]], caplog: pytest.LogCaptureFixture) -> None:
    url, asked = price_list
    assert fetch_model_pricing("a/b", url=f"{url}/ok") == RATES
    with caplog.at_level(logging.WARNING):
        assert fetch_model_pricing("a/part", url=f"{url}/ok") is None
        assert fetch_model_pricing("a/b:peft:131072", url=f"{url}/ok") is None
    assert ["incomplete" in caplog.messages[0], "not listed" in caplog.messages[1]] == [True, True]
    assert len(asked) == 1
    assert asked[0].startswith("tinker-cookbook/")


def test_a_list_that_cannot_be_had_is_said_once(
    price_list: tuple[str, list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    url, asked = price_list
    with caplog.at_level(logging.WARNING):
        assert load_model_pricing(url=f"{url}/no_list") is None
        assert fetch_model_pricing("a/b", url=f"{url}/ok") is None, "not tried again"
    assert len(caplog.messages) == len(asked) == 1
    assert "not a JSON list" in caplog.messages[0]
