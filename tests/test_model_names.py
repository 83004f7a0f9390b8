"""A misspelt model is answered with the nearest, and a hub that does not answer is asked once."""

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from recipes import sl_basic
from tinker_cookbook import backends
from tinker_cookbook.data import hub
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.model_names import did_you_mean
from tinker_cookbook.models.info import get_context_length
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_local_backend import hub_access


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("Qwen/Qwen3-4B-Instrct-2507", "Qwen/Qwen3-4B-Instruct-2507"),
        ("qwen/qwen3-4b-instruct-2507", "Qwen/Qwen3-4B-Instruct-2507"),
        ("Qwen3-4B-Instruct-2507", "Qwen/Qwen3-4B-Instruct-2507"),
        ("meta-lama/Llama-3.2-1B", "meta-llama/Llama-3.2-1B"),
        ("tiny_chta", "tiny_chat"),
    ],
)
def test_the_nearest_name(said: str, meant: str) -> None:
    assert did_you_mean(said, backends.shipped.shipped_models()) == f" (did you mean {meant}?)"


def test_nothing_near_and_a_name_that_is_right() -> None:
    assert did_you_mean("somebody/something-else") == did_you_mean("Qwen/Qwen3-4B-Instruct-2507") == ""


@pytest.mark.parametrize("said", ["Qwen/Qwen3-4B-Instrct-2507", "Qwen3-4B-Instruct-2507", "tiny_chta"])
def test_the_command_line_says_it(said: str) -> None:
    with pytest.raises(ConfigurationError, match="did you mean "):
        sl_basic.build_config(sl_basic.CLIConfig(model_name=said))


def test_a_model_that_a_pattern_knows_and_the_hub_does_not() -> None:
    with pytest.raises(ConfigurationError, match=r"no tokenizer could be loaded .* \(did you mean Qwen/Qwen3-4B\?\)"):
        get_tokenizer("Qwen/Qwen3-4BB")


class Hub:
    """Counts what is asked of it, and does not answer."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def head(self, url: str, **_: Any) -> None:
        self.asked.append(url)
        raise ConnectionError("Name or service not known")


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    found = Hub()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: found)
    hub_access.try_hub_once.cache_clear()
    yield found
    hub_access.try_hub_once.cache_clear()


def test_a_hub_that_does_not_answer_is_asked_once(silent: Hub, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        with pytest.raises(ConfigurationError, match="no tokenizer could be loaded"):
            get_tokenizer("nobody/nothing-of-this-name")
        assert get_context_length("nobody/nothing-of-that-name") is None
        with pytest.raises(ConfigurationError, match="could not be loaded"):
            hub.load("nobody/no-data-of-this-name", "train")
    assert silent.asked == [constants.ENDPOINT] and constants.HF_HUB_OFFLINE
    assert caplog.text.count("does not answer (Name or service not known): only cached models and data") == 1


def test_a_folder_asks_nothing(silent: Hub, tmp_path: Path) -> None:
    get_tokenizer("tiny_chat")
    with pytest.raises(ConfigurationError):
        hub.load(str(tmp_path))
    assert silent.asked == [] and not constants.HF_HUB_OFFLINE


def test_a_hub_that_answers_stays_in_use(silent: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: SimpleNamespace(head=lambda url, timeout: None))
    backends.try_hub_once()
    assert not constants.HF_HUB_OFFLINE
