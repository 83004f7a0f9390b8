"""Experiment files: what their tables mean, what of them is refused, and that keys of the service are written nowhere."""

import asyncio
import json
import os
import re
from contextlib import suppress
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from recipes import run_experiment
from recipes.common import for_model
from recipes.rl_common import chosen_advantage
from recipes.run_experiment import CLIConfig
from recipes.warm_up import BATCH_SIZE, FORM_STEPS, given_conversations
from tests.pages import ROOT
from tinker_cookbook import cli_utils
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.env.contract_dataset import LoadedEnvironment
from tinker_cookbook.env.dataset import DatasetBuilder
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl.advantages import AdvantageConfig
from tinker_cookbook.rl.interleaved import InterleavedRLDatasetBuilder
from tinker_cookbook.runs.ml_log import read_metrics
from tinker_cookbook.runs.reward_list import RewardListLogger

SUMS = ROOT / "example_data" / "environments" / "sums"
ENV = f'[env]\nid = "{SUMS}"\n'


def write(folder: Path, text: str) -> str:
    path = folder / "experiment.toml"
    path.write_text(text)
    return str(path)


def parse(path: str, *arguments: str) -> CLIConfig:
    return cli_utils.parse(CLIConfig, [path, *arguments])


def test_every_table_reaches_the_run(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        f"""
[[envs]]
name = "small"
id = "{SUMS}"
weight = 3
[envs.args]
highest = 4
[[envs]]
id = "kuhn_poker"
[trainer]
loss_fn = "ppo"
num_rollouts = 32
group_size = 8
preset = "dapo"
[trainer.async_config]
max_steps_off_policy = 2
[trainer.args]
max_new_tokens = 17
output_dir = "somewhere"
[model]
base_model = "tiny_debate"
lora_rank = 4
[tinker]
backend = "local"
""",
    )
    cli = parse(path)
    assert [(entry.name, entry.weight, entry.args) for entry in cli.envs] == [
        ("small", 3, {"highest": 4}),
        (None, 1, {}),
    ]
    assert (cli.loss_fn, cli.max_tokens, cli.log_path, cli.model_name) == ("ppo", 17, "somewhere", "tiny_debate")
    assert cli.async_config is not None and cli.async_config.max_steps_off_policy == 2
    assert chosen_advantage(cli, AdvantageConfig()) == AdvantageConfig(baseline="zscore", scale="token")
    assert chosen_advantage(parse(write(tmp_path, ENV)), AdvantageConfig()) == AdvantageConfig()
    builder = run_experiment.make_dataset_builder(for_model(cli))
    assert isinstance(builder, InterleavedRLDatasetBuilder) and builder.weights == [3, 1]
    assert builder.groups_per_batch == 4
    training, test = asyncio.run(builder())
    tags = [group.logging_tags() for group in training.get_batch(0)]
    assert sorted(tags) == [["KuhnPoker"], ["small"], ["small"], ["small"]] and test is not None


def test_the_command_line_comes_last(tmp_path: Path) -> None:
    path = write(tmp_path, ENV + "[env.args]\nhighest = 4\n[trainer]\nmax_steps = 3\n[model]\nlora_rank = 4\n")
    cli = parse(
        path, "trainer.max_steps=5", "env.args.highest=6", "model.base_model=tiny_debate", "seed=9", "output_dir=o"
    )
    assert (cli.max_steps, cli.lora_rank, cli.seed, cli.model_name, cli.log_path) == (5, 4, 9, "tiny_debate", "o")
    builder = run_experiment.make_dataset_builder(for_model(cli))
    assert isinstance(builder, DatasetBuilder) and isinstance(builder.env, LoadedEnvironment)
    assert builder.env.args == {"highest": 6}
    assert parse(path).metrics_json and run_experiment.folder_of(parse(path)) == "outputs/experiment"
    assert run_experiment.folder_of(parse(path, "name=again")) == "outputs/experiment_again"
    assert run_experiment.folder_of(parse(path, "output_dir=o", "name=again")) == "o"
    assert parse(path, "trainer.args.max_new_tokens=9", "--max_steps=2").max_steps == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ENV + "[trainer]\nmax_step = 3", r"\[trainer\] has no key max_step; did you mean max_steps\?"),
        (ENV + "[trainer.args]\nmax_new_token = 3", "did you mean max_new_tokens"),
        (ENV + "[trainer]\nseed = 3\n[trainer.args]\nseed = 3", r"seed is in \[trainer\] and in \[trainer.args\]"),
        (ENV + "[trainer]\nmax_tokens = 3\nmax_new_tokens = 4", "max_tokens is given twice"),
        (ENV + "[trainer.async_config]\nmax_steps_of_policy = 3", "max_steps_off_policy"),
        (ENV + "[models]\nbase_model = 3", r"there is no table \[models\]; did you mean model\?"),
        (ENV + "[model]\nbase = 3", r"\[model\] has no key base; did you mean base_model\?"),
        (ENV + "[tinker]\napi_key_enw = 'A'", "did you mean api_key_env"),
        (ENV + "ID = 3", r"\[env\] has no key ID"),
        (ENV + f"[[envs]]\nid = '{SUMS}'", r"has both \[env\] and \[\[envs\]\]"),
        ("[trainer]\nseed = 1", r"has no \[env\]"),
        ("[env]\nweight = 1", r"\[env\] needs id"),
        ("envs = 3", r"write \[\[envs\]\] above each environment"),
        ("[env", "experiment.toml: Expected"),
        (ENV + "[trainer]\nmax_steps = 0", "max_steps: must be greater than 0"),
        (ENV + "weight = -1", rf"the weight of {SUMS} is -1: it must be greater than 0, or 0 for"),
        (ENV.replace("[env]", "[[envs]]") + "name = 'small'\nweight = -0.5", "the weight of small is -0.5: it must be"),
        (ENV + "weight = 0", "env.weight=0: nothing would train; give one a weight"),
        (ENV + "[trainer]\ngroup_size = 3\nrollouts_per_example = 4", "group_size is given twice"),
        (ENV + "[trainer]\nmax_steps = 'three'", "max_steps"),
    ],
)
def test_what_is_not_known_is_named(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run_recipe(CLIConfig, run_experiment.main, [write(tmp_path, text)], prog="run")
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert re.search(message, error), error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["num_rollouts=30"], "num_rollouts=30: must be a multiple of group_size=8, such as 32"),
        (["env.id=no_such_env"], "env='no_such_env' is unknown; use"),
        (["env.args.lowest=3"], "unexpected keyword argument 'lowest'; it takes env.args.highest"),
        (["tinker.api_key=abc", "tinker.api_key_env=KEY"], "are both set"),
        (
            ["tinker.backend=tinker", "tinker.api_key_env=NO_SUCH_KEY"],
            "api_key_env=NO_SUCH_KEY: this variable is not set",
        ),
    ],
)
def test_what_cannot_be_is_said_before_anything_loads(arguments: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=message):
        asyncio.run(run_experiment.main(parse(write(tmp_path, ENV), *arguments)))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nothing.toml.*No such file"):
        parse(str(tmp_path / "nothing.toml"))
    with pytest.raises(ConfigurationError, match="there is no environment"):
        run_experiment.make_dataset_builder(for_model(cli_utils.parse(CLIConfig, [])))


def test_an_environment_beside_the_file_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "near_env").mkdir()
    (tmp_path / "near_env" / "__init__.py").write_text((SUMS / "__init__.py").read_text())
    monkeypatch.chdir(tmp_path.parent)
    cli = parse(write(tmp_path, '[env]\nid = "./near_env"'))
    builder = run_experiment.make_dataset_builder(for_model(cli))
    assert isinstance(builder, DatasetBuilder) and isinstance(builder.env, LoadedEnvironment)
    assert builder.env.name == "near_env"


@pytest.mark.parametrize("where", ["file", "argument", "variable"])
def test_a_run_never_writes_its_key(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "tml-not-for-any-file-0123"
    monkeypatch.setenv("TINKER_API_KEY", "before")
    monkeypatch.setenv("MY_OWN_NAME", secret)
    monkeypatch.chdir(tmp_path)
    table = {"file": f'api_key = "{secret}"', "variable": 'api_key_env = "MY_OWN_NAME"'}.get(where, "")
    path = write(tmp_path, f"{ENV}[tinker]\n{table}\n")
    small = ["max_steps=1", "num_test=2", "lora_rank=2", "groups_per_batch=2", "backend=local"]
    given = [f"tinker.api_key={secret}"] if where == "argument" else []
    monkeypatch.setattr("sys.argv", ["run_experiment", path, *small, *given])
    try:
        run_recipe(CLIConfig, run_experiment.main)
        assert os.environ["TINKER_API_KEY"] == secret
    finally:
        monkeypatch.delenv("TINKER_API_KEY", raising=False)
    folder = tmp_path / "outputs" / "experiment"
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert {"metrics.json", "metrics.jsonl", "config.json", "run_metadata.json"} <= {file.name for file in files}
    assert [file for file in files if secret.encode() in file.read_bytes()] == []
    listed: list[dict[str, Any]] = json.loads((folder / "metrics.json").read_text())
    (row, last) = read_metrics(folder)
    assert listed[0]["reward"] == row["env/all/reward/total"] and listed[0]["stage"] == "train"
    assert listed[-1] == {"step": 1, "stage": "final", "test_reward": last["test/env/all/reward/total"]}


def test_the_list_goes_on_where_a_resumed_run_does(tmp_path: Path) -> None:
    first = RewardListLogger(tmp_path)
    for step in range(3):
        first.log_metrics({"env/all/reward/total": float(step), "env/sums/reward/total": 1.0, "other": 3}, step)
    RewardListLogger(tmp_path).log_metrics({"env/all/reward/total": 9.0}, 1)
    rows = json.loads((tmp_path / "metrics.json").read_text())
    assert rows[0] == {"step": 0, "stage": "train", "reward": 0.0, "reward/sums": 1.0}
    assert rows[1:] == [{"step": 1, "stage": "train", "reward": 9.0}]


SHIPPED = sorted((ROOT / "configs").glob("*.toml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_files_are_understood(path: Path) -> None:
    assert parse(str(path)).envs[0].id


FORMS = ROOT / "example_data" / "minds" / "forms" / "ghost_trace.jsonl"


def test_a_supervised_stage_has_a_table_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "forms.jsonl").write_text(FORMS.read_text())
    path = write(tmp_path, ENV + '[warm_up]\ndata = "forms.jsonl"\n')
    cli = for_model(parse(path, "warm_up.steps=20"))
    first = given_conversations(cli)
    assert cli.warm_up_data == str(tmp_path / "forms.jsonl") and len(first) == 20 * BATCH_SIZE
    said = [str(conversation) for conversation in first]
    assert len(set(said[:256])) == len(set(said)) > 200 and said[:64] != said[256:320]
    assert (
        given_conversations(cli) == first != given_conversations(for_model(parse(path, "warm_up.steps=20", "seed=1")))
    )
    assert len(given_conversations(for_model(parse(path)))) == FORM_STEPS * BATCH_SIZE
    assert given_conversations(for_model(parse(path, "model.load_checkpoint_path=tinker://a/weights/b"))) == []
    assert given_conversations(for_model(parse(write(tmp_path, ENV)))) == []


@pytest.mark.parametrize(
    "path", [path for path in SHIPPED if "[warm_up]" in path.read_text()], ids=lambda path: path.stem
)
def test_only_the_shipped_models_learn_the_form_of_a_shipped_file(path: Path, tmp_path: Path) -> None:
    own = 96 if path.stem == "gradient_intuition" else FORM_STEPS
    assert len(given_conversations(for_model(parse(str(path))))) == own * BATCH_SIZE
    folder = copytree(ROOT / "example_data" / "tiny_chat", tmp_path / "other")
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"tiny_model": true', '"tiny_model": false'))
    other = f"model.base_model={folder}"
    assert given_conversations(for_model(parse(str(path), other))) == []
    assert len(given_conversations(for_model(parse(str(path), other, "warm_up.steps=3")))) == 3 * BATCH_SIZE


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("warm_up.data=nothing.jsonl", r"nothing\.jsonl"),
        ("warm_up.steps=3", "warm_up_steps=3: there is nothing to learn from"),
        ("warm_up.steps=-1", "warm_up_steps=-1: must be 0"),
        ("warm_up.tiny_steps=-1", "warm_up_tiny_steps=-1: must be 0"),
    ],
)
def test_a_stage_without_its_file_is_refused(argument: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=message):
        given_conversations(for_model(parse(write(tmp_path, ENV), argument)))


def test_an_argument_that_is_a_table_stays_one(tmp_path: Path) -> None:
    env = '[env]\nid = "gradient_intuition"\n[env.args]\nalpha = 0.5\ninner_args = { highest = 9, operations = "+" }\n'
    (entry,) = parse(write(tmp_path, env), "env.args.alpha=0.25").envs
    assert entry.args == {"alpha": 0.25, "inner_args": {"highest": 9, "operations": "+"}}


@pytest.mark.slow
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_file_runs_from_anywhere_with_its_stage(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["steps=1", "num_rollouts=16", "num_test=2", "on_zero_advantages=skip", "lora_rank=4"]
    has_stage = "[warm_up]" in path.read_text()
    stage = ["warm_up.steps=2"] if has_stage else []
    # A policy that has hardly seen the form may train nothing in one step, which is an error.
    with suppress(SystemExit):
        run_recipe(CLIConfig, run_experiment.main, [str(path), *small, *stage], prog="run")
    outputs = tmp_path / "outputs" / path.stem
    assert json.loads((outputs / "metrics.json").read_text())[0]["stage"] == "train"
    assert (outputs / "warm_up" / "metrics.jsonl").exists() == has_stage
    if has_stage:
        assert len((outputs / "warm_up.jsonl").read_text().splitlines()) == 2 * BATCH_SIZE
        config = json.loads((outputs / "config.json").read_text())
        assert str(config["load_checkpoint_path"]).startswith("tinker://")
