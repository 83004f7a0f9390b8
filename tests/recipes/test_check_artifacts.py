"""A run's folder passes every check, and each kind of damage is named by the check that looks for it."""

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet
import pytest

from recipes import check_artifacts, debate_rs_grpo
from recipes.check_artifacts import CLIConfig, Run, checks, problems
from tests.fakes import FakeServiceClient
from tests.rl.loop import NumberDatasetBuilder, make_config
from tinker_cookbook import backends
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.debate.judges import JudgeConfig
from tinker_cookbook.rl import train
from tinker_cookbook.stores.rollouts import FILE_NAME


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of debates on the tiny model, in which the first groups alone have JSON files."""
    folder = tmp_path_factory.mktemp("artifacts")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("TINKER_LOCAL_HOME", str(folder / "home"))
        cli = debate_rs_grpo.CLIConfig(
            judge=JudgeConfig(name="scripted:longer"), debate_train="rejection", num_rollouts=12, num_groups=3, max_steps=2,
            eval_every=0, max_tokens=32, lora_rank=4, num_groups_to_log=2, log_path=str(folder / "run"),
        )  # fmt: skip
        asyncio.run(train.main(debate_rs_grpo.build_config(cli)))
    return folder / "run"


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def found(folder: Path) -> dict[str, list[str]]:
    run = Run(folder)
    return {name: wrong for name, check in checks(run).items() if (wrong := problems(check, run))}


def test_a_whole_run_passes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert found(folder) == {}
    assert len(checks(Run(folder))) == 9
    run_recipe(CLIConfig, check_artifacts.main, argv=[f"log_path={folder}"])
    shown = capsys.readouterr().out
    assert shown.count("│ pass") == 9 and "│ fail" not in shown
    names = sorted(path.name for path in folder.glob("debate_000001_*.json"))
    assert names == [f"debate_000001_g00{group}_0{i}.json" for group in (0, 1) for i in (0, 1)]


def rewrite(path: Path, change: Callable[[dict], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def drop_a_turn(folder: Path) -> None:
    path = folder / "iteration_000001" / FILE_NAME
    table = pyarrow.parquet.read_table(path)
    pyarrow.parquet.write_table(table.slice(0, table.num_rows - 1), path)


def without_column(folder: Path, name: str) -> None:
    path = folder / "iteration_000001" / FILE_NAME
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(path).drop_columns([name]), path)


def of_row(folder: Path, line: int, **values: object) -> None:
    path = folder / "metrics.jsonl"
    rows = [json.loads(text) for text in path.read_text().splitlines()]
    rows[line] |= values
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


STEP = "training_step_0001.json"


@pytest.mark.parametrize(
    ("damage", "check", "told"),
    [
        (lambda run: (run / "run_metadata.json").unlink(), "metadata", "run_metadata.json"),
        (lambda run: of_row(run, 1, step=2), "metrics", "some are missing"),
        (lambda run: of_row(run, 0, **{"groups/trained": 99}), "metrics", "3 groups were sampled"),
        (lambda run: of_row(run, 0, **{"optim/grad_norm": 0.0}), "learning signal", "step 0: the gradient is 0.0"),
        (lambda run: (run / "checkpoints.jsonl").unlink(), "checkpoints", "no checkpoint"),
        (lambda run: (run / "iteration_000001" / FILE_NAME).unlink(), "every rollout", FILE_NAME),
        (lambda run: (run / "iteration_000001" / FILE_NAME).write_bytes(b"PAR1"), "every rollout", "cannot be read"),
        (drop_a_turn, "every rollout", "step 1: rollouts.parquet gives env/all/total_turns="),
        (lambda run: (run / STEP).unlink(), "training steps", "training_step_0001.json"),
        (lambda run: rewrite(run / STEP, lambda step: step["training_data"][0]["completion_logprobs"].pop()),
         "training steps", "training_step_0001.json: datum 0 has lists of"),
        (lambda run: rewrite(run / STEP, lambda step: step["results"].update(num_trained_tokens=0)),
         "training steps", "0 trained tokens"),
        (lambda run: (run / "metrics.jsonl").unlink(), "metrics", "no step that sampled"),
        (lambda run: without_column(run, "verdict"), "every rollout", "rollouts.parquet: has no column verdict"),
        (lambda run: (run / "debate_000001_g001_01.json").unlink(),
         "records of groups", "step 1: no debate_000001_g001_01.json"),
        (lambda run: (run / "debate_000001_g000_00.json").write_text("{"),
         "records of groups", "debate_000001_g000_00.json: not valid JSON"),
        (lambda run: (run / "iteration_000000" / "train.html").unlink(), "transcripts", "step 0: no train.html"),
    ],
)  # fmt: skip
def test_damage_is_named(folder: Path, damage: Callable[[Path], object], check: str, told: str) -> None:
    damage(folder)
    wrong = found(folder)
    assert check in wrong and any(told in problem for problem in wrong[check]), wrong


def test_a_failed_check_is_exit_code_1(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in folder.rglob(FILE_NAME):
        path.unlink()
    with pytest.raises(SystemExit) as raised:
        run_recipe(CLIConfig, check_artifacts.main, argv=[f"log_path={folder}"])
    assert raised.value.code == 1 and "│ fail" in capsys.readouterr().out


def test_what_the_config_leaves_out_is_not_asked_for(folder: Path) -> None:
    rewrite(folder / "config.json", lambda config: config.update(write_records=False, num_groups_to_log=0))
    assert [*checks(Run(folder))] == ["metadata", "resumes", "metrics", "learning signal", "checkpoints"]


def test_a_folder_is_checked_for_what_its_version_had(folder: Path) -> None:
    rewrite(folder / "run_metadata.json", lambda metadata: metadata.update(resumed=[{"changed": {}}]))
    assert found(folder) == {"resumes": ["run_metadata.json: entry 0 of resumed has no argv, versions, added, removed"]}
    rewrite(folder / "run_metadata.json", lambda metadata: metadata.pop("folder_version"))
    assert found(folder) == {}
    rewrite(folder / "run_metadata.json", lambda metadata: metadata.update(folder_version=99))
    assert "folder_version 99 is from later code" in found(folder)["metadata"][0]


def test_a_folder_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path / "no", tmp_path):
        with pytest.raises(SystemExit) as raised:
            run_recipe(CLIConfig, check_artifacts.main, argv=[f"log_path={path}"])
        assert raised.value.code == 2 and "not the folder of a run" in capsys.readouterr().err


def test_an_environment_of_ones_own_may_write_no_records_of_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "create_service_client", lambda *_: FakeServiceClient())
    asyncio.run(train.main(make_config(tmp_path, NumberDatasetBuilder(batches=2), write_records=True)))
    assert not [*tmp_path.rglob("*_g000_00.json")] and "records of groups" in checks(Run(tmp_path))
    assert found(tmp_path) == {}
