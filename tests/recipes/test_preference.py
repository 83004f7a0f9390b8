"""The preference recipes from command line to files, on the shipped tiny model: they learn, resume by stage, and say no."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import pytest

from recipes import shorter
from recipes.preference import rlhf_pipeline
from recipes.preference import train as dpo
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.supervised import train as sl_train
from tinker_cookbook.utils.metric_names import each_once
from tinker_local_backend.engine.model.base_model import BaseModel


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TINKER_BACKEND", raising=False)
    monkeypatch.setenv("TINKER_LOCAL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TINKER_DEBATE_LOG_ROOT", str(tmp_path / "logs"))


def run(recipe: ModuleType, log_path: Path, *argv: str) -> None:
    run_recipe(recipe.CLIConfig, recipe.main, argv=[f"log_path={log_path}", *argv])


def rows(log_path: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (log_path / name).read_text().splitlines()]


def reported(log_path: Path, key: str) -> list[float]:
    return [row[key] for row in each_once(rows(log_path)) if key in row]


@pytest.mark.parametrize(
    "loss_type", ["dpo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ipo", "dpo_norm"))]
)
def test_dpo_comes_to_prefer_held_out_chosen_replies(tmp_path: Path, loss_type: str) -> None:
    argv = (f"loss_type={loss_type}", "dpo_beta=0.5", "max_steps=4", "batch_size=12", "lora_rank=8", "eval_every=4")
    run(dpo, tmp_path / "run", *argv)
    accuracy, margin = (reported(tmp_path / "run", f"test/{key}") for key in ("accuracy", "margin"))
    assert margin[0] == pytest.approx(0, abs=1e-3) and margin[-1] > 0.5
    assert accuracy[-1] > 0.9
    # What is trained on is measured before the update: the first step has no margin yet.
    assert reported(tmp_path / "run", "margin")[0] == pytest.approx(0, abs=1e-3)
    losses = reported(tmp_path / "run", "test/dpo_loss")
    assert losses[-1] < losses[0]


def test_dpo_takes_a_saved_dataset(tmp_path: Path) -> None:
    said = {role: [{"role": role, "content": text}] for role, text in (("user", "Hi."), ("assistant", "Hello!"))}
    row = {
        "chosen": said["user"] + said["assistant"],
        "rejected": [*said["user"], {**said["assistant"][0], "content": "9"}],
    }
    splits = datasets.DatasetDict({name: datasets.Dataset.from_list([row] * 4) for name in ("train", "test")})
    splits.save_to_disk(str(tmp_path / "set"))
    argv = (f"dataset={tmp_path / 'set'}", "prompt_column=None", "test_split=test", "max_steps=1", "lora_rank=4")
    run(dpo, tmp_path / "run", *argv)
    assert reported(tmp_path / "run", "num_pairs") == [4] and len(reported(tmp_path / "run", "test/accuracy")) == 2


@pytest.mark.slow
def test_shorter_replies_get_shorter(tmp_path: Path) -> None:
    run(shorter, tmp_path / "run", "eval_every=20")
    before, after = reported(tmp_path / "run", "test/env/all/ac_tokens_per_turn")
    assert after < 0.6 * before
    wins = reported(tmp_path / "run", "env/all/win_minus_loss")
    assert len(wins) == 20 and all(abs(win) < 1e-9 for win in wins)  # one member's win is another's loss


class TestPipeline:
    SMALL = (
        "test_size=130", "batch_size=7", "max_steps=1", "groups_per_batch=2", "group_size=2", "max_tokens=8",
        "lora_rank=4", "eval_every=1",
    )  # fmt: skip
    STAGES = ("sft", "preference_model", "rl")

    @pytest.mark.slow
    def test_a_finished_stage_is_not_run_again_unless_all_start_over(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log_path = tmp_path / "run"
        with monkeypatch.context() as patched:
            original = sl_train.main

            async def killed_in_the_second(config: sl_train.Config) -> None:
                if config.recipe_name.endswith("preference_model"):
                    raise SystemError("killed")
                await original(config)

            patched.setattr(sl_train, "main", killed_in_the_second)
            with pytest.raises(SystemError, match="killed"):
                run(rlhf_pipeline, log_path, *self.SMALL)
        assert rows(log_path / "sft", "checkpoints.jsonl")[-1]["final"]
        first = (log_path / "sft" / "metrics.jsonl").read_bytes()

        run(rlhf_pipeline, log_path, *self.SMALL, "behavior_if_log_dir_exists=resume")
        assert (log_path / "sft" / "metrics.jsonl").read_bytes() == first
        assert not json.loads((log_path / "sft" / "run_metadata.json").read_text()).get("resumed")
        final = {stage: rows(log_path / stage, "checkpoints.jsonl")[-1] for stage in self.STAGES}
        assert all(record["final"] for record in final.values())
        configs = {stage: json.loads((log_path / stage / "config.json").read_text()) for stage in self.STAGES}
        warm = final["sft"]["state_path"]
        assert configs["preference_model"]["load_checkpoint_path"] == configs["rl"]["load_checkpoint_path"] == warm
        judge = configs["rl"]["dataset_builder"]["preference_model_builder"]
        assert judge["rm_weights_path"] == final["preference_model"]["sampler_path"]
        assert len(reported(log_path / "rl", "test/win_rate")) == 2
        assert len(reported(log_path / "preference_model", "test/accuracy")) == 2

        files = {path: path.read_bytes() for path in log_path.glob("*/metrics.jsonl")}
        run(rlhf_pipeline, log_path, *self.SMALL, "behavior_if_log_dir_exists=resume")
        assert {path: path.read_bytes() for path in files} == files

        run(rlhf_pipeline, log_path, *self.SMALL, "seed=1", "behavior_if_log_dir_exists=delete")
        assert all((path.read_bytes() != files[path]) for path in files)
        assert "resumed" not in json.loads((log_path / "run_metadata.json").read_text())


@pytest.mark.parametrize(
    ("recipe", "argument", "message"),
    [
        (dpo, "dataset=no_such.jsonl", "there is no such file"),
        (dpo, "test_split=test", "test_split='test' goes with a hub dataset; set test_dataset instead"),
        (dpo, "prompt_column=None", "train_split and prompt_column go with a hub dataset"),
        (dpo, "dpo_beta=0", "dpo_beta: must be greater than 0"),
        (dpo, "loss_type=kto", "loss_type"),
        (dpo, "max_length=20", "max_length=20 leaves no token"),
        (dpo, "test_size=144", "test_size=144 leaves nothing to train on"),
        (dpo, "learning_rate=-1", "learning_rate: must be greater than 0"),
        (rlhf_pipeline, "max_steps=0", "max_steps=0: must be at least 1"),
        (rlhf_pipeline, "max_tokens=0", "max_tokens: must be greater than 0, got 0"),
        (rlhf_pipeline, "demonstrations=all", "demonstrations"),
        (rlhf_pipeline, "max_length=40", "max_length=40 would cut off its label"),
        (shorter, "group_size=1", "group_size: must be greater than 1"),
    ],
)
def test_mistakes_are_named_before_a_model_is_loaded(
    recipe: ModuleType,
    argument: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(self: BaseModel, *arguments: Any, **options: Any) -> None:
        raise AssertionError("a model was loaded before the config had been checked")

    monkeypatch.setattr(BaseModel, "__init__", refuse)
    with pytest.raises(SystemExit) as raised:
        run(recipe, tmp_path / "run", argument)
    error = capsys.readouterr().err
    assert raised.value.code == 2 and message in error and "Traceback" not in error
    assert not (tmp_path / "run").exists()
