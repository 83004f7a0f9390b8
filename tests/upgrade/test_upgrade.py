"""Runs that earlier code began go on with the code of today; README.md says how their folders were made."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from recipes import check_artifacts, rl_basic, sl_basic
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.runs.metadata import FOLDER_VERSION
from tinker_cookbook.utils.files import read_jsonl
from tinker_local_backend.backup import back_up, restore
from tinker_local_backend.errors import CheckpointError, RequestError
from tinker_local_backend.storage.catalog import list_run
from tinker_local_backend.storage.paths import run_ids_in, runs_folder

ROOT = Path(__file__).resolve().parents[2]
VERSION_0 = Path(__file__).with_name("version_0")

COMMON = (
    "model_name=example_data/tiny_chat", "lora_rank=1", "train_mlp=false", "seed=3", "eval_every=0", "save_every=0",
    "rolling_save_every=1", "ttl_seconds=None", "rolling_ttl_seconds=31536000000", "behavior_if_log_dir_exists=resume",
)  # fmt: skip
RL = ("groups_per_batch=3", "group_size=4", "max_tokens=24", "num_test=2", "num_groups_to_log=1", "log_path=rl")
SL = ("batch_size=4", "test_size=2", "max_length=128", "dataset=example_data/conversations.jsonl", "log_path=sl")
WHOLE_NLL = [8.271504983, 8.048573228, 7.357562438, 7.672737470, 7.152616011, 7.693430106]
"""Of the earlier code's supervised run without a stop."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the runs and their home, as an upgraded program finds them."""
    shutil.copytree(VERSION_0, tmp_path, dirs_exist_ok=True)
    (tmp_path / "example_data").symlink_to(ROOT / "example_data")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TINKER_LOCAL_HOME", "home")
    monkeypatch.delenv("TINKER_BACKEND", raising=False)
    return tmp_path


def resumes(log_path: Path) -> list[dict[str, Any]]:
    metadata = json.loads((log_path / "run_metadata.json").read_text())
    assert "folder_version" not in metadata
    return metadata["resumed"]


@pytest.mark.cpu_promise
def test_a_supervised_run_goes_on_with_its_weights_moments_and_data(place: Path) -> None:
    run_recipe(sl_basic.CLIConfig, sl_basic.main, argv=[*COMMON, *SL, "max_steps=6"])
    rows = [row for row in read_jsonl(place / "sl" / "metrics.jsonl") if "progress/final" not in row]
    assert [row["step"] for row in rows] == list(range(6))
    assert [row["train_mean_nll"] for row in rows] == pytest.approx(WHOLE_NLL, abs=2e-3)
    (resumed,) = resumes(place / "sl")
    assert resumed["changed"] == {} and resumed["folder_version"] == FOLDER_VERSION


def test_a_run_of_reinforcement_learning_goes_on_and_its_folder_is_whole(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for steps in (3, 4):
        run_recipe(rl_basic.CLIConfig, rl_basic.main, argv=[*COMMON, *RL, f"max_steps={steps}"])
    rows = [row for row in read_jsonl(place / "rl" / "metrics.jsonl") if "progress/final" not in row]
    assert [row["step"] for row in rows] == list(range(4))
    first, second = resumes(place / "rl")
    # What somebody changed is told each time, what came with the new code once.
    assert [key.rsplit(".", 1)[-1] for key in first["changed"]].count("max_steps") == 1
    assert set(first["changed"]) == set(second["changed"]) and not second["added"]
    run_recipe(check_artifacts.CLIConfig, check_artifacts.main, argv=["log_path=rl"])
    assert "resumes" not in capsys.readouterr().out


def test_a_home_is_copied_and_restored_whole(place: Path) -> None:
    home, file = place / "home", place / "backup.tar"
    tenant = home / "tenants" / "alice"
    shutil.copytree(VERSION_0 / "home", tenant)
    (runs_folder(home) / "unfinished" / "weights" / ".x.tmp").mkdir(parents=True)
    assert back_up(home, file) == 8
    restored = place / "restored"
    assert restore(file, restored) == 8
    for before, after in ((home, restored), (tenant, restored / "tenants" / "alice")):
        ids = run_ids_in(runs_folder(after))
        assert ids == run_ids_in(runs_folder(VERSION_0 / "home"))
        for run_id in ids:
            entries = [[(str(e.path), e.info) for e in list_run(place_, run_id).entries] for place_ in (before, after)]
            assert entries[0] == entries[1] and len(entries[0]) == 2
        assert (after / "registry.sqlite3").exists()
    with pytest.raises(RequestError, match="is not empty"):
        restore(file, restored)
    with pytest.raises(RequestError, match="cannot be read"):
        restore(place / "rl" / "metrics.jsonl", place / "other")


def test_damage_is_found_before_a_home_is_restored(place: Path) -> None:
    tensors = next((place / "home").rglob("optimizer.safetensors"))
    content = bytearray(tensors.read_bytes())
    content[-1] ^= 1
    tensors.write_bytes(content)
    back_up(place / "home", place / "backup.tar")
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors is damaged"):
        restore(place / "backup.tar", place / "restored")
    assert not (place / "restored").exists()
    (tensors.parent / "checkpoint.json").unlink()
    with pytest.raises(CheckpointError, match="cannot be read; delete it"):
        back_up(place / "home", place / "second.tar")
    assert not (place / "second.tar").exists()
