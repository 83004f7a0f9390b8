"""What a run has used, step by step and over resumes: tokens of every kind, those thrown away, and dollars."""

from pathlib import Path

import pytest

from tests.fakes import FakeServiceClient
from tests.rl.loop import NumberDatasetBuilder, make_config, rows, run
from tinker_cookbook import backends
from tinker_cookbook.runs import prices
from tinker_cookbook.runs.outcome import tokens_line
from tinker_cookbook.runs.prices import PriceConfig, rates_of_run
from tinker_cookbook.runs.progress import Progress
from tinker_cookbook.stores.checkpoint_record import CheckpointRecord
from tinker_cookbook.utils.cost_estimation import TokenCostRates, TokenUsage

PRICES = PriceConfig(sample=1000.0, prefill=100.0, cached_prefill=10.0, train=1.0)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> FakeServiceClient:
    fake = FakeServiceClient()
    monkeypatch.setattr(backends, "create_service_client", lambda *_: fake)
    return fake


def test_each_price_meets_its_kind() -> None:
    """Powers of ten tell which price met which count."""
    usage = TokenUsage(sampled=1_000_000, prefill_cached=2_000_000, prefill_uncached=3_000_000, trained=4_000_000)
    assert PRICES.rates().estimate_usd(usage) == pytest.approx(1000 + 20 + 300 + 4)


class TestWhose:
    def test_the_user_s_count_more_than_the_list(self, monkeypatch: pytest.MonkeyPatch) -> None:
        listed = TokenCostRates(1.0, 2.0, 3.0, 4.0)
        asked: list[str] = []
        monkeypatch.setattr(prices, "fetch_model_pricing", lambda name: (asked.append(name), listed)[1])
        assert rates_of_run(PRICES, "a/b", "tinker", None) == PRICES.rates() and not asked
        assert rates_of_run(None, "a/b", "tinker", None) == listed and asked == ["a/b"]
        assert rates_of_run(None, "a/b", "local", None) is None
        assert rates_of_run(None, "a/b", "tinker", "http://localhost:1") is None  # somebody else's server
        assert asked == ["a/b"]


class TestInARun:
    def test_rows_have_costs_and_what_was_thrown_away(self, service: FakeServiceClient, tmp_path: Path) -> None:
        """Three groups of four members with one token each, a prompt of three tokens and three inputs to train on; one group is
        constant.
        """
        run(make_config(tmp_path, NumberDatasetBuilder(batches=2, constant_groups=1), prices=PRICES))
        first, second = rows(tmp_path)
        trained = first["train/num_datums"]
        assert first["tokens/sampled"] == 12 and first["tokens/thrown_away"] == 12 - trained >= 4
        expected = (12 * 1000 + 36 * 100 + 3 * trained) / 1e6
        assert first["cost/step_usd"] == pytest.approx(expected)
        both = first["tokens/thrown_away"] + second["tokens/thrown_away"]
        assert second["tokens/cumulative/thrown_away"] == both
        assert second["cost/cumulative_usd"] == pytest.approx(first["cost/step_usd"] + second["cost/step_usd"])

    def test_without_prices_there_are_no_dollars(self, service: FakeServiceClient, tmp_path: Path) -> None:
        run(make_config(tmp_path, NumberDatasetBuilder(batches=1)))
        (row,) = rows(tmp_path)
        assert not any(key.startswith("cost/") for key in row)


def test_a_resumed_run_goes_on_counting() -> None:
    state: dict[str, object] = {}
    progress = Progress(state, rates=PRICES.rates())
    progress.count(TokenUsage(sampled=1_000), TokenUsage(sampled=500), thrown_away=700)
    record = CheckpointRecord.from_dict({"name": "000001", "batch": 1, **state})
    progress.count(TokenUsage(sampled=9))  # not in the checkpoint: done again by the resumed run
    row = Progress({}, record, rates=PRICES.rates()).count(TokenUsage(sampled=1_000), thrown_away=1)
    assert row["tokens/cumulative/sampled"] == 2_500 and row["tokens/cumulative/thrown_away"] == 701
    assert (row["cost/step_usd"], row["cost/cumulative_usd"]) == (pytest.approx(1.0), pytest.approx(2.5))
    assert row["cost/discarded_usd"] == pytest.approx(0.5)


def test_the_final_table_ends_with_the_totals() -> None:
    first = {"tokens/cumulative/sampled": 1, "tokens/cumulative/trained": 5}
    last = {
        "tokens/cumulative/sampled": 12_345,
        "tokens/cumulative/thrown_away": 45,
        "tokens/cumulative/prefill_uncached": 7,
        "tokens/cumulative/prefill_cached": 0,
        "tokens/cumulative/trained": 60,
        "cost/cumulative_usd": 1234.5,
    }
    assert tokens_line([first, last, {"test/correct": 1.0}]) == (
        "Tokens: 12,345 sampled, 45 of them thrown away, 7 prefilled, 60 trained, $1,234.5000"
    )
    assert tokens_line([first]) == "Tokens: 1 sampled, 5 trained"
    assert tokens_line([{"loss": 1.0}]) is None
