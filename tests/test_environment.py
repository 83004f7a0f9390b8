"""Environment variables of the library and of its runs: understood or refused, and what a run says of its engine."""

import asyncio
import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tinker

from recipes import rl_loop, shorter, sl_basic, sl_loop
from recipes.policy import PolicyCLIConfig, open_policy
from tests.child import ROOT, python_path
from tinker_cookbook import backends
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.debate.dataset import Debates
from tinker_cookbook.debate.judges import JudgeConfig
from tinker_cookbook.debate.prompts import CONFIDENCE_REQUEST
from tinker_cookbook.env.dataset import DatasetBuilder, Environment
from tinker_cookbook.env.qa import QA_SYSTEM
from tinker_cookbook.env.single_turn import SingleTurn
from tinker_cookbook.exceptions import ConfigurationError

TINY = str(EXAMPLE_DATA / "tiny_chat")


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("TINKER_DEBATE_BASE_MODLE", "x", r"there is no such variable; did you mean TINKER_DEBATE_BASE_MODEL\?"),
        ("TINKER_DEBATE_ROUNDS", "x", r"no such variable.*Known: TINKER_BACKEND.*TINKER_DEBATE_LOG_ROOT"),
        ("TINKER_BASE_ULR", "http://x", r"did you mean TINKER_BASE_URL\?"),
        ("TINKER_BASE_URL", "x", "TINKER_BASE_URL='x' must begin with http"),
        ("TINKER_BACKEND", "hosted", "TINKER_BACKEND='hosted' must be local or tinker or api"),
        ("TINKER_LOCAL_SEED", "one", "TINKER_LOCAL_SEED='one' must be an integer"),
        ("TINKER_COOKBOOK_TRACEBACK", "yes", "TINKER_COOKBOOK_TRACEBACK='yes' must be 0 or 1"),
    ],
)
def test_what_is_not_understood_is_refused(name: str, value: str, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=error):
        backends.check_variables()


def test_what_the_sdk_reads_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its sources, so that a later one's variable is not refused by us."""
    assert tinker.__file__ is not None
    sources = [
        path.read_text() for path in Path(tinker.__file__).parent.rglob("*.py") if not path.stem.endswith("_test")
    ]
    read = {name for source in sources for name in re.findall(r'environ(?:\.get\(|\[)"(TINKER_\w+)"', source)}
    assert len(read) >= 8
    for name in read:
        monkeypatch.setenv(name, "http://x")
    for name in ("TINKER_DEBATE_LOG_ROOT", "TINKER_TEST_DEVICE"):
        monkeypatch.setenv(name, "x")
    backends.check_variables()


def test_a_command_that_prints_a_key_is_as_good_as_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TINKER_API_KEY", "TINKER_CREDENTIAL_CMD"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigurationError, match="needs an API key"):
        backends.check_backend("tinker", "org/model")
    monkeypatch.setenv("TINKER_CREDENTIAL_CMD", "print-a-key")
    assert backends.check_backend("tinker", "org/model") == "tinker"


@pytest.mark.parametrize(
    ("variables", "error"),
    [
        ({"TINKER_LOCAL_SAMPLER": "sglang"}, "TINKER_LOCAL_SAMPLER='sglang' must be transformers or vllm"),
        ({"TINKER_LOCAL_DEVICE": "nonsense"}, "TINKER_LOCAL_DEVICE='nonsense' must be cpu, cuda or cuda:N"),
        ({"TINKER_DEBATE_LOGROOT": "/tmp"}, "did you mean TINKER_DEBATE_LOG_ROOT?"),
        ({"TINKER_BASE_URL": "http://x"}, "TINKER_BASE_URL is set, but no backend is chosen"),
    ],
)
@pytest.mark.parametrize("recipe", ["recipes.sl_basic", "recipes.chat"])
def test_a_recipe_ends_with_one_line(recipe: str, variables: dict[str, str], error: str, tmp_path: Path) -> None:
    own = {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", "TINKER_LOCAL_HOME": str(tmp_path), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-m", recipe],
        env=own | variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 2
    assert error in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr


class TestBaseModel:
    def test_recipes_without_a_model_name_take_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        configs: list[Any] = [shorter.CLIConfig, sl_basic.CLIConfig, sl_loop.CLIConfig, rl_loop.CLIConfig]
        assert {config().model_name for config in configs} == {"tiny_chat"}
        monkeypatch.setenv("TINKER_DEBATE_BASE_MODEL", "org/model")
        assert {config().model_name for config in configs} == {"org/model"}
        assert sl_basic.CLIConfig(model_name="other").model_name == "other"

    async def opened(self, cli: PolicyCLIConfig) -> str:
        return (await open_policy(cli)).base_model

    def test_finished_weights_are_of_it_when_none_are_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TINKER_DEBATE_BASE_MODEL", str(tmp_path / "nowhere"))
        with pytest.raises(ConfigurationError, match="nowhere"):
            asyncio.run(self.opened(PolicyCLIConfig()))
        assert asyncio.run(self.opened(PolicyCLIConfig(model_name="tiny_chat"))) == TINY


class TestBaseUrl:
    @pytest.fixture(autouse=True)
    def at_a_server(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("TINKER_BACKEND", "TINKER_LOCAL_BACKEND"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("TINKER_BASE_URL", "http://server")
        monkeypatch.setenv("TINKER_API_KEY", "tml-none")

    def test_a_server_may_have_the_model_in_a_folder(self) -> None:
        assert backends.check_backend("tinker", TINY) == "tinker"

    def test_the_hosted_client_goes_there(self) -> None:
        assert backends.describe_engine("tinker") == {"backend": "tinker", "base_url": "http://server"}
        assert backends.describe_engine("tinker", "http://other")["base_url"] == "http://other"

    def test_it_is_not_ignored_where_nobody_chose_the_local_engine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ConfigurationError, match="TINKER_BASE_URL is set, but no backend is chosen"):
            backends.check_backend(None, TINY)
        assert backends.check_backend("local", TINY) == "local"
        monkeypatch.setenv("TINKER_BACKEND", "local")
        assert backends.check_backend(None, TINY) == "local"


def test_a_run_says_what_its_conversations_begin_with(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Be brief."}
    turn = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    for name, openings, expected in [("same", [system, system], "Be brief."), ("other", [system, None], None)]:
        file, log_path = tmp_path / f"{name}.jsonl", tmp_path / name
        rows = [{"messages": [*([opening] if opening else []), *turn]} for opening in openings]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = sl_basic.CLIConfig(
            log_path=str(log_path), dataset=str(file), max_steps=1, batch_size=2, test_size=0, eval_every=0
        )
        asyncio.run(sl_basic.main(config))
        assert json.loads((log_path / "run_metadata.json").read_text())["system_prompt"] == expected


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (SingleTurn(task="qa"), QA_SYSTEM),
        (SingleTurn(task="qa", extra_request="Hurry."), f"{QA_SYSTEM} Hurry."),
        (Debates(task="qa", judge=JudgeConfig(name="mock")), f"{QA_SYSTEM} {CONFIDENCE_REQUEST}"),
    ],
)
def test_environments_of_tasks_say_it_too(env: Environment, expected: str) -> None:
    made = DatasetBuilder(env=env, model_name=TINY, renderer_name="qwen3_instruct")
    assert made.shared_system_prompt == expected


def test_a_run_says_where_it_computes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    asyncio.run(sl_basic.main(sl_basic.CLIConfig(log_path=str(tmp_path / "run"), max_steps=1, batch_size=2)))
    engine = json.loads((tmp_path / "run" / "run_metadata.json").read_text())["engine"]
    assert engine["backend"] == "local"
    assert engine.keys() >= {"device", "dtype", "torch", "cuda"}
    assert (engine["model"], engine["renderer"]) == (TINY, "qwen3_instruct")
    log = (tmp_path / "run" / "logs.log").read_text()
    (line,) = [line for line in log.splitlines() if "backend local" in line]
    assert all(f"{key} {value}" in line for key, value in engine.items() if value is not None)
