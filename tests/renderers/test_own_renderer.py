"""Renderers of one's own by module and file: checked before a model loads, recorded with a run, found from its checkpoints."""

import json
import pickle
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes import chat, sl_basic
from tests.pages import own_modules
from tests.rl.loop import TINY
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.models import info as model_info
from tinker_cookbook.models.renderer import add_renderer_name_to_user_metadata
from tinker_cookbook.plugins import full_reference
from tinker_cookbook.renderers import Message, Renderer, get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer

PAGE = (Path(__file__).parents[2] / "docs" / "renderers.md").read_text()
SOURCE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]
MORE = """

def make(tokenizer, image_processor):
    renderer = LowerCase(tokenizer)
    renderer.seen = image_processor
    return renderer


def wrong(tokenizer, image_processor):
    return "no renderer"


def too_short(tokenizer):
    return LowerCase(tokenizer)


class Abstract(__import__("tinker_cookbook.renderers", fromlist=["Renderer"]).Renderer):
    pass
"""
QUESTION: list[Message] = [{"role": "user", "content": "SAY Yes"}]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "my_renderer.py").write_text(SOURCE + MORE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TINKER_LOCAL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("TINKER_BACKEND", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with own_modules(tmp_path):
        yield tmp_path


def prompt(renderer: Renderer) -> str:
    return str(renderer.tokenizer.decode(renderer.build_generation_prompt(QUESTION).to_ints()))


def test_a_class_and_a_factory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = get_tokenizer(TINY)
    renderer = get_renderer("my_renderer.py:LowerCase", tokenizer, model_name=TINY)
    assert "say yes" in prompt(renderer) and "SAY Yes" in prompt(get_renderer("qwen3_instruct", tokenizer))
    assert get_renderer("my_renderer.py:make", tokenizer, "images").seen == "images"  # type: ignore[attr-defined]
    assert "say yes" in prompt(get_renderer("my_renderer:LowerCase", tokenizer))
    # From another folder too, where it is unpickled by its name.
    (folder / "other").mkdir()
    monkeypatch.chdir(folder / "other")
    assert "say yes" in prompt(pickle.loads(pickle.dumps(renderer)))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_renderer.py:Lower", "has no Lower"),
        ("nowhere.py:LowerCase", "there is no file"),
        ("my_renderer.py:QUESTION", "has no QUESTION"),
        ("my_renderer.py:get_text_content", r"will be called with \(tokenizer, image_processor\)"),
        ("my_renderer.py:too_short", r"will be called with \(tokenizer, image_processor\)"),
        ("my_renderer.py:Abstract", "Abstract lacks get_stop_sequences"),
        ("builtins:dict", "is a class, but not a Renderer: dict"),
        ("my_renderer.py:wrong", "gave a str, not a Renderer"),
    ],
)
def test_a_wrong_one_is_named_with_an_example(folder: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as raised:
        get_renderer(name, get_tokenizer(TINY))
    assert "nowhere" in name or "def render_message(self, message, ctx)" in str(raised.value)
    with pytest.raises(ConfigurationError, match="made from a tokenizer alone"):
        get_renderer("my_renderer.py:LowerCase", get_tokenizer(TINY), "images")


def test_it_is_recorded_with_the_whole_path(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    named = add_renderer_name_to_user_metadata(None, "my_renderer.py:LowerCase")
    assert named == {"renderer_name": f"{folder / 'my_renderer.py'}:LowerCase"}
    assert [full_reference(name) for name in ("qwen3", "package.module:Name", "a.py")] == [
        "qwen3",
        "package.module:Name",
        "a.py",
    ]
    model_info.warn_if_renderer_not_recommended(TINY, "my_renderer.py:LowerCase")
    assert not caplog.records


@pytest.mark.slow
def test_a_run_resumes_and_its_checkpoint_is_sampled_from_with_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    name = f"{folder / 'my_renderer.py'}:LowerCase"
    keys = ["renderer_name=my_renderer.py:LowerCase", "max_steps=1", "lora_rank=2", "eval_every=0", "batch_size=2"]
    run_recipe(sl_basic.CLIConfig, sl_basic.main, argv=[*keys, "log_path=run"])
    assert json.loads((folder / "run" / "run_metadata.json").read_text())["engine"]["renderer"] == name
    keys[1] = "max_steps=2"
    run_recipe(sl_basic.CLIConfig, sl_basic.main, argv=[*keys, "log_path=run", "behavior_if_log_dir_exists=resume"])
    assert len((folder / "run" / "metrics.jsonl").read_text().splitlines()) >= 2
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    monkeypatch.setattr(chat, "read_line", lambda: None)
    capsys.readouterr()
    run_recipe(chat.CLIConfig, chat.main, argv=["log_path=../run", "seed=0"])
    assert name in capsys.readouterr().out
    assert "was trained with the renderer" not in caplog.text
