"""A planted secret reaches no file of a run: not by the environment, the command line, the config, a log line or an error."""

import asyncio
import logging
import sys
from pathlib import Path
from typing import Any

import chz
import pytest

from tests.sweeps import toy
from tinker_cookbook.runs.bootstrap import open_run
from tinker_cookbook.sweeps import Recipe, run_sweep
from tinker_cookbook.utils.secrets import HIDDEN, redact

PLANTED = ("tml-planted-key-0123456789", "hf_planted-token-9876543210", "planted-pass")
KEY, TOKEN, PASSWORD = PLANTED
ADDRESS = f"https://me:{PASSWORD}@server:8000/v1"


@chz.chz(typecheck=True)
class Config:
    base_url: str = ADDRESS
    note: str = f"made with {KEY}"
    address: str = f"https://server/?api_key={PASSWORD}&page=2"


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("TINKER_BASE_URL", ADDRESS)
    monkeypatch.setattr(sys, "argv", ["recipe", f"base_url={ADDRESS}", f"name={TOKEN}"])


def files_with_secrets(folder: Path) -> dict[str, list[str]]:
    texts = {path: path.read_text() for path in folder.rglob("*") if path.is_file()}
    found = {str(path): [secret for secret in PLANTED if secret in text] for path, text in texts.items()}
    return {path: secrets for path, secrets in found.items() if secrets}


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
    assert "&page=2" in (tmp_path / "config.json").read_text()


def test_of_a_sweep_which_goes_on_all_the_same(tmp_path: Path) -> None:
    recipe = Recipe("tests.sweeps.toy", toy.CLIConfig, toy.main)
    points: list[dict[str, Any]] = [{"learning_rate": 1.0}]
    for earlier in (False, True):
        (result,) = asyncio.run(run_sweep(recipe, points, tmp_path, fixed={"text": f"key {KEY}"}, processes=0))
        assert (result.status, result.earlier) == ("finished", earlier)
    assert files_with_secrets(tmp_path) == {}


def test_what_only_looks_like_one_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    monkeypatch.setenv("MAX_TOKENS_PER_DAY", "123456789")
    text = "true tokens: 123456789, tinker://run/weights/a, max_tokens=3, user@host"
    assert redact(text) == text
    assert redact({"a": [ADDRESS, 3, None]}) == {"a": [f"https://{HIDDEN}@server:8000/v1", 3, None]}
