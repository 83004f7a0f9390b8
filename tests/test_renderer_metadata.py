"""A checkpoint knows the renderer that it was trained with: it is found from its path, and another one is refused."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.rl.loop import TINY
from tinker_cookbook import backends
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderer_metadata import (
    add_renderer_name_to_user_metadata,
    check_renderer_name_for_checkpoint_async,
    get_renderer_name_from_checkpoint_async,
    resolve_renderer_name_from_checkpoint_or_default_async,
)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Any, str]:
    """A service on the shipped model, and a checkpoint of a run that recorded its renderer."""
    monkeypatch.setenv("TINKER_LOCAL_HOME", str(tmp_path / "home"))
    service = backends.create_service_client("local")

    async def save() -> str:
        metadata = add_renderer_name_to_user_metadata({"recipe": "r"}, "role_colon")
        client = await service.create_lora_training_client(TINY, rank=2, seed=0, user_metadata=metadata)
        return (await client.save_state("a")).path

    return service, asyncio.run(save())


def test_it_is_found_from_a_path(trained: tuple[Any, str]) -> None:
    service, path = trained
    found = asyncio.run(get_renderer_name_from_checkpoint_async(service, path))
    assert found == "role_colon"
    resolve = resolve_renderer_name_from_checkpoint_or_default_async
    assert asyncio.run(resolve(service, TINY, None, path)) == "role_colon"
    assert asyncio.run(resolve(service, TINY, "qwen3", path)) == "qwen3"
    assert asyncio.run(resolve(service, TINY, None, None)) == "qwen3_instruct"


def test_another_one_is_refused(trained: tuple[Any, str]) -> None:
    service, path = trained
    asyncio.run(check_renderer_name_for_checkpoint_async(service, path, "role_colon"))
    with pytest.raises(ConfigurationError, match="set renderer_name=role_colon"):
        asyncio.run(check_renderer_name_for_checkpoint_async(service, path, "qwen3"))
