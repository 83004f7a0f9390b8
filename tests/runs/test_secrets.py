"""A planted secret reaches no file of a run: not by the environment, the command line, the config, a log line or an error."""

import asyncio
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import chz
import pytest

from tests.child import python_path
from tests.fakes import FakeServiceClient, FakeTokenizer, said
from tests.rl.handmade import trajectory, turn
from tests.rl.loop import NumberEnv, NumberGroup, make_config
from tests.sweeps import toy
from tinker_cookbook import backends
from tinker_cookbook.capture import CaptureExporter, JsonlFileSink
from tinker_cookbook.rl import train
from tinker_cookbook.rl.rollout_files import StepRollouts
from tinker_cookbook.rl.rollout_strategy import MinViableGroup
from tinker_cookbook.rl.transcripts import rollout_rows
from tinker_cookbook.rl.types import Action, ActionExtra, StepResult, TrajectoryGroup
from tinker_cookbook.runs import metadata
from tinker_cookbook.runs.bootstrap import open_run
from tinker_cookbook.stores import LocalStorage, TrainingRunStore
from tinker_cookbook.stores.rollouts import FILE_NAME, read_rollouts
from tinker_cookbook.sweeps import Recipe, run_sweep
from tinker_cookbook.utils import logtree, trace
from tinker_cookbook.utils.files import read_jsonl
from tinker_cookbook.utils.secrets import HIDDEN, redact, redact_code, redactor

PLANTED = ("tml-planted-key-0123456789", "hf_planted-token-9876543210", "planted-pass", "sk-of-a-field-of-the-config")
KEY, TOKEN, PASSWORD, FIELD = PLANTED
ADDRESS = f"https://me:{PASSWORD}@server:8000/v1"


@chz.chz(typecheck=True)
class Config:
    base_url: str = ADDRESS
    note: str = f"made with {KEY}"
    address: str = f"https://server/?api_key={PASSWORD}&page=2"
    judge_api_key: str = FIELD
    api_key_variable: str = "TINKER_API_KEY"


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("TINKER_BASE_URL", ADDRESS)
    monkeypatch.setattr(sys, "argv", ["recipe", f"base_url={ADDRESS}", f"name={TOKEN}", f"env.judge_api_key={FIELD}"])
    # Not the state of this repository: a change of this file tells all of them.
    monkeypatch.setattr(metadata, "code_state", lambda modules: f'+judge_api_key: str = "{FIELD}"  # or {KEY}\n')


def files_with_secrets(folder: Path) -> dict[str, list[str]]:
    texts = {path: _text_of(path) for path in folder.rglob("*") if path.is_file()}
    found = {str(path): [secret for secret in PLANTED if secret in text] for path, text in texts.items()}
    return {path: secrets for path, secrets in found.items() if secrets}


def _text_of(path: Path) -> str:
    return str(read_rollouts(path)) if path.name == FILE_NAME else path.read_bytes().decode(errors="replace")


def test_of_a_run_that_fails(tmp_path: Path) -> None:
    for start in range(2):  # a resumed run adds to the metadata
        run = open_run(tmp_path, config=Config(), recipe_name="x", extra={"engine": {"url": ADDRESS}})
        with pytest.raises(ConnectionError), run:
            logging.getLogger("somewhere").warning("the header was %s, start %d", {"Authorization": KEY}, start)
            raise ConnectionError(f"401 from {ADDRESS}: the key {KEY} is not known")
    assert files_with_secrets(tmp_path) == {}
    log = (tmp_path / "logs.log").read_text()
    assert f"401 from https://{HIDDEN}@server:8000/v1: the key {HIDDEN} is not known" in log
    metadata = (tmp_path / "run_metadata.json").read_text()
    assert '"TINKER_API_KEY": "<set>"' in metadata and f"https://{HIDDEN}@server" in metadata
    config = (tmp_path / "config.json").read_text()
    assert "&page=2" in config and '"api_key_variable": "TINKER_API_KEY"' in config


class LeakyEnv(NumberEnv):
    """Tells the key in what it logs and writes for people; the last of a group in an error."""

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        logtree.log_text(f"asked with {KEY}")
        with trace.scope_span_sync(f"asking {ADDRESS}"):
            trace.update_scope_context({"header": f"Bearer {KEY}"})
        if self.prompt.to_ints()[1] == 3:
            raise ConnectionError(f"401 from {ADDRESS}: the key {KEY} is not known; api_key={FIELD}")
        return replace(await super().step(action, extra=extra), logs={"header": f"Bearer {KEY}"})


class LeakyGroup(NumberGroup):
    async def make_envs(self) -> list[LeakyEnv]:
        return [LeakyEnv([self.group, i, self.batch], self.constant) for i in range(self.members)]


def test_of_rollouts_whose_environment_tells_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "create_service_client", lambda *_: FakeServiceClient())
    monkeypatch.setattr("tests.rl.loop.NumberGroup", LeakyGroup)
    keys: dict[str, Any] = {"backend": "local", "num_groups_to_log": 9, "on_zero_advantages": "skip"}
    keys |= {"write_records": True, "rollout_json_export": True, "enable_trace": True, "span_chart_every": 1}
    for name, least in (("kept", 3), ("given up", 4)):
        strategy = MinViableGroup(min_successful=least, max_retries=0)
        config = make_config(tmp_path / name, rollout_error_tolerance=strategy, max_steps=1, **keys)
        asyncio.run(train.main(config))
    assert len([*tmp_path.rglob("*.html"), *tmp_path.rglob("rollouts.parquet")]) == 6
    assert files_with_secrets(tmp_path) == {}
    _, turns = read_rollouts(tmp_path / "kept" / "iteration_000000" / "rollouts.parquet")
    assert turns[0]["logs"] == {"header": f"Bearer {HIDDEN}"}
    summaries = read_jsonl(tmp_path / "kept" / "iteration_000000" / "train_rollout_summaries.jsonl")
    assert summaries[0]["steps"][0]["logs"] == {"header": f"Bearer {HIDDEN}"}
    assert (tmp_path / "kept" / "code.diff").read_text() == f'+judge_api_key: str = "{HIDDEN}"  # or {HIDDEN}\n'
    (spans,) = read_jsonl(tmp_path / "kept" / "timing_spans.jsonl")
    assert f"asking https://{HIDDEN}@server:8000/v1" in {span["name"] for span in spans["spans"]}
    page = (tmp_path / "kept" / "iteration_000000" / "train_logtree.json").read_text()
    assert f"asked with {HIDDEN}" in page and f"the key {HIDDEN} is not known; api_key={HIDDEN}" in page


def test_of_calls_that_are_captured(tmp_path: Path) -> None:
    exporter = CaptureExporter(JsonlFileSink(LocalStorage(tmp_path)))
    about = {"scope": {"judge": ADDRESS}, "prompt_tokens": [5, 6]}
    exporter.enqueue({"kind": "sample", **about, "error": f"ConnectionError('401: the key {KEY} is not known')"})
    exporter.shutdown()
    assert files_with_secrets(tmp_path) == {}
    (row,) = read_jsonl(tmp_path / "capture" / "sample.jsonl")
    assert row["error"] == f"ConnectionError('401: the key {HIDDEN} is not known')" and row["prompt_tokens"] == [5, 6]


def test_of_what_scripts_write_into_a_store(tmp_path: Path) -> None:
    store = TrainingRunStore(LocalStorage(tmp_path))
    store.write_rollouts(0, [{"steps": [{"logs": {"header": KEY}}]}])
    store.write_logtree(0, {"title": f"asked with {KEY}"})
    store.write_timing_spans(0, [{"name": f"asking {ADDRESS}", "duration": 1.0}])
    store.write_code_diff(f"+TINKER_API_KEY = '{FIELD}'\n")
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 4 and files_with_secrets(tmp_path) == {}


@pytest.mark.parametrize(
    "code", ['api_key = os.environ["JUDGE"]', 'api_key="$KEY"', 'max_tokens: int = "8"', 'api_key: str = "<your key>"']
)
def test_code_without_a_secret_stays(code: str) -> None:
    assert redact_code(code) == code


def test_of_the_table_that_trackers_get() -> None:
    group = TrajectoryGroup(
        [trajectory(turn([50], said([51])))], [1.0], [{}], member_info_G=[{"judge": f"401: the key {KEY}"}]
    )
    (row,) = rollout_rows(StepRollouts([group], [0], [[0.5]]), FakeTokenizer())  # pyright: ignore[reportArgumentType]
    assert row["judge"] == f"401: the key {HIDDEN}" and row["said"] == "3"


@pytest.mark.parametrize("error", ["RuntimeError", "TrainingError"])
def test_of_the_traceback_of_a_command(error: str) -> None:
    script = (
        "import os, chz\n"
        "from tinker_cookbook.cli_utils import run_recipe\n"
        "from tinker_cookbook.exceptions import TrainingError\n"
        "CLIConfig = chz.chz(type('CLIConfig', (), {}))\n"
        "def main(config):\n"
        f"    raise {error}('401: the key ' + os.environ['TINKER_API_KEY'])\n"
        "run_recipe(CLIConfig, main, argv=[])\n"
    )
    environment = {**os.environ, "PYTHONPATH": python_path(), "TINKER_COOKBOOK_TRACEBACK": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and KEY not in done.stderr
    assert "Traceback" in done.stderr and f"{error}: 401: the key {HIDDEN}" in done.stderr


def test_of_a_sweep_which_goes_on_all_the_same(tmp_path: Path) -> None:
    recipe = Recipe("tests.sweeps.toy", toy.CLIConfig, toy.main)
    points: list[dict[str, Any]] = [{"learning_rate": 1.0}]
    for earlier in (False, True):
        (result,) = asyncio.run(run_sweep(recipe, points, tmp_path, fixed={"text": f"key {KEY}"}, processes=0))
        assert (result.status, result.earlier) == ("finished", earlier)
    assert files_with_secrets(tmp_path) == {}


def test_of_a_sweep_whose_run_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def fail(config: Any) -> None:
        raise ConnectionError(f"the key {KEY} is not known")

    recipe = Recipe("tests.sweeps.toy", toy.CLIConfig, fail)
    (result,) = asyncio.run(run_sweep(recipe, [{"learning_rate": 1.0}], tmp_path, processes=0))
    assert result.error == f"ConnectionError: the key {HIDDEN} is not known"
    assert "Traceback" in (told := capsys.readouterr().err) and KEY not in told


def test_what_only_looks_like_one_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    monkeypatch.setenv("MAX_TOKENS_PER_DAY", "123456789")
    text = "true tokens: 123456789, tinker://run/weights/a, max_tokens=3, user@host, api_key=None, eos_token=<|im_end|>"
    assert redact(text) == text
    game = {"secret": "7", "password": "swordfish"}
    assert redactor()(game) == game and redact({"max_tokens": 3, "api_key": "", "key": "a"}) == {
        "max_tokens": 3,
        "api_key": "",
        "key": "a",
    }
    assert redact({"a": [ADDRESS, 3, None]}) == {"a": [f"https://{HIDDEN}@server:8000/v1", 3, None]}


@pytest.mark.parametrize(
    "text",
    [
        "export TINKER_API_KEY=tml-... (from the Tinker console), or use backend=local",
        "set TINKER_API_KEY=<your key>, then run again",
        "HF_TOKEN=$MY_TOKEN python -m recipes.chat api_key=$KEY",
        "api_keys_file=keys.txt with a line alice=tml-...",
        "api_key=None",
        "type `export TINKER_API_KEY=KEY`, or TINKER_API_KEY=KEY.",
        "api_key=tml-XXXX",
        'api_key = "sk-xxxxxxxx-xxxxxxxx", then api_key="MY_KEY"',
        "export HF_TOKEN=hf_XXXXXXXXXXXXXXXXXXXX",
    ],
)
def test_an_instruction_stays_readable(text: str) -> None:
    assert redact(text) == text == redact_code(text)


@pytest.mark.parametrize(
    "value", ["KEYabc", "KEY.abc", "tml-XXXX0123", "XXXy", "key", "tml-0123XXXX", "xxX", "MY_KEYS"]
)
def test_what_only_begins_or_ends_like_an_instruction_is_hidden(value: str) -> None:
    assert redact(f"export TINKER_API_KEY={value}") == f"export TINKER_API_KEY={HIDDEN}"


@pytest.mark.parametrize(
    "key", ["tml-0123456789abcdef", "sk-proj-0123456789abcdef", "hf_0123456789abcdefghij"], ids=lambda key: key[:3]
)
@pytest.mark.parametrize(
    "text", ["export TINKER_API_KEY={}", "TINKER_API_KEY='{}'", 'api_key="{}"', "Bearer {} was refused"]
)
def test_a_key_that_the_environment_does_not_have_is_hidden_too(text: str, key: str) -> None:
    assert redact(text.format(key)) == text.format(HIDDEN)


def test_the_name_of_a_file_is_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").touch()
    monkeypatch.setenv("SOME_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("SOME_TOKEN", "/not/a/file/but/a/secret")
    assert redact(f"read {tmp_path}/token") == f"read {tmp_path}/token"
    assert redact("sent /not/a/file/but/a/secret") == f"sent {HIDDEN}"
