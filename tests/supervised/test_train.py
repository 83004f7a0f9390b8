"""The supervised loop on the tiny model: pipelining, evaluations, cursors, what a stopped or a longer run keeps."""

import asyncio
import json
import logging
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import chz
import pytest
import tinker
import torch

from tests.killing import Outcome, assert_same, checkpoints, forget_checkpoints, optimizer_steps, read_outcome
from tinker_cookbook import backends
from tinker_cookbook.clients import SamplingClient, TrainingClient
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.runs.evaluation import SamplingClientEvaluator, TrainingClientEvaluator
from tinker_cookbook.supervised import epochs, train
from tinker_cookbook.supervised.common import datum_from_model_input_weights
from tinker_cookbook.supervised.data import SupervisedDatasetFromList
from tinker_cookbook.supervised.types import SupervisedDataset, SupervisedDatasetBuilder
from tinker_cookbook.utils.files import read_jsonl

TINY = str(EXAMPLE_DATA / "tiny_chat")
REFUSED: list[int] = []
"""Rows that cannot be made into datums just now."""


def to_datum(row: int) -> tinker.Datum:
    if row in REFUSED:
        raise DataValidationError(f"row {row} is refused")
    tokens = [100 + row, *range(200, 200 + 5 + row % 3)]
    return datum_from_model_input_weights(tinker.ModelInput.from_ints(tokens), torch.ones(len(tokens)))


@chz.chz(typecheck=True)
class RowsBuilder(SupervisedDatasetBuilder):
    """Rows of a few tokens each, two per batch."""

    rows: int = 10
    test_rows: int = 0

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        test = SupervisedDatasetFromList(range(90, 90 + self.test_rows), 2, to_datum) if self.test_rows else None
        return SupervisedDatasetFromList(range(self.rows), 2, to_datum), test


@pytest.fixture(autouse=True)
def workplace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINKER_BACKEND", raising=False)
    monkeypatch.setattr("tests.supervised.test_train.REFUSED", [])


def config(folder: Path, **changes: Any) -> train.Config:
    base: dict[str, Any] = {
        "log_path": str(folder / "log"),
        "model_name": TINY,
        "dataset_builder": RowsBuilder(),
        "learning_rate": 1e-2,
        "lora_rank": 2,
        "eval_every": 0,
        "save_every": 0,
    }
    return train.Config(**{**base, **changes})


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Outcome:
    monkeypatch.setenv("TINKER_LOCAL_HOME", str(folder / "home"))
    # A run that failed may still hold its client, which has another home.
    monkeypatch.setattr(backends, "_local_clients", WeakValueDictionary())
    asyncio.run(train.main(config(folder, **changes)))
    return read_outcome(folder)


class Count(TrainingClientEvaluator):
    """Counts its calls."""

    def __init__(self, name: str = "counted"):
        self.name, self.calls = name, 0

    async def __call__(self, training_client: TrainingClient) -> dict[str, float]:
        self.calls += 1
        return {f"{self.name}/calls": self.calls}


class FailsAt(TrainingClientEvaluator):
    """Fails at its n-th call."""

    def __init__(self, call: int):
        self.call, self.calls = call, 0

    async def __call__(self, training_client: TrainingClient) -> dict[str, float]:
        self.calls += 1
        if self.calls == self.call:
            raise ConnectionError("the grader is gone")
        return {}


class Logprob(SamplingClientEvaluator):
    """The logprob of a token under the snapshot that it is given."""

    def __init__(self, seen: list[SamplingClient], name: str = "sampled"):
        self.seen, self.name = seen, name

    async def __call__(self, sampling_client: SamplingClient) -> dict[str, float]:
        self.seen.append(sampling_client)
        logprobs = await sampling_client.compute_logprobs(tinker.ModelInput.from_ints([100, 200]))
        return {f"{self.name}/logprob": logprobs[1] or 0.0}


class TestPipelining:
    def test_any_depth_gives_the_same_weights(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        settings: dict[str, Any] = {"num_epochs": 2, "eval_every": 4, "save_every": 3,
                                    "dataset_builder": RowsBuilder(test_rows=3)}  # fmt: skip
        whole = run(tmp_path / "0", monkeypatch, submit_ahead=0, **settings)
        assert [row["step"] for row in whole.rows] == list(range(11))
        assert whole.rows[0]["train_mean_nll"] > whole.rows[9]["train_mean_nll"] + 0.5
        assert whole.rows[0]["test/nll"] > whole.rows[10]["test/nll"]
        for depth in (1, 3, 20):
            assert_same(run(tmp_path / str(depth), monkeypatch, submit_ahead=depth, **settings), whole)

    @pytest.mark.parametrize("asynchronous", [False, True])
    def test_a_checkpoint_holds_the_steps_before_its_cursor(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
    ) -> None:
        run(tmp_path, monkeypatch, submit_ahead=3, num_epochs=2, save_every=4, rolling_save_every=3, lr_schedule="cosine",
            async_periodic_saves=asynchronous)  # fmt: skip
        records = checkpoints(tmp_path)
        assert [(r["name"], r["epoch"], r["batch"]) for r in records] == [
            ("000003-rolling", 0, 3), ("000004", 0, 4), ("000006-rolling", 1, 1), ("000008", 1, 3),
            ("000009-rolling", 1, 4), ("final", 2, 0),
        ]  # fmt: skip
        kept = [record for record in records if not record.get("rolling")]
        assert [optimizer_steps(tmp_path, record) for record in kept] == [4, 8, 10]

    def test_saves_by_tokens(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        outcome = run(tmp_path, monkeypatch, submit_ahead=2, save_every_tokens=20)
        tokens = [row["num_tokens"] for row in outcome.rows]
        due, since = [], 0
        for step, count in enumerate(tokens[:-1], start=1):
            since += count
            if since >= 20:
                due.append(step)
                since = 0
        records = checkpoints(tmp_path)
        assert [record["batch"] for record in records[:-1]] == due and due
        for record in records:
            done = record["epoch"] * 5 + record["batch"]
            assert optimizer_steps(tmp_path, record) == done
            assert record["elapsed_tokens"] == sum(tokens[:done])

    def test_saves_by_time_wait_for_what_is_submitted(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        run(tmp_path, monkeypatch, submit_ahead=3, save_every_seconds=1e-9)
        records = checkpoints(tmp_path)
        assert [record["batch"] for record in records] == [1, 2, 3, 4, 0]
        assert [optimizer_steps(tmp_path, record) for record in records] == [1, 2, 3, 4, 5]


UPSTREAM_KEYS = {
    "epoch", "grad_norm", "learning_rate", "num_loss_tokens", "num_sequences", "num_tokens", "progress", "step", "test/nll",
    "train_mean_bpb", "train_mean_nll", "time/evals", "time/finish_batch", "time/get_batch", "time/run_evaluator",
    "time/save_checkpoint", "time/save_checkpoint_async", "time/step", "time/submit_batch",
    *(f"tokens/{when}{kind}" for when in ("", "cumulative/")
      for kind in ("prefill_cached", "prefill_uncached", "sampled", "trained")),
}  # fmt: skip


class TestRows:
    def test_keys_and_times(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        run(tmp_path, monkeypatch, save_every=2, eval_every=5, dataset_builder=RowsBuilder(test_rows=2))
        rows = read_jsonl(tmp_path / "log" / "metrics.jsonl")
        for number, row in enumerate(rows[:-1]):
            assert row["learning_rate"] == pytest.approx(1e-2 * (1 - number / 5))
            assert row["progress"] == (number + 1) / 5
            # The names that every loop has.
            assert (row["progress/batch"], row["progress/done_frac"]) == (number, (number + 1) / 5)
            assert row["optim/lr"] == row["learning_rate"]
            assert {"epoch", "num_sequences", "num_tokens", "num_loss_tokens", "train_mean_nll", "train_mean_bpb",
                    "optim/grad_norm", "time/get_batch", "time/step", "time/total"} <= row.keys()  # fmt: skip
            assert row["time/finish_batch"] >= row["time/step"] > 0
        # What tinker-cookbook 0.6.1 logged of a run with these settings.
        assert not UPSTREAM_KEYS - rows[0].keys() - rows[2].keys()
        assert rows[2]["time/save_checkpoint_async"] == rows[2]["time/save_checkpoint"]
        assert [number for number, row in enumerate(rows) if "time/save_checkpoint" in row] == [2, 4]
        assert {"test/nll", "test/bpb", "time/evals", "time/total"} <= rows[-1].keys()
        assert rows[-1]["train_mean_nll"] == rows[-2]["train_mean_nll"] and rows[-1]["optim/lr"] == rows[-2]["optim/lr"]
        assert json.loads((tmp_path / "log" / "run_metadata.json").read_text())["recipe"] == "script"  # by default
        assert (rows[-1]["progress"], rows[-1]["progress/batch"], rows[-1]["progress/done_frac"]) == (1, 5, 1)

    def test_every_nth_step_is_drawn(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        plain = run(tmp_path / "plain", monkeypatch, num_epochs=2)
        drawn = run(tmp_path / "drawn", monkeypatch, num_epochs=2, span_chart_every=3)
        pages = sorted((tmp_path / "drawn").rglob("iteration_*/timing_gantt.html"))
        assert [page.parent.name[-6:] for page in pages][:2] == ["000000", "000003"]
        assert "<title>get_batch: " in pages[0].read_text() and "<title>step: " in pages[1].read_text()
        assert_same(drawn, plain)

    def test_runs_can_be_compared_at_equal_tokens(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Cumulated, and over a resume too."""
        run(tmp_path, monkeypatch, save_every=2, num_epochs=2, lr_schedule="constant")
        rows = read_jsonl(tmp_path / "log" / "metrics.jsonl")
        trained = [row["num_loss_tokens"] for row in rows]
        expected = [sum(trained[: i + 1]) for i in range(len(rows))]
        assert [row["progress/trained_tokens"] for row in rows] == expected
        assert {row["progress/sampled_tokens"] for row in rows} == {0}
        forget_checkpoints(tmp_path / "log", after=2)
        run(tmp_path, monkeypatch, save_every=2, num_epochs=2, lr_schedule="constant")
        resumed = read_jsonl(tmp_path / "log" / "metrics.jsonl")
        assert [row["progress/trained_tokens"] for row in resumed] == expected
        seconds = [row["progress/seconds"] for row in resumed]
        assert seconds == sorted(seconds) and seconds[0] > 0

    def test_the_first_example_is_shown_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run(tmp_path, monkeypatch, max_steps=2)
        assert capsys.readouterr().out.count("The first example") == 1
        run(tmp_path, monkeypatch, max_steps=3)
        assert "The first example" not in capsys.readouterr().out


class TestEvaluations:
    def test_both_kinds_at_both_frequencies_and_at_the_end(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[SamplingClient] = []
        outcome = run(
            tmp_path,
            monkeypatch,
            eval_every=2,
            infrequent_eval_every=4,
            submit_ahead=3,
            evaluator_builders=[Count, lambda: Logprob(seen)],
            infrequent_evaluator_builders=[lambda: Logprob(seen, "rare"), lambda: Count("rare")],
        )
        at = {key: [row["step"] for row in outcome.rows if key in row] for key in outcome.rows[0] if "/" in key}
        assert at["counted/calls"] == at["sampled/logprob"] == [0, 2, 4, 5]
        assert at["rare/calls"] == at["rare/logprob"] == [0, 4, 5]
        for row in outcome.rows:
            # One snapshot per round, of the weights that the row's step begins with.
            assert row.get("rare/logprob", row.get("sampled/logprob")) == row.get("sampled/logprob")
        assert len({id(snapshot) for snapshot in seen}) == 4 and len(seen) == 7
        measured = [row["sampled/logprob"] for row in outcome.rows if "sampled/logprob" in row]
        assert len(set(measured)) == 4

    def test_never_is_never(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse() -> Count:
            raise AssertionError("an evaluator that is never due is not built")

        outcome = run(
            tmp_path, monkeypatch, infrequent_eval_every=0, evaluator_builders=[refuse],
            infrequent_evaluator_builders=[refuse], dataset_builder=RowsBuilder(test_rows=2),
        )  # fmt: skip
        assert len(outcome.rows) == 5 and not any("test/nll" in row for row in outcome.rows)


class TestResume:
    def test_good_steps_are_kept_when_an_example_fails(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(epochs, "CHECKED_BATCHES", 1)
        whole = run(tmp_path / "whole", monkeypatch, submit_ahead=2)
        data = train.check_config(config(tmp_path))
        order = [datum.model_input.to_ints()[0] - 100 for i in range(5) for datum in data.get_batch(i).data]
        REFUSED.append(order[7])
        with pytest.raises(DataValidationError, match=f"row {order[7]} is refused"):
            run(tmp_path / "stopped", monkeypatch, submit_ahead=2)
        (record,) = checkpoints(tmp_path / "stopped")
        assert (record["name"], record["batch"]) == ("000003-stopped", 3)
        assert optimizer_steps(tmp_path / "stopped", record) == 3
        assert len(read_jsonl(tmp_path / "stopped" / "log" / "metrics.jsonl")) == 3
        REFUSED.clear()
        assert_same(run(tmp_path / "stopped", monkeypatch, submit_ahead=2), whole)

    def test_good_steps_are_kept_when_an_evaluator_raises(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        settings: dict[str, Any] = {"eval_every": 3, "submit_ahead": 2}
        whole = run(tmp_path / "whole", monkeypatch, **settings, evaluator_builders=[Count])
        with pytest.raises(ConnectionError):
            run(tmp_path / "stopped", monkeypatch, **settings, evaluator_builders=[partial(FailsAt, 2)])
        (record,) = checkpoints(tmp_path / "stopped")
        assert (record["name"], record["batch"]) == ("000003-stopped", 3)
        resumed = run(tmp_path / "stopped", monkeypatch, **settings, evaluator_builders=[Count])
        assert (resumed.adapter, resumed.optimizer) == (whole.adapter, whole.optimizer)

    def test_a_stopped_run_finishes_what_is_submitted_and_keeps_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Ctrl-C and SIGTERM cancel the main task: here while it waits for a step, with two more on their way."""
        whole = run(tmp_path / "whole", monkeypatch, submit_ahead=2)
        monkeypatch.setenv("TINKER_LOCAL_HOME", str(tmp_path / "stopped" / "home"))
        monkeypatch.setattr(backends, "_local_clients", WeakValueDictionary())

        async def cancelled() -> None:
            running = asyncio.create_task(train.main(config(tmp_path / "stopped", submit_ahead=2)))
            while not (tmp_path / "stopped" / "log" / "metrics.jsonl").exists():
                await asyncio.sleep(0)
            running.cancel()
            await running

        with pytest.raises(asyncio.CancelledError):
            asyncio.run(cancelled())
        (record,) = checkpoints(tmp_path / "stopped")
        rows = read_jsonl(tmp_path / "stopped" / "log" / "metrics.jsonl")
        assert record["batch"] == optimizer_steps(tmp_path / "stopped", record) == len(rows) > 0
        assert_same(run(tmp_path / "stopped", monkeypatch, submit_ahead=2), whole)

    def test_a_bad_example_is_found_before_a_model_is_loaded(self, tmp_path: Path) -> None:
        REFUSED.append(9)
        with pytest.raises(DataValidationError, match="row 9 is refused"):
            asyncio.run(train.main(config(tmp_path)))
        assert not (tmp_path / "log").exists()

    @pytest.mark.slow
    def test_more_steps_with_a_constant_rate_are_those_of_the_longer_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        settings: dict[str, Any] = {"num_epochs": 2, "lr_schedule": "constant"}
        whole = run(tmp_path / "whole", monkeypatch, **settings)
        run(tmp_path / "longer", monkeypatch, **settings, max_steps=6)
        longer = run(tmp_path / "longer", monkeypatch, **settings)
        assert (longer.adapter, longer.optimizer, longer.optimizer_steps) == (whole.adapter, whole.optimizer, 10)
        assert [row["step"] for row in longer.rows] == list(range(10))

    def test_another_schedule_is_pointed_out(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        run(tmp_path, monkeypatch, max_steps=2)
        with caplog.at_level(logging.WARNING):
            outcome = run(tmp_path, monkeypatch, max_steps=4)
        assert "began with a linear schedule over 2 steps and continues with one over 4" in caplog.text
        rates = [row["learning_rate"] for row in outcome.rows]
        assert rates == pytest.approx([1e-2, 5e-3, 5e-3, 2.5e-3])

    def test_other_data_are_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        run(tmp_path, monkeypatch, max_steps=2)
        with pytest.raises(ConfigurationError, match="has 5 batches per epoch, and the dataset now gives 6"):
            run(tmp_path, monkeypatch, dataset_builder=RowsBuilder(rows=12))

    def test_fewer_steps_than_begun_end_where_the_run_stands(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        settings: dict[str, Any] = {"lr_schedule": "constant", "save_every": 2, "eval_every": 9}
        settings["evaluator_builders"] = [Count]
        run(tmp_path, monkeypatch, **settings)
        forget_checkpoints(tmp_path / "log", after=1)
        outcome = run(tmp_path, monkeypatch, **settings, max_steps=2)
        assert (outcome.final["batch"], outcome.optimizer_steps) == (2, 2)
        assert [row["step"] for row in outcome.rows] == [0, 1, 2] and "counted/calls" in outcome.rows[-1]

    def test_a_late_example_beyond_the_context_leaves_the_good_steps(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(epochs, "CHECKED_BATCHES", 1)
        monkeypatch.setattr("tinker_cookbook.models.info.get_context_length", lambda name: 6)

        def first_long_batch(seed: int) -> int:
            data = epochs.EpochData(config(tmp_path, seed=seed), lambda data, where: None)
            return [max(datum.model_input.length for datum in data.get_batch(i).data) for i in range(5)].index(7)

        seed, late = next((s, late) for s in range(20) if (late := first_long_batch(s)) > 0)
        with pytest.raises(DataValidationError, match=f"batch {late}: an example of 7 tokens"):
            run(tmp_path, monkeypatch, seed=seed)
        (record,) = checkpoints(tmp_path)
        assert record["batch"] == late

    def test_a_finished_run_changes_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        settings: dict[str, Any] = {"eval_every": 2, "dataset_builder": RowsBuilder(test_rows=2)}
        run(tmp_path, monkeypatch, **settings)
        names = ("metrics.jsonl", "checkpoints.jsonl")
        before = [(tmp_path / "log" / name).read_bytes() for name in names]
        run(tmp_path, monkeypatch, **settings)
        assert [(tmp_path / "log" / name).read_bytes() for name in names] == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_steps": 0}, "nothing to train on"),
        ({"adam_beta1": 1.0}, "adam_beta1=1.0: must be at least 0 and less than 1"),
        ({"adam_beta2": -0.1}, "adam_beta2=-0.1"),
        ({"adam_eps": 0.0}, "adam_eps=0.0: must be greater than 0"),
        ({"infrequent_eval_every": -1}, "infrequent_eval_every"),
        ({"submit_ahead": -1}, "submit_ahead"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"num_epochs": 0}, "num_epochs"),
    ],
)
def test_bad_settings(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train.check_config(config(tmp_path, **changes))


def test_an_example_beyond_the_context_is_found_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinker_cookbook.models.info.get_context_length", lambda name: 6)
    with pytest.raises(DataValidationError, match=r"batch \d: an example of 7 tokens, .* a context of 6; set .* to 6"):
        train.check_config(config(tmp_path))
