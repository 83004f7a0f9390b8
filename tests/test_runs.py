"""What must hold for the files of a run: whole or absent, torn tails dropped, every start recorded, resumable."""

import asyncio
import dataclasses
import enum
import json
import logging
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import chz
import numpy as np
import pytest
import torch

from tinker_cookbook import checkpoint_utils
from tinker_cookbook.exceptions import CheckpointError, ConfigurationError, DataFormatError, DataValidationError
from tinker_cookbook.runs import metadata
from tinker_cookbook.runs.bootstrap import last_log_path, open_run
from tinker_cookbook.runs.checkpoints import (
    CheckpointRecord,
    append_checkpoint,
    get_last_checkpoint,
    load_checkpoints_file,
)
from tinker_cookbook.runs.files import (
    append_jsonl,
    flatten,
    read_jsonl,
    to_jsonable,
    truncate_jsonl,
    write_json,
    write_text,
)


class Color(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Point:
    x: int
    color: Color


@chz.chz
class Inner:
    rate: float = 0.5


@chz.chz
class Config:
    inner: Inner
    name: str = "a"
    reward: Any = max


class TestJson:
    def test_numbers_of_numpy_and_torch_become_numbers(self) -> None:
        row = to_jsonable({"a": np.float32(0.5), "b": np.int64(3), "c": torch.tensor(2.0), "d": np.bool_(True)})
        assert row == {"a": 0.5, "b": 3, "c": 2.0, "d": True}
        assert [type(value) for value in row.values()] == [float, int, float, bool]

    def test_arrays_become_lists(self) -> None:
        assert to_jsonable([np.arange(3), torch.zeros(1, 2)]) == [[0, 1, 2], [[0.0, 0.0]]]

    def test_dataclasses_enums_sets_paths_and_functions(self) -> None:
        assert to_jsonable(Point(1, Color.RED)) == {"x": 1, "color": "red"}
        assert to_jsonable({Color.RED: {"b", "a"}}) == {"red": ["a", "b"]}
        assert to_jsonable(Path("a/b")) == "a/b"
        assert to_jsonable(flatten) == "tinker_cookbook.runs.files.flatten"

    def test_chz_objects_carry_their_class(self) -> None:
        dumped = to_jsonable(Config(inner=Inner()))
        assert dumped == {
            "class": f"{__name__}.Config",
            "inner": {"class": f"{__name__}.Inner", "rate": 0.5},
            "name": "a",
            "reward": "builtins.max",
        }

    def test_anything_else_is_named_by_its_type(self) -> None:
        assert to_jsonable(object()) == "<class 'object'>"

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, np.float32("nan"), torch.tensor(math.inf)])
    def test_nan_and_infinity_are_errors_that_name_the_key(self, bad: Any) -> None:
        with pytest.raises(DataValidationError, match=r"^loss\.parts\[1\]: "):
            to_jsonable({"loss": {"parts": [0.0, bad]}})

    def test_keys_with_equal_text_are_an_error(self) -> None:
        with pytest.raises(DataValidationError, match="'1'"):
            to_jsonable({1: "a", "1": "b"})

    def test_flatten_keeps_lists_and_empty_dicts_as_leaves(self) -> None:
        assert flatten({"a": {"b": [1], "c": {}}, "d": 2}) == {"a.b": [1], "a.c": {}, "d": 2}


class TestWholeFiles:
    def test_a_failed_write_leaves_the_old_file_and_no_other(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "a.json"
        write_json(path, {"a": 1})

        def fail(*_: Any) -> None:
            raise OSError("disk")

        monkeypatch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="disk"):
            write_json(path, {"a": 2})
        assert json.loads(path.read_text()) == {"a": 1}
        assert os.listdir(tmp_path) == ["a.json"]

    def test_an_object_that_cannot_be_encoded_writes_nothing(self, tmp_path: Path) -> None:
        with pytest.raises(DataValidationError):
            write_json(tmp_path / "a.json", {"a": math.nan})
        with pytest.raises(DataValidationError):
            append_jsonl(tmp_path / "a.jsonl", {"a": math.nan})
        assert os.listdir(tmp_path) == []

    def test_text_is_written_as_it_is(self, tmp_path: Path) -> None:
        write_text(tmp_path / "a", "één\r\n")
        assert (tmp_path / "a").read_bytes() == "één\r\n".encode()


class TestJsonLines:
    def test_rows_come_back_in_order(self, tmp_path: Path) -> None:
        rows = [{"step": 0, "text": "a\u2028b\nc"}, {"step": 1, "loss": 0.1}]
        for row in rows:
            append_jsonl(tmp_path / "m.jsonl", row)
        assert read_jsonl(tmp_path / "m.jsonl") == rows
        assert (tmp_path / "m.jsonl").read_bytes().count(b"\n") == 2

    @pytest.mark.parametrize("line", ["{", "3", '{"a": NaN}', "\udcff"])
    def test_a_bad_line_is_named_by_file_and_line(self, tmp_path: Path, line: str) -> None:
        path = tmp_path / "m.jsonl"
        path.write_bytes(b'{"a": 1}\n\n' + line.encode(errors="surrogateescape") + b'\n{"a": 2}\n')
        for tolerate in (False, True):
            with pytest.raises(DataFormatError, match=rf"^{path}:3: "):
                read_jsonl(path, tolerate_torn_tail=tolerate)

    def test_a_torn_tail_is_dropped_only_if_asked(self, tmp_path: Path) -> None:
        path = tmp_path / "m.jsonl"
        path.write_bytes(b'{"a": 1}\n{"a": "\xc3')
        assert read_jsonl(path, tolerate_torn_tail=True) == [{"a": 1}]
        with pytest.raises(DataFormatError, match=rf"^{path}:2: "):
            read_jsonl(path)

    def test_appending_replaces_a_torn_tail(self, tmp_path: Path) -> None:
        path = tmp_path / "m.jsonl"
        for torn, kept in ((b'{"a": 1}\n{"a": 2', [{"a": 1}]), (b'{"a', []), (b'{"a": 1}', [{"a": 1}])):
            path.write_bytes(torn)
            append_jsonl(path, {"a": 3})
            assert read_jsonl(path) == [*kept, {"a": 3}]

    def test_truncation_keeps_lines_byte_for_byte(self, tmp_path: Path) -> None:
        path = tmp_path / "m.jsonl"
        path.write_text('{"step":0,  "x": 1e-5}\n{"step": 1}\n{"note": "é"}\n{"step": 2}\n{"step"')
        assert truncate_jsonl(path, lambda row: row.get("step", 0) < 1) == 2
        assert path.read_text() == '{"step":0,  "x": 1e-5}\n{"note": "é"}\n'
        assert truncate_jsonl(tmp_path / "absent.jsonl", lambda row: True) == 0


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
            run.write_record("training_step_0001", {"tokens": np.arange(2)})
        assert json.loads((log_path / "config.json").read_text())["inner"]["rate"] == 0.5
        assert json.loads((log_path / "run_metadata.json").read_text())["recipe"] == "demo"
        assert json.loads((log_path / "training_step_0001.json").read_text()) == {"tokens": [0, 1]}
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

    @pytest.mark.parametrize("name", ["", "..", "a/b", "/etc/x"])
    def test_records_stay_in_the_folder(self, tmp_path: Path, name: str) -> None:
        with open_run(tmp_path, config={}, recipe_name="demo") as run, pytest.raises(ConfigurationError, match="name"):
            run.write_record(name, {})

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
            ({"name": "a"}, "'batch'"),
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

    def test_extra_must_not_hide_a_field(self) -> None:
        with pytest.raises(CheckpointError, match="state_path"):
            CheckpointRecord(name="a", batch=0, extra={"state_path": "x"})


class FakeTrainingClient:
    """Saves like the SDK's client: a call submits, awaiting its result completes. Records the order of events."""

    def __init__(self, log_path: Path, fail: bool = False) -> None:
        self.log_path = log_path
        self.fail = fail
        self.events: list[str] = []

    def _save(self, kind: str, name: str, ttl_seconds: int | None) -> Any:
        self.events.append(f"submit {kind} {name} {ttl_seconds}")

        async def wait() -> SimpleNamespace:
            assert load_checkpoints_file(self.log_path) == []
            if self.fail:
                raise RuntimeError("no disk")
            self.events.append(f"saved {kind}")
            return SimpleNamespace(path=f"tinker://r/{kind}/{name}")

        return wait()

    def save_state(self, name: str, ttl_seconds: int | None = None) -> Any:
        return self._save("weights", name, ttl_seconds)

    def save_weights_for_sampler(self, name: str, ttl_seconds: int | None = None) -> Any:
        return self._save("sampler_weights", name, ttl_seconds)


class TestSaveCheckpoint:
    def test_both_are_submitted_then_saved_then_recorded(self, tmp_path: Path) -> None:
        client = FakeTrainingClient(tmp_path)
        paths = asyncio.run(
            checkpoint_utils.save_checkpoint(
                client, "000003", tmp_path, {"batch": 3, "epoch": 0, "seen": 7}, kind="both", ttl_seconds=60
            )
        )
        assert paths == {
            "state_path": "tinker://r/weights/000003",
            "sampler_path": "tinker://r/sampler_weights/000003",
        }
        assert client.events == [
            "submit weights 000003 60",
            "submit sampler_weights 000003 60",
            "saved weights",
            "saved sampler_weights",
        ]
        record = checkpoint_utils.get_last_checkpoint(tmp_path)
        assert record is not None
        assert record.to_dict() == {"name": "000003", "batch": 3, "epoch": 0, "seen": 7, **paths}

    def test_a_failed_save_leaves_no_line(self, tmp_path: Path) -> None:
        client = FakeTrainingClient(tmp_path, fail=True)
        with pytest.raises(RuntimeError, match="no disk"):
            asyncio.run(checkpoint_utils.save_checkpoint(client, "a", tmp_path, {"batch": 1}))
        assert checkpoint_utils.load_checkpoints_file(tmp_path) == []

    @pytest.mark.parametrize("state", [{}, {"batch": 1, "state_path": "x"}, {"batch": 1, "name": "b"}])
    def test_a_wrong_loop_state_is_refused_before_saving(self, tmp_path: Path, state: dict[str, Any]) -> None:
        client = FakeTrainingClient(tmp_path)
        with pytest.raises(CheckpointError):
            asyncio.run(checkpoint_utils.save_checkpoint(client, "a", tmp_path, state))
        assert client.events == []

    def test_an_unknown_kind_is_refused(self, tmp_path: Path) -> None:
        kind: Any = "all"
        with pytest.raises(ConfigurationError, match="kind='all'"):
            asyncio.run(
                checkpoint_utils.save_checkpoint(FakeTrainingClient(tmp_path), "a", tmp_path, {"batch": 1}, kind)
            )
