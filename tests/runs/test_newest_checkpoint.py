"""The folder of a run names its newest checkpoint, where a recipe asks for weights to start from or to learn from."""

from pathlib import Path

import pytest

from recipes import rl_basic, sl_basic
from recipes.distillation import off_policy
from tinker_cookbook import cli_utils
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.runs.checkpoints import newest_of_run
from tinker_cookbook.utils.files import write_jsonl


@pytest.fixture
def folder(tmp_path: Path) -> str:
    both = {"state_path": "tinker://r/weights/2", "sampler_path": "tinker://r/sampler_weights/2"}
    rolling = {"name": "rolling", "batch": 3, "state_path": "tinker://r/weights/3"}
    write_jsonl(tmp_path / "checkpoints.jsonl", [{"name": "000002", "batch": 2, **both}, rolling])
    return str(tmp_path)


def test_each_kind_of_weights(folder: str) -> None:
    for config_cls in (sl_basic.CLIConfig, rl_basic.CLIConfig):
        cli = cli_utils.parse(config_cls, [f"load_checkpoint_path={folder}"])
        assert cli.load_checkpoint_path == "tinker://r/weights/3"
    cli = cli_utils.parse(off_policy.CLIConfig, [f"teacher_checkpoint={folder}"])
    assert cli.teacher_checkpoint == "tinker://r/sampler_weights/2"


def test_everything_else_stays_as_it_is(tmp_path: Path) -> None:
    for path in ("tinker://r/weights/3", str(tmp_path), None):
        assert newest_of_run(path, "state_path") == path


def test_a_run_without_one(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "checkpoints.jsonl", [{"name": "rolling", "batch": 3, "state_path": "tinker://r/weights/3"}])
    with pytest.raises(ConfigurationError, match="has no checkpoint with a sampler_path yet"):
        newest_of_run(str(tmp_path), "sampler_path")
