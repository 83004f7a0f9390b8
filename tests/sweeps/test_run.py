"""What must hold when a sweep runs: every point once, whatever fails or is interrupted, and adapters that share a base
model do not influence each other."""

import asyncio
import gc
import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from recipes import sweep
from tests.child import python_path
from tests.killing import untimed_row
from tests.sweeps import toy
from tests.waiting import HANG_SECONDS, until
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.exceptions import ConfigurationError, DataFormatError
from tinker_cookbook.stores.folder import one_writer
from tinker_cookbook.sweeps import Recipe, RunResult, grid, load_recipe, run_sweep
from tinker_cookbook.sweeps.run import STATUS_BASE_NAME
from tinker_cookbook.utils.files import read_jsonl
from tinker_cookbook.utils.interrupts import AFTER_STEP

TOY = Recipe("tests.sweeps.toy", toy.CLIConfig, toy.main)
RATES = grid({"learning_rate": ["1", "2"]})


def starts(folder: Path) -> list[str]:
    return (folder / "starts").read_text().split()


def here(folder: Path, points: Any = RATES, **options: Any) -> list[RunResult]:
    return asyncio.run(run_sweep(TOY, points, folder, processes=0, **options))


class TestResume:
    def test_finished_runs_are_not_run_again_and_new_ones_are(self, tmp_path: Path) -> None:
        first = here(tmp_path)
        again = here(tmp_path, grid({"learning_rate": ["1", "2.0", "3"]}))
        assert [(result.status, result.earlier) for result in first] == [("finished", False)] * 2
        assert [result.earlier for result in again] == [True, True, False]
        assert [result.name for result in again] == ["learning_rate=1.0", "learning_rate=2.0", "learning_rate=3.0"]
        assert starts(tmp_path / "learning_rate=1.0") == ["0"]

    def test_a_failed_run_stops_no_other_and_resumes(self, tmp_path: Path) -> None:
        told: list[RunResult] = []
        failing = here(tmp_path, fixed={"fail_at": "1"}, on_result=told.append)
        assert [result.status for result in failing] == ["failed", "finished"]
        assert failing[0].error == "TrainingError: diverged at learning_rate=1.0"
        assert sorted(told, key=lambda result: result.name) == failing
        (tmp_path / "fixed_now").touch()
        fixed_now = here(tmp_path, fixed={"fail_at": "1"})
        assert [(result.status, result.earlier) for result in fixed_now] == [("finished", False), ("finished", True)]
        assert starts(tmp_path / "learning_rate=1.0") == ["0", "1"]
        assert len(read_jsonl(tmp_path / "learning_rate=1.0" / "metrics.jsonl")) == 3

    def test_a_run_that_was_cut_off_resumes(self, tmp_path: Path) -> None:
        here(tmp_path)
        path = tmp_path / "learning_rate=1.0" / STATUS_BASE_NAME
        path.write_text(json.dumps({**json.loads(path.read_text()), "status": "running"}))
        assert [result.earlier for result in here(tmp_path)] == [False, True]
        assert starts(tmp_path / "learning_rate=1.0") == ["0", "3"]

    def test_another_config_under_the_same_name_is_refused_before_anything_runs(self, tmp_path: Path) -> None:
        begun: list[str] = []
        here(tmp_path, RATES[1:], on_start=lambda: begun.append("first"))
        with pytest.raises(ConfigurationError, match=r"learning_rate=2\.0 under another config \(max_steps=5, was 3\)"):
            here(tmp_path, fixed={"max_steps": "5"}, on_start=lambda: begun.append("refused"))
        with pytest.raises(ConfigurationError, match="learning_rat"):
            here(tmp_path, grid({"learning_rat": ["1"]}), on_start=lambda: begun.append("unknown"))
        assert begun == ["first"]
        assert not (tmp_path / "learning_rate=1.0").exists()

    def test_a_damaged_status_is_named(self, tmp_path: Path) -> None:
        here(tmp_path)
        (tmp_path / "learning_rate=1.0" / STATUS_BASE_NAME).write_text("{}")
        with pytest.raises(DataFormatError, match="lacks name, point or status"):
            here(tmp_path)


class TestRefusals:
    def test_a_bad_point_stops_the_sweep_before_the_good_ones(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match="learning_rate=no"):
            here(tmp_path / "sweep", grid({"learning_rate": ["1", "no"]}))
        assert not (tmp_path / "sweep").exists()

    @pytest.mark.parametrize(
        ("options", "message"), [({"processes": -1}, "processes=-1"), ({"concurrent": 0}, "concurrent=0")]
    )
    def test_bad_numbers_are_named(self, tmp_path: Path, options: dict[str, int], message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            asyncio.run(
                run_sweep(
                    TOY, RATES, tmp_path, processes=options.get("processes", 0), concurrent=options.get("concurrent", 1)
                )
            )

    def test_a_sweep_that_runs_elsewhere_is_left_alone(self, tmp_path: Path) -> None:
        holder = f"process {os.getpid()} on {socket.gethostname()} .* writes to this folder"
        with one_writer(tmp_path, "sweep_dir"), pytest.raises(ConfigurationError, match=holder):
            here(tmp_path)

    def test_a_file_is_no_folder(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(ConfigurationError, match="is a file"):
            here(tmp_path / "file")


class TestProcesses:
    @pytest.mark.slow
    def test_runs_die_alone_and_say_why(self, tmp_path: Path) -> None:
        points = [{"learning_rate": 1.0}, {"learning_rate": 2.0}, {"learning_rate": 3.0, "die": True}]
        results = asyncio.run(run_sweep(TOY, points, tmp_path, fixed={"fail_at": 2.0}, processes=3))
        assert [result.status for result in results] == ["finished", "failed", "failed"]
        assert results[1].error == "exit code 1: diverged at learning_rate=2.0"
        assert results[2].error is not None and results[2].error.startswith("killed by SIGKILL")
        assert "step    2" in (tmp_path / "learning_rate=1.0" / "console.log").read_text()
        again = asyncio.run(run_sweep(TOY, points[:1], tmp_path, fixed={"fail_at": 2.0}, processes=1))
        assert again[0].earlier and starts(tmp_path / "learning_rate=1.0") == ["0"]

    def test_a_killed_sweep_leaves_no_orphan(self, tmp_path: Path) -> None:
        """SIGKILL, which it cannot answer: its run gets SIGTERM then, and ends as by Ctrl-C."""
        script = (
            "import asyncio; from tinker_cookbook.sweeps import run_sweep; "
            f"asyncio.run(run_sweep('tests.sweeps.toy', [{{'learning_rate': 1.0}}], {str(tmp_path)!r}, "
            "fixed={'wait': True}))"
        )
        environment = {**os.environ, "PYTHONPATH": python_path()}
        sweep = subprocess.Popen([sys.executable, "-c", script], env=environment)
        folder = tmp_path / "learning_rate=1.0"
        try:
            until(lambda: (folder / "pid").exists() and (folder / "pid").read_text() != "")
        finally:
            sweep.kill()
            sweep.wait()
        child = int((folder / "pid").read_text())
        until(lambda: not is_running(child))
        assert "interrupted" in (folder / "console.log").read_text()

    def test_a_sweep_that_is_told_to_stop_says_how_to_go_on(self, tmp_path: Path) -> None:
        command = ["recipes.sweep", "recipe=tests.sweeps.toy", "grid.learning_rate=1.0", "set.wait=True"]
        sweep = subprocess.Popen(
            [sys.executable, "-m", *command, f"sweep_dir={tmp_path}"],
            env={**os.environ, "PYTHONPATH": python_path()},
            stderr=subprocess.PIPE,
            text=True,
        )
        folder = tmp_path / "learning_rate=1.0"
        until(lambda: (folder / "pid").exists() and (folder / "pid").read_text() != "")
        child = int((folder / "pid").read_text())
        sweep.terminate()
        _, err = sweep.communicate(timeout=HANG_SECONDS)
        assert sweep.returncode == 143
        assert f"SIGTERM: {AFTER_STEP}" in err and "\ninterrupted. " in err
        assert err.endswith(f"{shlex.join(command[2:])} sweep_dir={tmp_path}\n"), err
        until(lambda: not is_running(child))


@pytest.mark.parametrize(
    ("module", "keys"),
    [
        pytest.param(
            "recipes.sl_loop", {"num_epochs": 1, "batch_size": 64, "lora_rank": 2}, marks=pytest.mark.slow, id="sl_loop"
        ),
        ("recipes.rl_loop", {"max_steps": 1, "groups_per_batch": 2, "group_size": 2, "max_tokens": 4, "lora_rank": 2}),
    ],
)
def test_the_plain_loops_can_be_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, keys: Any) -> None:
    monkeypatch.setenv("TINKER_LOCAL_HOME", str(tmp_path / "home"))
    points = grid({"learning_rate": [1e-3], "seed": [0, 1]})
    for earlier in (False, True):
        results = asyncio.run(run_sweep(module, points, tmp_path / "sweep", fixed=keys, processes=0))
        assert [(result.status, result.earlier) for result in results] == [("finished", earlier)] * 2, results


def is_running(pid: int) -> bool:
    """A process that has ended, and that only waits for its parent to ask, is not."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


class TestCommand:
    def test_it_ranks_and_reports_and_fails_if_a_run_did(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        argv = [
            "recipe=tests.sweeps.toy",
            "grid={'learning_rate': '1,2,3'}",
            "seeds=0,1",
            "set={'fail_at': '3'}",
            "processes=0",
            "metric=score",
            "mode=max",
            f"sweep_dir={tmp_path}",
        ]
        with pytest.raises(SystemExit) as exit_code:
            run_recipe(sweep.CLIConfig, sweep.main, argv=argv)
        shown = capsys.readouterr()
        assert exit_code.value.code == 1
        assert "2 of 6 runs failed" in shown.err and "diverged at learning_rate=3.0" in shown.out
        summary = json.loads((tmp_path / "summary.json").read_text())
        assert [(entry["setting"], entry["mean"], entry["seeds"]) for entry in summary["ranking"]] == [
            ({"learning_rate": 2.0}, 6.5, 2),
            ({"learning_rate": 1.0}, 3.5, 2),
        ]
        assert {path.name for path in tmp_path.iterdir()} >= {
            "sweep.csv",
            "sweep.parquet",
            "summary.json",
            "summary.md",
        }

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            (["recipe=tests.sweeps.toy"], "nothing to sweep over"),
            (["seeds=0,1"], "recipe: say which recipe"),
            (["recipe=tests.sweeps.toy", "seeds=0", "grid={'seed': '1'}"], "say the same thing"),
            (["recipe=tests.sweeps.toy", "seeds=0", "metric=score"], "mode=max or mode=min"),
            (["recipe=tests.sweeps.toy", "seeds=0", "value=mean:0"], "mean:N"),
            (["recipe=tests.sweeps.toy", "grid={'learning_rat': '1'}"], "did you mean learning_rate"),
        ],
    )
    def test_mistakes_are_told_before_anything_runs(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
    ) -> None:
        with pytest.raises(SystemExit) as exit_code:
            run_recipe(sweep.CLIConfig, sweep.main, argv=[*argv, f"sweep_dir={tmp_path / 'sweep'}"])
        assert exit_code.value.code == 2 and message in capsys.readouterr().err
        assert not (tmp_path / "sweep").exists()


class TestSharedBase:
    SMALL: ClassVar[dict[str, Any]] = {
        "groups_per_batch": 2,
        "group_size": 4,
        "max_steps": 2,
        "num_test": 4,
        "max_tokens": 12,
        "lora_rank": 4,
        "eval_every": 2,
        "save_every": 0,
        "on_zero_advantages": "skip",
    }

    @pytest.mark.slow
    def test_adapters_on_one_base_model_learn_as_if_alone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from tinker_local_backend.engine.model.base_model import BaseModel

        monkeypatch.delenv("TINKER_BACKEND", raising=False)
        monkeypatch.setenv("TINKER_LOCAL_HOME", str(tmp_path / "home"))
        loaded: list[str] = []

        original = BaseModel.__init__

        def counted(model: BaseModel, name: str, *args: Any) -> None:
            loaded.append(name)
            original(model, name, *args)

        monkeypatch.setattr(BaseModel, "__init__", counted)
        recipe = load_recipe("recipes.rl_basic")
        points = grid({"learning_rate": [1e-4, 1e-2], "seed": [1, 2]})

        def run(folder: str, chosen: Any, concurrent: int) -> list[RunResult]:
            return asyncio.run(
                run_sweep(recipe, chosen, tmp_path / folder, fixed=self.SMALL, processes=0, concurrent=concurrent)
            )

        together = run("together", points, 4)
        assert all(result.status == "finished" for result in together) and len(loaded) == 1
        gc.collect()  # lets go of the engine, so that the next one starts from nothing
        one_by_one = run("one_by_one", points, 1)
        assert len(loaded) == 2
        for a, b in zip(together, one_by_one, strict=True):
            mine, theirs = (read_jsonl(Path(result.log_path) / "metrics.jsonl") for result in (a, b))
            assert any(row.get("groups/trained", 0) > 0 for row in mine)
            assert len(mine) == len(theirs) == 3
            for row, other in zip(mine, theirs, strict=True):
                # How much of a prompt the engine had read before depends on what else runs on it: counts and costs of
                # cached and uncached prompt tokens are no part of the promise.
                untimed = {key: v for key, v in untimed_row(row).items() if "cached" not in key and "cost" not in key}
                assert untimed == pytest.approx({key: other[key] for key in untimed}, rel=1e-4, abs=1e-6)
        first, last = (read_jsonl(Path(together[i].log_path) / "metrics.jsonl") for i in (0, 2))
        assert first[1]["optim/entropy"] != last[1]["optim/entropy"]  # the learning rates did differ

    def test_wandb_needs_a_process_per_run(self, tmp_path: Path) -> None:
        recipe = load_recipe("recipes.rl_basic")
        with pytest.raises(ConfigurationError, match="wandb_project"):
            asyncio.run(run_sweep(recipe, [{"seed": 0}], tmp_path, fixed={"wandb_project": "p"}, processes=0))
