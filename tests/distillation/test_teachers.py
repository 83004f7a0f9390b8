"""Who may teach: vocabularies are compared before weights load."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FakeServiceClient
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.distillation.teachers import TeacherConfig, check_teachers, open_teachers
from tinker_cookbook.exceptions import ConfigurationError

MODEL = str(EXAMPLE_DATA / "tiny_chat")


def other_vocabulary(folder: Path) -> str:
    """The tiny model with two tokens exchanged, and no weights: nothing may try to load them."""
    ignored = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(MODEL, folder, ignore=ignored)
    path = folder / "tokenizer.json"
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    a, b = "a", "b"
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(folder)


class TestCheckTeachers:
    def test_the_same_vocabulary_under_another_name(self, tmp_path: Path) -> None:
        shutil.copytree(MODEL, tmp_path / "copy")
        check_teachers({"teacher": TeacherConfig(base_model=str(tmp_path / "copy"))}, MODEL, "local")

    def test_another_vocabulary(self, tmp_path: Path) -> None:
        teacher = TeacherConfig(base_model=other_vocabulary(tmp_path / "other"))
        with pytest.raises(ConfigurationError, match=r"^b: .*2 differ, for example 'a' is \d+ there and \d+ here"):
            check_teachers({"a": TeacherConfig(base_model=MODEL), "b": teacher}, MODEL, "local")

    def test_no_such_model(self) -> None:
        with pytest.raises(ConfigurationError, match="teacher: model '/no/such/model'"):
            check_teachers({"teacher": TeacherConfig(base_model="/no/such/model")}, MODEL, "local")


def test_equal_teachers_share_a_client() -> None:
    service = FakeServiceClient()
    configs = {name: TeacherConfig(base_model=model) for name, model in zip("123", "aba", strict=True)}
    first, second, third = asyncio.run(open_teachers(service, configs))
    assert first is third and first is not second
