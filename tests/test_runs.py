"""What must hold for the files of a run: every start recorded, resumable."""

import importlib.metadata
import json
import logging
from pathlib import Path
from typing import Any

import chz
import numpy as np
import pytest
import torch

from tinker_cookbook.exceptions import CheckpointError, ConfigurationError, DataFormatError
from tinker_cookbook.runs import metadata
from tinker_cookbook.runs.bootstrap import last_log_path, open_run
from tinker_cookbook.runs.checkpoints import append_checkpoint, get_last_checkpoint, load_checkpoints_file
from tinker_cookbook.stores.checkpoint_record import CheckpointRecord
from tinker_cookbook.utils.files import append_jsonl, read_jsonl


@chz.chz
class Inner:
    rate: float = 0.5


@chz.chz
class Config:
    inner: Inner
    name: str = "a"
    reward: Any = max


class TestMetadata:
    def test_only_listed_variables_are_recorded_and_no_secrets(self) -> None:
        env = {
            "TINKER_API_KEY": "sk-1",
            "TINKER_BACKEND": "local",
            "AWS_SECRET": "x",
            "OMP_NUM_THREADS": "1",
            "TRANSFORMERS_TOKEN": "t",
        }
        assert metadata.recorded_env(env) == {
            "OMP_NUM_THREADS": "1",
            "TINKER_API_KEY": "<set>",
            "TINKER_BACKEND": "local",
            "TRANSFORMERS_TOKEN": "<set>",
        }

    def test_a_secret_never_reaches_the_disk(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TINKER_API_KEY", "tml-verysecret")
        metadata.write_run_metadata(tmp_path, config={}, recipe_name="r")
        assert not any("verysecret" in path.read_text() for path in tmp_path.iterdir())

    def test_the_version_of_vllm_stands_where_it_is_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert "vllm" not in metadata.versions()
        installed = importlib.metadata.version
        monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.11.0" if name == "vllm" else installed(name))
        assert metadata.versions()["vllm"] == "0.11.0"

    def test_versions_name_what_results_depend_on(self) -> None:
        found = metadata.versions()
        assert {"python", "torch", "cuda", "transformers", "peft", "tinker", "numpy", "tinker-cookbook-local"} <= set(
            found
        )
        assert found["cuda"] == torch.version.cuda
        assert found["numpy"] == np.__version__

    def test_first_start_then_resumed(self, tmp_path: Path) -> None:
        metadata.write_run_metadata(tmp_path, config={"lr": 1, "seed": 0}, recipe_name="r", extra={"reference": "p"})
        metadata.write_run_metadata(tmp_path, config={"lr": 2, "seed": 0}, recipe_name="r")
        metadata.write_run_metadata(tmp_path, config={"lr": 1, "seed": 0}, recipe_name="r")
        record = json.loads((tmp_path / "run_metadata.json").read_text())
        assert record["recipe"] == "r" and record["reference"] == "p" and record["args"] == {"lr": 1, "seed": 0}
        assert [entry["changed"] for entry in record["resumed"]] == [{"lr": [1, 2]}, {}]
        assert json.loads((tmp_path / "config.json").read_text()) == {"lr": 1, "seed": 0}

    def test_a_run_of_a_later_version_is_left_alone(self, tmp_path: Path) -> None:
        content = {"folder_version": metadata.FOLDER_VERSION + 1}
        (tmp_path / "run_metadata.json").write_text(json.dumps(content))
        with pytest.raises(DataFormatError, match="written by later code"):
            metadata.write_run_metadata(tmp_path, config={}, recipe_name="r")
        assert json.loads((tmp_path / "run_metadata.json").read_text()) == content

    def test_what_only_another_version_has_stands_apart_from_changes(self) -> None:
        inner = {"class": "m.Inner", "kept": 1, "gone": 2}
        before = {
            "class": "m.C",
            "lr": 1,
            "inner": inner,
            "none": None,
            "own": {"a": 1},
            "each": [inner, 3],
            "list": [1, 2],
        }
        newer = {"class": "m.Inner", "kept": 9, "new": {"class": "m.New", "x": 5}}
        after = {
            "class": "m.C",
            "lr": 2,
            "inner": newer,
            "none": newer,
            "own": {"b": 1},
            "each": [newer, 3],
            "list": [1, 3],
        }
        found = metadata.compare_configs(before, after)
        assert found.added == {f"{place}.new.{key}": value for place in ("inner", "each[0]")
                               for key, value in (("class", "m.New"), ("x", 5))}  # fmt: skip
        assert found.removed == {"inner.gone": 2, "each[0].gone": 2}
        # None became an object, and the keys of a plain dict are the user's: somebody changed those.
        assert {key: value for key, value in found.changed.items() if not key.startswith("none")} == {
            "lr": [1, 2], "inner.kept": [1, 9], "each[0].kept": [1, 9], "list": [[1, 2], [1, 3]],
            "own.a": [1, None], "own.b": [None, 1],
        }  # fmt: skip
        assert found.changed["none.kept"] == [None, 9]
        other = metadata.compare_configs({"inner": inner}, {"inner": {"class": "m.Other", "new": 1}})
        assert not other.added and not other.removed and other.changed["inner.new"] == [None, 1]

    def test_a_class_that_moved_to_another_module_is_no_change(self, tmp_path: Path) -> None:
        def config(module: str, cls: str = "Inner", **inner: Any) -> dict[str, Any]:
            return {"class": f"{module}.C", "lr": 1, "each": [{"class": f"{module}.{cls}", "rate": 0.5, **inner}]}

        old, moved = config("before.one"), config("after")
        assert metadata.compare_configs(old, moved) == metadata.ConfigDifferences()
        assert metadata.changed_keys({"env": old}, {"env": {**moved, "lr": 2}, "new": 1}) == {
            "env.lr": [1, 2], "new": [None, 1],
        }  # fmt: skip
        # A field and another class of the moved module still count.
        differences = metadata.compare_configs(old, config("after", rate=0.25, new=3))
        assert differences.changed == {"each[0].rate": [0.5, 0.25]} and differences.added == {"each[0].new": 3}
        assert metadata.compare_configs(old, config("after", "Other")).changed == {
            "each[0].class": ["before.one.Inner", "after.Other"]
        }
        for module in ("before.one", "after"):
            with open_run(tmp_path, config=config(module), recipe_name="demo"):
                pass
        assert "resumed with another" not in (tmp_path / "logs.log").read_text()

    def test_keys_of_another_version_are_listed_once(self, tmp_path: Path) -> None:
        for lr, keys in ((1, {}), (2, {"new": 5}), (1, {"new": 5})):
            metadata.write_run_metadata(tmp_path, config={"class": "m.C", "lr": lr, **keys}, recipe_name="r")
        resumed = json.loads((tmp_path / "run_metadata.json").read_text())["resumed"]
        assert [entry["added"] for entry in resumed] == [{"new": 5}, {}]
        assert [entry["changed"] for entry in resumed] == [{"lr": [1, 2]}, {}]

    def test_damaged_metadata_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "run_metadata.json").write_text("{")
        with pytest.raises(DataFormatError, match=r"run_metadata\.json"):
            metadata.write_run_metadata(tmp_path, config={}, recipe_name="r")


class TestOpenRun:
    def test_a_new_run_has_config_metadata_and_metrics(self, tmp_path: Path) -> None:
        log_path = tmp_path / "deep" / "run"
        with open_run(log_path, config=Config(inner=Inner()), recipe_name="demo") as run:
            assert run.log_path == log_path and not run.resumed
            assert last_log_path() == log_path
            run.logger.log_metrics({"loss": 1.0}, step=0)
        assert json.loads((log_path / "config.json").read_text())["inner"]["rate"] == 0.5
        assert json.loads((log_path / "run_metadata.json").read_text())["recipe"] == "demo"
        assert read_jsonl(log_path / "metrics.jsonl") == [{"step": 0, "loss": 1.0}]

    def test_a_resumed_run_keeps_its_config_and_warns_of_changes(self, tmp_path: Path) -> None:
        with open_run(tmp_path, config={"lr": 1}, recipe_name="demo"):
            pass
        with open_run(tmp_path, config={"lr": 2}, recipe_name="demo") as run:
            assert run.resumed
        assert json.loads((tmp_path / "config.json").read_text()) == {"lr": 1}
        assert "resumed with another lr: 2, was 1" in (tmp_path / "logs.log").read_text()

    def test_a_start_that_died_before_the_metadata_is_no_resume(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text('{"lr": 0}')
        with open_run(tmp_path, config={"lr": 1}, recipe_name="demo") as run:
            assert not run.resumed
        assert json.loads((tmp_path / "config.json").read_text()) == {"lr": 1}

    def test_rewinding_drops_the_steps_to_be_done_again(self, tmp_path: Path) -> None:
        with open_run(tmp_path, config={}, recipe_name="demo") as run:
            for step in range(4):
                run.logger.log_metrics({"x": step}, step=step)
            run.logger.log_metrics({"note": "no step"})
            assert run.rewind_metrics(2) == 2
            run.logger.log_metrics({"x": 20}, step=2)
        assert [row.get("x") for row in read_jsonl(tmp_path / "metrics.jsonl")] == [0, 1, None, 20]

    def test_a_file_is_no_log_path(self, tmp_path: Path) -> None:
        (tmp_path / "f").write_text("")
        with pytest.raises(ConfigurationError, match="log_path"):
            open_run(tmp_path / "f", config={}, recipe_name="demo")

    def test_a_crash_is_recorded_on_file_and_handlers_are_restored(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        before = logging.getLogger().handlers[:]
        with pytest.raises(KeyError), open_run(tmp_path, config={}, recipe_name="demo"):
            raise KeyError("boom")
        assert "KeyError: 'boom'" in (tmp_path / "logs.log").read_text()
        assert "boom" not in "".join(capsys.readouterr())
        assert logging.getLogger().handlers == before


RECORD = CheckpointRecord(
    name="000020", batch=20, epoch=1, state_path="tinker://r/weights/000020", extra={"reference": "tinker://r/ref"}
)


class TestCheckpoints:
    def test_the_line_has_the_contracts_form_and_comes_back(self, tmp_path: Path) -> None:
        append_checkpoint(tmp_path, RECORD)
        line = json.loads((tmp_path / "checkpoints.jsonl").read_text())
        assert line == {
            "name": "000020",
            "batch": 20,
            "epoch": 1,
            "state_path": "tinker://r/weights/000020",
            "reference": "tinker://r/ref",
        }
        assert load_checkpoints_file(tmp_path) == [RECORD]

    def test_the_last_one_with_the_required_key_counts(self, tmp_path: Path) -> None:
        assert get_last_checkpoint(tmp_path) is None
        append_checkpoint(tmp_path, RECORD)
        append_checkpoint(tmp_path, CheckpointRecord(name="s", batch=30, sampler_path="tinker://r/sampler_weights/s"))
        with open(tmp_path / "checkpoints.jsonl", "a") as file:
            file.write('{"name": "torn", "batch": 40, "state_path": "tink')
        assert get_last_checkpoint(tmp_path) == RECORD
        last = get_last_checkpoint(tmp_path, required_key="sampler_path")
        assert last is not None and last.name == "s"
        assert get_last_checkpoint(tmp_path, required_key="reference") == RECORD
        assert get_last_checkpoint(tmp_path, required_key="nothing") is None

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ({"batch": 1}, "'name'"),
            ({"name": "a", "batch": "1"}, "batch must be an integer"),
            ({"name": "a", "batch": True}, "batch must be an integer"),
            ({"name": "a", "batch": -1}, "batch must not be negative"),
            ({"name": "a", "batch": 1, "final": 1}, "final must be true or false"),
        ],
    )
    def test_a_line_that_is_no_checkpoint_is_named(self, tmp_path: Path, line: dict[str, Any], message: str) -> None:
        append_checkpoint(tmp_path, RECORD)
        append_jsonl(tmp_path / "checkpoints.jsonl", line)
        with pytest.raises(CheckpointError, match=rf"checkpoints\.jsonl:2: .*{message}"):
            load_checkpoints_file(tmp_path)

    def test_a_line_without_batch_is_read(self, tmp_path: Path) -> None:
        """As older cookbooks and other programs write them."""
        old = {"name": "000020", "step": 20, "state_path": "tinker://a/weights/b", "final": None}
        append_jsonl(tmp_path / "checkpoints.jsonl", old)
        (record,) = load_checkpoints_file(tmp_path)
        assert (record.batch, record.final, record.get("step")) == (None, False, 20)
        assert record.to_dict() == {"name": "000020", "state_path": "tinker://a/weights/b", "step": 20}
        assert CheckpointRecord.from_dict(record.to_dict()) == record and CheckpointRecord("a").batch is None

    def test_extra_must_not_hide_a_field(self) -> None:
        with pytest.raises(CheckpointError, match="state_path"):
            CheckpointRecord(name="a", batch=0, extra={"state_path": "x"})
