"""The recipes from command line to files, on the shipped tiny model: they learn, repeat themselves, and stop cleanly."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from recipes import debate_rs_grpo, demo, rl_basic, single_turn, sl_basic
from tests.child import python_path
from tests.killing import untimed_row
from tests.waiting import HANG_SECONDS, until
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.runs.steps import StepLoop

SMALL_DEBATE = ("num_rollouts=16", "num_groups=2", "max_tokens=48", "lora_rank=8", "num_test=4")


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TINKER_BACKEND", raising=False)
    monkeypatch.setenv("TINKER_LOCAL_HOME", str(tmp_path / "home"))


def run(recipe: ModuleType, log_path: Path, *argv: str) -> list[dict[str, Any]]:
    """The metrics of a run."""
    run_recipe(recipe.CLIConfig, recipe.main, argv=[f"log_path={log_path}", *argv])
    return rows(log_path)


def rows(log_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (log_path / "metrics.jsonl").read_text().splitlines()]


def untimed_bytes(log_path: Path) -> bytes:
    lines = []
    for line in (log_path / "metrics.jsonl").read_text().splitlines():
        lines.append(json.dumps(untimed_row(json.loads(line))))
    return "\n".join(lines).encode()


def records(log_path: Path, pattern: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(log_path.rglob(pattern))]


class TestDebate:
    @pytest.mark.slow
    def test_the_same_config_and_seed_give_the_same_metrics(self, tmp_path: Path) -> None:
        argv = (*SMALL_DEBATE, "judge=lm", "max_steps=2", "eval_every=2", "on_zero_advantages=skip")
        written = run(debate_rs_grpo, tmp_path / "first", *argv)
        run(debate_rs_grpo, tmp_path / "second", *argv)
        assert untimed_bytes(tmp_path / "first") == untimed_bytes(tmp_path / "second")
        # The comparison means something only if something was sampled, judged and trained.
        assert sum(row.get("groups/trained", 0) for row in written) > 0
        assert len({row["env/all/total_ac_tokens"] for row in written if "groups/trained" in row}) == 2
        assert [row["step"] for row in written if "test/env/all/correct" in row] == [0, 2]

    @pytest.mark.slow
    def test_another_seed_gives_another_run(self, tmp_path: Path) -> None:
        first, second = (
            run(
                debate_rs_grpo,
                tmp_path / seed,
                *SMALL_DEBATE,
                seed,
                "max_steps=1",
                "eval_every=0",
                "debate_train=rejection",
            )
            for seed in ("seed=0", "seed=1")
        )
        assert first[0]["optim/entropy"] != second[0]["optim/entropy"]

    @pytest.mark.slow
    def test_rejection_on_summaries_judged_by_confidence(self, tmp_path: Path) -> None:
        argv = ("task=summary", "judge=confidence", "debate_train=rejection", "max_steps=1", "eval_every=0")
        (row,) = run(debate_rs_grpo, tmp_path / "run", *SMALL_DEBATE, *argv)
        debates = records(tmp_path / "run", "debate_*.json")
        assert len(debates) == 8
        decided = sum(record["verdict"] in ("A", "B") for record in debates)
        assert row["train/num_datums"] == decided > 0
        assert row["env/all/trained_fraction"] == pytest.approx(decided / 16)
        (step,) = records(tmp_path / "run", "training_step_0001.json")
        assert len(step["training_data"]) == decided
        for datum in step["training_data"]:
            trained = [a for a, m in zip(datum["completion_advantages"], datum["completion_mask"], strict=True) if m]
            assert trained == pytest.approx([1 / len(trained)] * len(trained))
        # On-policy, sampler and trainer agree on every token, also across injected turns.
        assert abs(row["optim/kl_sample_train_v1"]) < 1e-4 and row["optim/kl_sample_train_v2"] < 1e-6
        assert 0 < row["env/all/compression_ratio"] < 1 and "env/all/correct" not in row


class TestSingleTurn:
    @pytest.mark.slow
    def test_one_step_of_summaries(self, tmp_path: Path) -> None:
        argv = ("task=summary", "num_rollouts=16", "num_groups=2", "max_steps=1", "num_test=4", "lora_rank=8")
        first, last = run(single_turn, tmp_path / "run", *argv, "temperature=0.8")
        assert first["groups/sampled"] == first["groups/trained"] + first["groups/filtered"] == 2
        assert first["train/num_datums"] > 0 and first["optim/grad_norm"] > 0
        # Sampled at 0.8 and scored at 0.8: the ratio is 1, not biased by the temperature.
        assert abs(first["optim/kl_sample_train_v1"]) < 1e-4 and first["train/ratio"] == pytest.approx(1, abs=1e-3)
        for name in ("test", "train_questions"):
            assert f"{name}/env/all/task_reward" in first and f"{name}/env/all/task_reward" in last
        assert len(records(tmp_path / "run", "summary_*.json")) == 16


class TestSupervised:
    @pytest.mark.slow
    def test_held_out_loss_falls(self, tmp_path: Path) -> None:
        written = run(sl_basic, tmp_path / "run", "num_epochs=1", "lora_rank=8")
        evaluated = [row for row in written if "test/nll" in row]
        assert [row["step"] for row in evaluated] == [0, 6]
        assert evaluated[-1]["test/nll"] < 0.9 * evaluated[0]["test/nll"]
        assert evaluated[-1]["test/bpb"] < evaluated[0]["test/bpb"]

    @pytest.mark.slow
    def test_resumed_it_gives_the_same_metrics(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        argv = ("max_steps=7", "save_every=2", "eval_every=3", "batch_size=24", "lora_rank=4", "test_size=8")
        run(sl_basic, tmp_path / "whole", *argv)
        submit = StepLoop._submit

        def killed_at_the_sixth(loop: StepLoop, step: int, *rest: Any) -> None:
            if step == 5:
                raise SystemError("killed")
            submit(loop, step, *rest)

        with monkeypatch.context() as patched:
            patched.setattr(StepLoop, "_submit", killed_at_the_sixth)
            with pytest.raises(SystemError, match="killed"):
                run(sl_basic, tmp_path / "killed", *argv)
        run(sl_basic, tmp_path / "killed", *argv, "behavior_if_log_dir_exists=resume")
        assert untimed_bytes(tmp_path / "killed") == untimed_bytes(tmp_path / "whole")

    @pytest.mark.slow
    def test_a_finished_run_keeps_its_last_evaluation(self, tmp_path: Path) -> None:
        argv = ("max_steps=2", "eval_every=2", "batch_size=24", "lora_rank=4", "test_size=8")
        run(sl_basic, tmp_path / "run", *argv)
        finished = (tmp_path / "run" / "metrics.jsonl").read_bytes()
        run(sl_basic, tmp_path / "run", *argv, "behavior_if_log_dir_exists=resume")
        assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == finished


def test_a_home_folder_is_written_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    argv = ["log_path=~/runs/first", "groups_per_batch=4", "max_steps=1", "eval_every=0", "lora_rank=4"]
    summary = run_recipe(rl_basic.CLIConfig, rl_basic.main, argv=argv)
    (row,) = rows(tmp_path / "runs" / "first")
    assert summary.log_path == tmp_path / "runs" / "first" and (summary.steps, summary.metrics) == (1, row)
    assert summary.state_path.endswith("/weights/final") and summary.sampler_path.endswith("/sampler_weights/final")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_leaves_whole_files_and_says_how_to_resume(tmp_path: Path, name: str, code: int) -> None:
    log_path = tmp_path / "run"
    argv = [
        f"log_path={log_path}",
        "max_steps=500",
        "groups_per_batch=4",
        "save_every=1",
        "eval_every=0",
        "lora_rank=4",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}
    process = subprocess.Popen(
        [sys.executable, "-m", "recipes.rl_basic", *argv],
        cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        # Tests that a script runs in the background inherit an ignored SIGINT; a terminal's user has the default.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        until(lambda: (log_path / "checkpoints.jsonl").exists() or process.poll() is not None)
        process.send_signal(getattr(signal, name))
        _, error = process.communicate(timeout=HANG_SECONDS)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == code, error
    last = json.loads((log_path / "checkpoints.jsonl").read_text().splitlines()[-1])
    assert f"the last checkpoint is {last['name']}" in error and last["batch"] == len(rows(log_path))
    assert "Traceback" not in error
    assert f"python -m recipes.rl_basic max_steps=500 groups_per_batch=4 save_every=1 eval_every=0 lora_rank=4 " \
        f"log_path={log_path} behavior_if_log_dir_exists=resume" in error  # fmt: skip
    assert not list(log_path.rglob("*.tmp"))
    assert len(rows(log_path)) >= 1
    for path in log_path.rglob("*.json"):
        json.loads(path.read_text())
    for line in (log_path / "checkpoints.jsonl").read_text().splitlines():
        state = json.loads(line)["state_path"].removeprefix("tinker://")
        assert (tmp_path / "home" / "runs" / state / "adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_the_demo_learns(tmp_path: Path) -> None:
    """From the verdicts of a judge who checks one step: answers that were never compared with the truth become right."""
    argv = ["seed=0", "protocols=debate", "tokens=12000", f"log_path={tmp_path / 'run'}"]
    run_recipe(demo.DemoConfig, demo.main, argv=argv)
    (run,) = json.loads((tmp_path / "run" / "study.json").read_text())["runs"]
    before, after = (sum(run[when]["correct_I"]) / len(run[when]["correct_I"]) for when in ("before", "after"))
    assert after >= before + 0.10
