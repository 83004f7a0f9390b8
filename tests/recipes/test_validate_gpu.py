"""What the validation says when something is wrong. That it passes on the CPU is the smoke test of the recipes."""

import json
import stat
import sys
from pathlib import Path
from typing import Any

import chz
import pytest

from benchmarks.recipe_runs import ROOT
from recipes import validate_gpu
from recipes.gpu_utilisation import Utilisation
from recipes.validate_gpu import CLIConfig, Row, check_device, checks, judge, training_runs
from tests.waiting import until
from tinker_cookbook.utils.lazy import torch


@pytest.fixture
def cli(tmp_path: Path) -> CLIConfig:
    return CLIConfig(output=str(tmp_path / "report"))


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Commands by recipe, which run in place of the real ones: a program text each; the default prints and ends well."""
    programs: dict[str, str] = {}
    run = validate_gpu.subprocess.run

    def replaced(command: list[str], **kwargs: Any) -> Any:
        if command[0] != sys.executable:
            return run(command, **kwargs)
        text = programs.get(command[3], "print('max_abs_diff=0')\nprint('ok')")
        return run([sys.executable, "-c", text], **kwargs)

    monkeypatch.setattr(validate_gpu.subprocess, "run", replaced)
    monkeypatch.setattr(validate_gpu, "judge", lambda run, folder: (True, "fine"))
    return programs


def named(rows: list[Row]) -> dict[str, Row]:
    return {row.name: row for row in rows}


def test_a_row_that_fails_says_what_it_means_and_the_others_go_on(
    cli: CLIConfig, scripted: dict[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    scripted["tinker_local_backend.check_logprobs"] = (
        "print('FAILED: sampler and trainer disagree'); raise SystemExit(1)"
    )
    scripted["recipes.single_turn"] = "raise RuntimeError('no rewards')"
    with pytest.raises(SystemExit) as exit_info:
        validate_gpu.main(cli)
    assert exit_info.value.code == 1
    shown = capsys.readouterr()
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    rows = {row["name"]: row for row in report["rows"]}
    failed = ["logprobs", "single-turn QA", "single-turn summary"]
    assert report["passed"] is False and [name for name, row in rows.items() if not row["passed"]] == failed
    assert "exit code 1: FAILED: sampler and trainer disagree; see logprobs.log" in rows["logprobs"]["detail"]
    assert "RuntimeError: no rewards" in rows["single-turn QA"]["detail"]
    assert "means: sampler and trainer disagree: do not train" in shown.out
    assert "again: python -m recipes.single_turn task=qa" in shown.out
    assert "FAILED: logprobs, single-turn QA, single-turn summary" in shown.err
    told = rows["files of single-turn QA"]["command"]
    assert told == "python -m recipes.check_artifacts log_path=single-turn_QA", "within the report's folder"
    text = (tmp_path / "report" / "report.md").read_text()
    assert "failed" in text.splitlines()[0] and "- **logprobs**: sampler and trainer disagree" in text


@pytest.mark.slow
def test_a_command_that_hangs_is_ended(cli: CLIConfig, scripted: dict[str, str], tmp_path: Path) -> None:
    scripted["recipes.debate_rs_grpo"] = "import time; time.sleep(600)"
    rows = named(list(checks(chz.replace(cli, minutes=0.02), tmp_path)))
    assert rows["debate, RS to GRPO"].detail == "took longer than minutes=0.02; see debate_RS_to_GRPO.log"


def test_a_folder_that_holds_something_is_not_written_to(tmp_path: Path, scripted: dict[str, str]) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(validate_gpu.ConfigurationError, match="is not empty"):
        validate_gpu.main(CLIConfig(output=str(tmp_path)))


class TestJudge:
    @pytest.fixture
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A run that learned, and an adapter that is not where it began."""
        row = {"step": 0, "optim/grad_norm": 0.5, "train/trained_tokens_sum": 12.0, "train/loss_sum": 0.0}
        (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        (tmp_path / "baseline_000000_g000_00.json").write_text("{}")
        self.change = 1e-3

        async def change(folder: Path) -> float:
            return self.change

        monkeypatch.setattr(validate_gpu, "largest_change", change)
        return tmp_path

    def rewrite(self, folder: Path, **changes: Any) -> None:
        row = json.loads((folder / "metrics.jsonl").read_text())
        (folder / "metrics.jsonl").write_text(json.dumps({**row, **changes}) + "\n")

    def test_a_loss_of_zero_is_no_failure(self, cli: CLIConfig, folder: Path) -> None:
        passed, detail = judge(training_runs(cli)[0], folder)
        assert passed and "12 trained tokens, gradient norm up to 0.5, weights changed by up to 0.001" in detail

    @pytest.mark.parametrize(
        "changes",
        [{"optim/grad_norm": 0.0}, {"optim/grad_norm": None}, {"train/trained_tokens_sum": 0.0}],
        ids=["no gradient", "gradient is NaN", "no token"],
    )
    def test_nothing_learned(self, cli: CLIConfig, folder: Path, changes: dict[str, Any]) -> None:
        self.rewrite(folder, **changes)
        assert not judge(training_runs(cli)[0], folder)[0]

    def test_weights_that_stand_still(self, cli: CLIConfig, folder: Path) -> None:
        self.change = 0.0
        assert not judge(training_runs(cli)[0], folder)[0]

    def test_records_that_are_missing(self, cli: CLIConfig, folder: Path) -> None:
        assert not judge(training_runs(cli)[-1], folder)[0]


class TestDevice:
    def test_torch_without_cuda_beside_an_nvidia_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(validate_gpu, "nvidia_devices", lambda: [Path("/dev/nvidia0")])
        passed, detail = check_device()
        assert not passed and "there is an NVIDIA device, but torch" in detail

    def nvidia_smi(self, folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
        program = folder / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(folder), prepend=":")
        monkeypatch.setattr("recipes.gpu_utilisation.INTERVAL_SECONDS", 0.01)

    def test_a_gpu_that_is_used(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Idle when first asked, busy afterwards; of two GPUs the busier one counts."""
        busy = f'if [ -e {tmp_path}/asked ]; then echo "80, 9000"; else echo "0, 500"; touch {tmp_path}/asked; fi'
        self.nvidia_smi(tmp_path, monkeypatch, f'{busy}; echo "0, 100"')
        with Utilisation(on_gpu=True) as utilisation:
            until(lambda: len(utilisation.percent) >= 3)
        passed, detail = utilisation.verdict()
        assert passed and "80 % at most; memory 600 MiB idle, 9100 MiB at most" in detail

    def test_a_gpu_that_stands_idle(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nvidia_smi(tmp_path, monkeypatch, 'echo "0, 500"')
        with Utilisation(on_gpu=True) as utilisation:
            until(lambda: len(utilisation.percent) >= 2)
        assert not utilisation.verdict()[0]

    def test_an_nvidia_smi_that_does_not_answer(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nvidia_smi(tmp_path, monkeypatch, "exit 9")
        with Utilisation(on_gpu=True) as utilisation:
            pass
        passed, detail = utilisation.verdict()
        assert not passed and "nvidia-smi failed" in detail


def test_the_report_in_the_repository_is_of_these_checks(
    cli: CLIConfig, scripted: dict[str, str], tmp_path: Path
) -> None:
    report = json.loads((ROOT / "benchmarks" / "results" / "validate_gpu_tiny_chat_cpu.json").read_text())
    assert report["passed"] is True
    assert [row["name"] for row in report["rows"]] == [row.name for row in checks(cli, tmp_path)]
