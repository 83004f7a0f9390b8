"""Loggers of other people's trackers, with fakes in place of their packages: what they are told, and what is missing."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.runs import ml_log, trackers


class FakeWandbRun:
    url = "https://wandb.test/p/runs/1"

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, Any], int | None]] = []
        self.finished = False
        self.config = SimpleNamespace(update=lambda values, allow_val_change: self.logged.append((values, None)))

    def log(self, metrics: dict[str, Any], step: int | None) -> None:
        self.logged.append((metrics, step))

    def finish(self) -> None:
        self.finished = True


class TestWandbLogger:
    def test_a_missing_package_says_how_to_install_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "wandb", None)
        with pytest.raises(ConfigurationError, match=r"wandb_project='p'.*pip install 'wandb>="):
            trackers.WandbLogger("p")

    def test_a_resumed_run_goes_on_under_the_same_id(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[dict[str, Any]] = []
        run = FakeWandbRun()

        def init(**options: Any) -> FakeWandbRun:
            calls.append(options)
            return run

        monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
        for _ in range(2):
            logger = ml_log.setup_logging(tmp_path, wandb_project="p", wandb_name="n", config={"lr": 1})
            assert logger.get_logger_url() == run.url
            logger.log_metrics({"a": 1}, step=2)
            logger.close()
        assert calls[0] == calls[1]
        assert calls[0]["project"] == "p" and calls[0]["name"] == "n" and calls[0]["id"]
        assert run.logged[:2] == [({"lr": 1}, None), ({"a": 1}, 2)] and run.finished


class FakeTrackioRun(FakeWandbRun):
    def __init__(self) -> None:
        super().__init__()
        self.config: Any = {"_Created": "now"}


class TestTrackioLogger:
    def test_a_missing_package_says_how_to_install_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "trackio", None)
        with pytest.raises(
            ConfigurationError,
            match=r"trackers=trackio, wandb_project='p'.*pip install 'trackio>=",
        ):
            trackers.TrackioLogger("p")

    def test_a_resumed_run_goes_on_under_the_same_name(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[dict[str, Any]] = []
        run = FakeTrackioRun()

        def init(**options: Any) -> FakeTrackioRun:
            calls.append(options)
            return run

        monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=init))
        for _ in range(2):
            logger = ml_log.setup_logging(tmp_path, trackers="trackio", wandb_project="p", config={"lr": 1})
            logger.log_metrics({"a": 1}, step=2)
            logger.close()
        assert calls[0] == calls[1]
        assert calls[0]["project"] == "p" and calls[0]["name"].startswith(f"{tmp_path.name}-")
        assert calls[0]["resume"] == "allow"
        assert run.config == {"_Created": "now", "lr": 1}
        assert run.logged == [({"a": 1}, 2)] * 2 and run.finished

    def test_two_runs_of_one_name_stay_apart(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        names: list[str] = []

        def init(name: str, **options: Any) -> FakeTrackioRun:
            names.append(name)
            return FakeTrackioRun()

        monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=init))
        for folder in ("a", "b"):
            (tmp_path / folder).mkdir()
            trackers.TrackioLogger("p", log_dir=tmp_path / folder, trackio_name="same")
        assert len(set(names)) == 2 and all(name.startswith("same-") for name in names)

    def test_rows_of_earlier_steps_have_an_axis_of_their_own(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        logged: list[Any] = []
        run = SimpleNamespace(
            define_metric=lambda name, **how: logged.append((name, how.get("step_metric"))),
            log=lambda metrics, **how: logged.append((metrics, how)),
        )
        monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: run))
        logger = ml_log.MultiplexLogger([trackers.WandbLogger("p"), ml_log.JsonLogger(tmp_path)])
        logger.enable_event_steps()
        logger.enable_event_steps()
        logger.log_metrics({"loss": 0.5}, step=61)
        logger.log_metrics_event({"reward": 1.0}, step=0, step_metric="eval/step")
        assert logged == [
            ("training/step", None),
            ("*", "training/step"),
            ({"loss": 0.5, "training/step": 61}, {"commit": True}),
            ("eval/step", None),
            ("reward", "eval/step"),
            ({"reward": 1.0, "eval/step": 0}, {"commit": True}),
        ]
        rows = ml_log.read_metrics(tmp_path)
        assert rows == [{"step": 61, "loss": 0.5}, {"step": 0, "reward": 1.0, "eval/step": 0}]


class TestNeptuneLogger:
    def test_a_missing_package_or_token_is_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "neptune_scale", None)
        with pytest.raises(ConfigurationError, match=r"pip install 'neptune-scale>=0.10'"):
            trackers.NeptuneLogger("w/p")
        monkeypatch.setitem(sys.modules, "neptune_scale", SimpleNamespace())
        monkeypatch.delenv("NEPTUNE_API_TOKEN", raising=False)
        with pytest.raises(ConfigurationError, match="NEPTUNE_API_TOKEN is not set"):
            trackers.NeptuneLogger("w/p")

    def test_steps_config_and_what_has_no_step(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        said: list[Any] = []
        run = SimpleNamespace(
            log_metrics=lambda metrics, step: said.append((metrics, step)),
            log_configs=lambda values, flatten=False: said.append((values, flatten)),
            get_run_url=lambda: "https://neptune.test/1",
            close=lambda: said.append("closed"),
        )

        def make(**options: Any) -> Any:
            said.append(options)
            return run

        monkeypatch.setitem(sys.modules, "neptune_scale", SimpleNamespace(Run=make))
        monkeypatch.setenv("NEPTUNE_API_TOKEN", "t")
        logger = ml_log.setup_logging(
            tmp_path, trackers="neptune", wandb_project="w/p", wandb_name="n", config={"lr": 1}
        )
        logger.log_metrics({"a": 1.0, "said": "x"}, step=2)
        assert logger.get_logger_url() == "https://neptune.test/1"
        logger.close()
        where = {"project": "w/p", "log_directory": str(tmp_path), "experiment_name": "n"}
        assert said == [where, ({"lr": 1}, True), ({"a": 1.0}, 2), "closed"]


class TestTensorBoardLogger:
    def test_a_missing_package_says_how_to_install_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "tensorboard", None)
        with pytest.raises(ConfigurationError, match=r"trackers=tensorboard.*pip install 'tensorboard>=2.15'"):
            ml_log.setup_logging(tmp_path, trackers="tensorboard", do_configure_logging_module=False)

    def test_what_it_tells_the_writer(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        told: list[tuple[Any, ...]] = []

        class Writer:
            def __init__(self, folder: str, purge_step: int | None = None, filename_suffix: str = "") -> None:
                told.append(("open", Path(folder).name, purge_step, filename_suffix))

            def __enter__(self) -> "Writer":
                return self

            def __exit__(self, *error: object) -> None:
                self.close()

            def add_scalar(self, *values: Any) -> None:
                told.append(("scalar", *values))

            def add_text(self, *values: Any) -> None:
                told.append(("text", *values))

            def flush(self) -> None:
                told.append(("flush",))

            def close(self) -> None:
                told.append(("close",))

        monkeypatch.setitem(sys.modules, "tensorboard", SimpleNamespace())
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
        logger = trackers.TensorBoardLogger(tmp_path)
        logger.log_hparams({"optim": {"lr": 1}})
        logger.log_metrics({"reward": 0.5, "path": "p"}, step=3)
        logger.log_long_text("sample", "a\nb")
        logger.close()
        logger.close()
        table = "| key | value |\n| --- | --- |\n| optim.lr | 1 |"
        assert told == [
            ("open", "tensorboard", None, ".config"),
            ("text", "config", table),
            ("close",),
            ("open", "tensorboard", 3, ""),
            ("scalar", "reward", 0.5, 3),
            ("text", "path", "p", 3),
            ("flush",),
            ("open", "tensorboard", None, ".text"),
            ("text", "sample", "a\nb", None),
            ("close",),
            ("close",),
        ]

    def test_a_resumed_run_replaces_the_steps_it_repeats(self, tmp_path: Path) -> None:
        reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        for steps, value in (((0, 1, 2, 3), 1.0), ((2, 3), 2.0)):
            logger = ml_log.setup_logging(tmp_path, trackers="tensorboard", config={"lr": 1})
            for step in steps:
                logger.log_metrics({"reward": value}, step=step)
            logger.close()
        events = reader.EventAccumulator(str(tmp_path / trackers.TENSORBOARD_FOLDER)).Reload()
        assert [(event.step, event.value) for event in events.Scalars("reward")] == [
            (0, 1.0),
            (1, 1.0),
            (2, 2.0),
            (3, 2.0),
        ]
        assert "config/text_summary" in events.Tags()["tensors"]


@pytest.mark.parametrize("package", ["wandb", "trackio", "tensorboard", "neptune_scale"])
@pytest.mark.parametrize("recipe", ["sl_basic", "rl_basic", "preference.train"])
def test_what_is_missing_is_told_before_there_is_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, recipe: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    module = importlib.import_module(f"recipes.{recipe}")
    name = package.partition("_")[0]
    cli = module.CLIConfig(log_path=str(tmp_path / "log"), trackers=name, wandb_project="w/p")
    with pytest.raises(ConfigurationError, match=rf"the package {package} is not installed.*pip install '{name}"):
        module.build_config(cli)
    assert not (tmp_path / "log").exists()
