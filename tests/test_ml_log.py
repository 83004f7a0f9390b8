"""What must hold for metrics and logs, and for the small helpers that fill them."""

import asyncio
import io
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.runs import ml_log, trackers
from tinker_cookbook.runs.loggers import Logger
from tinker_cookbook.utils import misc_utils, run_logs


def printed(**options: Any) -> tuple[ml_log.PrettyPrintLogger, io.StringIO]:
    out = io.StringIO()
    return ml_log.PrettyPrintLogger(console=Console(file=out, width=80, force_terminal=False), **options), out


class TestJsonLogger:
    def test_one_line_per_step_in_the_order_of_the_metrics(self, tmp_path: Path) -> None:
        logger = ml_log.JsonLogger(tmp_path)
        logger.log_metrics({"b": 1, "a": 0.5, "path": "p"}, step=3)
        logger.log_metrics({"c": 2})
        text = (tmp_path / "metrics.jsonl").read_text()
        assert text == '{"step": 3, "b": 1, "a": 0.5, "path": "p"}\n{"c": 2}\n'

    def test_nan_is_an_error_that_names_the_metric(self, tmp_path: Path) -> None:
        with pytest.raises(DataValidationError, match=r"^optim/loss: nan"):
            ml_log.JsonLogger(tmp_path).log_metrics({"optim/loss": float("nan")}, step=0)
        assert not (tmp_path / "metrics.jsonl").exists()

    def test_a_metric_cannot_take_the_place_of_the_step(self, tmp_path: Path) -> None:
        with pytest.raises(DataValidationError, match="'step'"):
            ml_log.JsonLogger(tmp_path).log_metrics({"step": 1}, step=0)

    def test_the_config_of_the_first_start_stays(self, tmp_path: Path) -> None:
        logger = ml_log.JsonLogger(tmp_path)
        logger.log_hparams({"lr": 1})
        logger.log_hparams({"lr": 2})
        assert json.loads((tmp_path / "config.json").read_text()) == {"lr": 1}


class TestPrettyPrintLogger:
    def test_a_step_is_one_line_of_the_key_metrics_under_short_names(self) -> None:
        logger, out = printed(key_metrics={"env/all/reward": "reward", "lr": "lr", "absent": "absent"})
        logger.log_metrics({f"x{i}": i for i in range(30)} | {"lr": 0.00012345, "env/all/reward": 0.5}, step=7)
        assert out.getvalue() == "step    7  reward=0.5  lr=0.0001234\n"

    def test_without_key_metrics_the_first_few_are_shown(self) -> None:
        logger, out = printed(key_metrics={})
        logger.log_metrics({f"[x{i}]": i for i in range(8)}, step=None)
        assert out.getvalue() == "metrics  [x0]=0  [x1]=1  [x2]=2  [x3]=3  [x4]=4  [x5]=5\n"

    def test_what_an_environment_measures_is_shown_and_groups_where_some_were_left_out(self) -> None:
        logger, out = printed()
        metrics = {"env/all/reward/total": 1.5, "env/all/turns_per_episode": 3, "env/all/moves_won": 0.25}
        logger.log_metrics(metrics | {"groups/sampled": 8, "groups/trained": 8}, step=0)
        logger.log_metrics(
            metrics | {"groups/sampled": 8, "groups/trained": 5, "groups/filtered": 3, "groups/failed": 0}, 1
        )
        assert out.getvalue().splitlines() == [
            "step    0  reward=1.5  moves_won=0.25",
            "step    1  reward=1.5  moves_won=0.25  groups=5/8  filtered=3",
        ]

    def test_in_a_terminal_lines_fit_it(self) -> None:
        out = io.StringIO()
        logger = ml_log.PrettyPrintLogger(console=Console(file=out, width=40, force_terminal=True, color_system=None))
        metrics = {"progress/done_frac": 0.5, "env/all/reward/total": 0.51234, "env/all/correct": 0.51234}
        metrics |= {"train/loss_sum": 1.0, "optim/entropy": 0.25, "optim/lr": 0.001, "time/total": 1.5}
        logger.log_metrics(metrics, step=3)
        lines = out.getvalue().splitlines()
        assert lines == ["step    3  reward=0.512  entropy=0.25", "           seconds=1.5"]
        assert all(len(line) <= 40 for line in lines)

    def test_the_last_row_is_told_as_the_final_evaluation_without_the_training_beside_it(self) -> None:
        logger, out = printed()
        training = {"env/all/reward/total": 0.25, "env/all/moves_won": 1, "optim/lr": 0.001, "learning_rate": 0.001}
        about = {"progress/final": 1, "progress/done_frac": 1.0, "tokens/cumulative/sampled": 9, "time/total": 2.0}
        logger.log_metrics({**training, **about, "test/env/all/correct": 0.5, "test/env/all/won": 1}, step=1)
        logger.log_metrics({**training, **about, "test/a": 3, "test/env/all/reward/total": 0.75}, step=1)
        assert out.getvalue().splitlines() == [
            "final evaluation  test/correct=0.5",
            "final evaluation  test/env/all/reward/total=0.75  test/a=3",
        ]

    def test_a_long_text_is_printed_as_it_is(self) -> None:
        logger, out = printed()
        ml_log.MultiplexLogger([logger]).log_long_text("sample", "[b]first[/b]\n" + "x" * 100)
        assert out.getvalue() == f"sample\n[b]first[/b]\n{'x' * 100}\n"


class Failing(Logger):
    closed = False

    def log_metrics(self, metrics: ml_log.Metrics, step: int | None = None) -> None:
        pass

    def close(self) -> None:
        self.closed = True
        raise OSError("disk")


class TestMultiplexLogger:
    def test_all_are_closed_when_one_fails(self) -> None:
        children = [Failing(), Failing()]
        undone: list[bool] = []
        with pytest.raises(OSError, match="disk"):
            ml_log.MultiplexLogger(children, on_close=lambda: undone.append(True)).close()
        assert all(child.closed for child in children) and undone == [True]

    def test_what_is_asked_of_all(self) -> None:
        class Asked(Failing):
            def __init__(self, url: str | None) -> None:
                self.url, self.synced = url, False

            def sync(self) -> None:
                self.synced = True

            def get_logger_url(self) -> str | None:
                return self.url

        children = [Failing(), Asked(None), Asked("https://a"), Asked("https://b")]
        multiplex = ml_log.MultiplexLogger(children)
        multiplex.sync()
        assert [child.synced for child in children if isinstance(child, Asked)] == [True] * 3
        assert multiplex.get_logger_url() == "https://a"
        assert ml_log.MultiplexLogger(children[:2]).get_logger_url() is None


class TestSetupLogging:
    def test_logs_are_appended_and_name_the_command(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "argv", ["prog", "lr=1"])
        root = logging.getLogger()
        before = root.handlers[:]
        for i in range(2):
            logger = ml_log.setup_logging(tmp_path)
            assert not set(before) & set(root.handlers)
            logging.getLogger("some.module").info("message %d", i)
            logger.close()
            assert root.handlers == before
        lines = (tmp_path / "logs.log").read_text().splitlines()
        assert [line.split(": ", 1)[1] for line in lines] == [
            "command line: ['prog', 'lr=1']",
            "message 0",
            "command line: ['prog', 'lr=1']",
            "message 1",
        ]

    def test_the_logging_module_can_be_left_alone(self, tmp_path: Path) -> None:
        before = logging.getLogger().handlers[:]
        logger = ml_log.setup_logging(tmp_path, do_configure_logging_module=False)
        assert logging.getLogger().handlers == before
        logger.close()
        assert not (tmp_path / "logs.log").exists()

    def test_runs_of_one_process_keep_their_logs_apart(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "argv", ["prog"])
        root = logging.getLogger()
        before = root.handlers[:]

        async def run(name: str, opened: asyncio.Barrier) -> None:
            logger = ml_log.setup_logging(tmp_path / name)
            await opened.wait()
            await asyncio.create_task(say(f"from {name}"))
            await opened.wait()
            logger.close()

        async def say(message: str) -> None:
            logging.getLogger("loop").info(message)

        async def main() -> None:
            opened = asyncio.Barrier(3)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(run("a", opened))
                tasks.create_task(run("b", opened))
                await opened.wait()
                assert len(root.handlers) == 3  # one terminal, two files
                logging.getLogger("worker").info("from nowhere")
                await opened.wait()

        asyncio.run(main())
        assert root.handlers == before
        for name in ("a", "b"):
            lines = (tmp_path / name / "logs.log").read_text().splitlines()
            told = [line.split(": ", 1)[1] for line in lines]
            assert sorted(told) == ["command line: ['prog']", f"from {name}", "from nowhere"]

    def test_a_label_names_the_run_on_a_shared_terminal(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with run_logs.label("lr=1"):
            logger = ml_log.setup_logging(tmp_path)
            logger.log_metrics({"a": 1}, step=0)
            logging.getLogger("loop").warning("careful")
            logger.close()
        shown = capsys.readouterr()
        assert "[lr=1] step    0  a=1" in shown.out
        assert "[lr=1] WARNING loop: careful" in shown.err

    def test_what_the_sdk_says_of_every_failed_request_is_for_the_file(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        logger = ml_log.setup_logging(tmp_path)
        logging.getLogger("tinker.lib.retry_handler").error("Request failed: 1 of 64")
        logging.getLogger("tinker.lib.internal_client_holder").warning("no heartbeat")
        logger.close()
        shown, kept = capsys.readouterr().err, (tmp_path / "logs.log").read_text()
        assert "no heartbeat" in shown and "Request failed" not in shown
        assert "no heartbeat" in kept and "Request failed: 1 of 64" in kept

    def test_a_config_that_cannot_be_written_undoes_the_setup(self, tmp_path: Path) -> None:
        before = logging.getLogger().handlers[:]
        with pytest.raises(DataValidationError, match=r"^lr: "):
            ml_log.setup_logging(tmp_path, config={"lr": float("inf")})
        assert logging.getLogger().handlers == before


class TestTimed:
    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        ticks: list[float] = []
        monkeypatch.setattr(time, "perf_counter", lambda: ticks.pop(0))
        return ticks

    def test_one_span_is_one_number(self, clock: list[float]) -> None:
        clock += [1.0, 3.0]
        metrics: dict[str, Any] = {}
        with misc_utils.timed("step", metrics):
            pass
        assert metrics == {"time/step": 2.0}

    def test_repeated_spans_are_summed_up(self, clock: list[float]) -> None:
        clock += [0.0, 1.0, 0.0, 5.0, 0.0, 3.0]
        metrics: dict[str, Any] = {}
        for _ in range(3):
            with misc_utils.timed("step", metrics):
                pass
        assert metrics == {
            "time/step:total": 9.0,
            "time/step:count": 3,
            "time/step:mean": 3.0,
            "time/step:max": 5.0,
        }

    def test_a_span_that_raises_is_counted(self, clock: list[float]) -> None:
        clock += [0.0, 1.0]
        metrics: dict[str, Any] = {}
        with pytest.raises(KeyError), misc_utils.timed("step", metrics):
            raise KeyError
        assert metrics == {"time/step": 1.0}


class TestHelpers:
    def test_safezip_refuses_unequal_lengths_at_once(self) -> None:
        assert list(misc_utils.safezip([1, 2], iter("ab"))) == [(1, "a"), (2, "b")]
        with pytest.raises(ValueError, match=r"\[2, 1\]"):
            misc_utils.safezip([1, 2], [1])

    def test_dict_mean_is_over_the_dicts_that_have_the_key(self) -> None:
        assert misc_utils.dict_mean([{"a": 1, "b": 4}, {"a": 3}]) == {"a": 2.0, "b": 4.0}
        assert misc_utils.dict_mean([]) == {}

    def test_all_same(self) -> None:
        assert misc_utils.all_same([]) and misc_utils.all_same([1, 1]) and not misc_utils.all_same([1, 1, 2])

    def test_split_list_keeps_order_and_balances(self) -> None:
        assert misc_utils.split_list([1, 2, 3, 4, 5], 3) == [[1, 2], [3, 4], [5]]
        for count in (0, 3):
            with pytest.raises(ConfigurationError, match=f"num_splits={count}"):
                misc_utils.split_list([1, 2], count)

    def test_concat_and_not_none(self) -> None:
        assert misc_utils.concat_lists([[1], [], [2, 3]]) == [1, 2, 3]
        assert misc_utils.not_none(0) == 0
        with pytest.raises(ValueError):
            misc_utils.not_none(None)


class TestTrackers:
    def test_a_project_alone_means_wandb(self) -> None:
        assert trackers.tracker_names(None, "p") == ["wandb"]
        assert trackers.tracker_names(None, None) == []
        assert trackers.tracker_names("tensorboard", "p") == ["tensorboard"]
        assert trackers.tracker_names("trackio, wandb,trackio", "p") == ["trackio", "wandb"]

    @pytest.mark.parametrize(
        ("names", "project", "message"),
        [
            ("wandd", "p", r"^trackers='wandd': 'wandd' is unknown.*Did you mean 'wandb'\?$"),
            ("tensorboard,trackio", None, r"trackio needs a project; set wandb_project=\.\.\.$"),
        ],
    )
    def test_what_cannot_be_had_is_said(self, tmp_path: Path, names: str, project: str | None, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            ml_log.setup_logging(tmp_path, project, trackers=names, do_configure_logging_module=False)
