"""A checkpoint knows the renderer that it was trained with: it is found from its path, and another one is refused."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.rl.loop import TINY
from tinker_cookbook import backends
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.models.renderer import (
    add_renderer_name_to_user_metadata,
    check_renderer_name_for_checkpoint,
    check_renderer_name_for_checkpoint_async,
    get_renderer_name_from_checkpoint,
    get_renderer_name_from_checkpoint_async,
    resolve_renderer_name_from_checkpoint_or_default,
    resolve_renderer_name_from_checkpoint_or_default_async,
)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Any, str]:
    """A service on the shipped model, and a checkpoint of a run that recorded its renderer."""
    monkeypatch.setenv("TINKER_LOCAL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("TINKER_BACKEND", raising=False)
    service = backends.create_service_client("local")

    async def save() -> str:
        metadata = add_renderer_name_to_user_metadata({"recipe": "r"}, "role_colon")
        client = await service.create_lora_training_client(TINY, rank=2, seed=0, user_metadata=metadata)
        return (await client.save_state("a")).path

    return service, asyncio.run(save())


def resolve(asynchronous: bool, explicit: str | None, path: str | None) -> str:
    keys = {"model_name": TINY, "explicit_renderer_name": explicit, "load_checkpoint_path": path}
    if asynchronous:
        return asyncio.run(resolve_renderer_name_from_checkpoint_or_default_async(**keys))
    return resolve_renderer_name_from_checkpoint_or_default(**keys)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_it_is_found_from_a_path(trained: tuple[Any, str], asynchronous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    service, path = trained
    if asynchronous:
        assert asyncio.run(get_renderer_name_from_checkpoint_async(service, path)) == "role_colon"
    else:
        assert get_renderer_name_from_checkpoint(service, path) == "role_colon"
    assert resolve(asynchronous, None, path) == "role_colon"
    monkeypatch.setattr(backends, "create_service_client", None)
    assert resolve(asynchronous, "qwen3", path) == "qwen3"
    assert resolve(asynchronous, None, None) == "qwen3_instruct"


@pytest.mark.parametrize("asynchronous", [True, False])
def test_another_one_is_refused(trained: tuple[Any, str], asynchronous: bool) -> None:
    service, path = trained

    def check(name: str | None) -> None:
        if asynchronous:
            asyncio.run(check_renderer_name_for_checkpoint_async(service, path, name))
        else:
            check_renderer_name_for_checkpoint(service, path, name)

    check("role_colon")
    check(None)
    with pytest.raises(ConfigurationError, match="set renderer_name=role_colon"):
        check("qwen3")
