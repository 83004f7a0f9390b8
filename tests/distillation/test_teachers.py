"""Who may teach: vocabularies are compared before weights load, checkpoints with the model they are named with."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FakeServiceClient
from tinker_cookbook import backends
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.distillation.teachers import TeacherConfig, check_teachers, open_teacher, open_teachers
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
        check_teachers([TeacherConfig(base_model=str(tmp_path / "copy"))], MODEL, "local")

    def test_another_vocabulary(self, tmp_path: Path) -> None:
        teacher = TeacherConfig(base_model=other_vocabulary(tmp_path / "other"))
        with pytest.raises(ConfigurationError, match=r"2 differ, for example 'a' is \d+ there and \d+ here"):
            check_teachers([TeacherConfig(base_model=MODEL), teacher], MODEL, "local")

    def test_no_such_model(self) -> None:
        with pytest.raises(ConfigurationError, match="/no/such/model"):
            check_teachers([TeacherConfig(base_model="/no/such/model")], MODEL, "local")

    def test_a_state_is_nothing_to_sample_from(self) -> None:
        with pytest.raises(ConfigurationError, match="no path of sampler weights"):
            TeacherConfig(base_model=MODEL, load_checkpoint_path="tinker://run/weights/000010")


class TestOpenTeacher:
    def test_a_checkpoint_must_be_of_the_named_model(self, tmp_path: Path) -> None:
        shutil.copytree(MODEL, tmp_path / "copy")

        async def run() -> None:
            service = backends.create_service_client("local")
            client = await service.create_lora_training_client(MODEL, rank=2, seed=0)
            path = (await client.save_weights_for_sampler("teacher")).path
            teacher = await open_teacher(service, TeacherConfig(base_model=MODEL, load_checkpoint_path=path))
            assert len(teacher.get_tokenizer()) > 0
            wrong = TeacherConfig(base_model=str(tmp_path / "copy"), load_checkpoint_path=path)
            with pytest.raises(ConfigurationError, match=r"is a checkpoint of .*tiny_chat"):
                await open_teacher(service, wrong)

        asyncio.run(run())

    def test_equal_teachers_share_a_client(self) -> None:
        service = FakeServiceClient()
        configs = [TeacherConfig(base_model="a"), TeacherConfig(base_model="b"), TeacherConfig(base_model="a")]
        first, second, third = asyncio.run(open_teachers(service, configs))
        assert first is third and first is not second
