"""The distillation recipes on the shipped model: the number each promises to change does change, and bad keys are refused."""

import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from recipes.distillation import off_policy, on_policy
from recipes.prompt_distillation import train as prompt_distillation
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.runs.checkpoints import load_checkpoints_file


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TINKER_BACKEND", raising=False)
    monkeypatch.setenv("TINKER_LOCAL_HOME", str(tmp_path / "home"))


def run(recipe: ModuleType, log_path: Path, *argv: str) -> list[dict[str, Any]]:
    run_recipe(recipe.CLIConfig, recipe.main, argv=[f"log_path={log_path}", *argv])
    return [json.loads(line) for line in (log_path / "metrics.jsonl").read_text().splitlines()]


def ends(rows: list[dict[str, Any]], key: str) -> tuple[float, float]:
    values = [row[key] for row in rows if key in row]
    assert len(values) > 1
    return values[0], values[-1]


@pytest.mark.slow
def test_off_policy_the_kl_to_the_teacher_falls_on_held_out_conversations(tmp_path: Path) -> None:
    rows = run(off_policy, tmp_path / "log", "teacher_epochs=1", "num_epochs=1", "eval_every=20", "test_size=16")
    before, after = ends(rows, "test/kl")
    assert 0 < after < 0.8 * before
    assert all(0 < row["train/teacher_mass"] <= 1 for row in rows if "train/teacher_mass" in row)
    teacher = load_checkpoints_file(tmp_path / "log" / "teacher")[-1]
    config = json.loads((tmp_path / "log" / "config.json").read_text())
    assert teacher.final and str(teacher.sampler_path) in json.dumps(config)


@pytest.mark.slow
def test_on_policy_the_kl_falls_and_held_out_sums_come_out_right(tmp_path: Path) -> None:
    rows = run(on_policy, tmp_path / "log", "max_steps=8", "test_size=20", "groups_per_batch=16")
    before, after = ends(rows, "test/teacher_kl")
    assert before > 0.2 and abs(after) < 0.6 * before
    first, last = ends(rows, "held_out/env/all/correct")
    assert last > first + 0.1
    assert all(row["env/all/reward/total"] == 0 for row in rows if "teacher_kl" in row)


@pytest.mark.slow
def test_prompt_distillation_the_student_agrees_without_the_prompt(tmp_path: Path) -> None:
    argv = ("max_lines=200", "test_size=60", "num_epochs=6")
    rows = run(prompt_distillation, tmp_path / "log", *argv)
    before, after = ends(rows, "test/agreement")
    assert before < 0.4 and after > before + 0.3
    labelled = (tmp_path / "log" / "data" / "train.jsonl").read_bytes()
    # The same data, made beforehand, gives the same student.
    again = run(prompt_distillation, tmp_path / "again", f"data={tmp_path / 'log' / 'data'}", *argv[1:])
    assert ends(again, "test/agreement") == (before, after)
    assert (tmp_path / "log" / "data" / "train.jsonl").read_bytes() == labelled


@pytest.mark.parametrize(
    ("recipe", "key", "message"),
    [
        (off_policy, "dataset=/no/such.jsonl", "no such"),
        (off_policy, "n_teacher_targets=5000", "n_teacher_targets=5000 is more than the"),
        (off_policy, "teacher_checkpoint=tinker://run/weights/final", "not a path of sampler weights"),
        (off_policy, "learning_rate=0", "learning_rate: must be greater than 0"),
        (on_policy, "max_tokens=0", "max_tokens"),
        (prompt_distillation, "max_lines=0", "max_lines=0: must be at least 1"),
        (
            prompt_distillation,
            "data=mine teacher_model=tiny_chat max_lines=9",
            "teacher_model, max_lines and data='mine'",
        ),
        (on_policy, "dataset=mine.txt", "has no answers to make a teacher from"),
        (on_policy, "kl_discount_factor=2", "must be between 0 and 1"),
        (on_policy, "loss_fn=cross", "loss_fn='cross'"),
        (prompt_distillation, "data=/no/such/folder", "has no train.jsonl"),
        (prompt_distillation, "learning_rate=0", "learning_rate: must be greater than 0"),
    ],
)
def test_bad_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recipe: ModuleType, key: str, message: str
) -> None:
    with pytest.raises(SystemExit):
        run(recipe, tmp_path / "log", *key.split())
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize("recipe", [off_policy, on_policy])
def test_another_model_must_name_its_teacher(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recipe: ModuleType
) -> None:
    model = tmp_path / "model"
    shutil.copytree(EXAMPLE_DATA / "tiny_chat", model, ignore=shutil.ignore_patterns("*.safetensors"))
    described = json.loads((model / "config.json").read_text())
    # The teacher that needs no naming is the tiny model's own, and a copy that says it is tiny would get it.
    (model / "config.json").write_text(json.dumps({**described, "tiny_model": False}))
    with pytest.raises(SystemExit):
        run(recipe, tmp_path / "log", f"model_name={model}", "renderer_name=qwen3_instruct")
    assert "needs a teacher: set teacher_model" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "log").exists()
