"""The thread that runs a model has the model's GPU as its current one: Triton starts its kernels there."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tinker_local_backend import ModelLoadError
from tinker_local_backend.engine import models
from tinker_local_backend.engine.engine import Engine
from tinker_local_backend.engine.model.base_model import BaseModel

SECOND, THIRD = torch.device("cuda", 1), torch.device("cuda", 2)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.device]:
    """The current device of each thread, by the thread's name."""
    devices: dict[str, torch.device] = {}
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: devices.update({threading.current_thread().name: device})
    )
    return devices


@pytest.mark.parametrize("name", ["cuda:1", None])
def test_a_model_is_loaded_with_its_device_as_the_current_one(
    current: dict[str, torch.device], monkeypatch: pytest.MonkeyPatch, name: str | None
) -> None:
    seen: list[tuple[torch.device, torch.device | None]] = []

    def base_model(path: str, device: torch.device, *rest: Any) -> Any:
        seen.append((device, current.get(threading.current_thread().name)))
        return SimpleNamespace(device=torch.device("cpu"), execution=None)

    monkeypatch.setattr(models, "BaseModel", base_model)
    monkeypatch.setattr(models, "start", lambda model: None)
    monkeypatch.setattr("tinker_local_backend.environment.default_device", lambda: SECOND)
    models.load_model("some-model", None if name is None else torch.device(name))
    assert seen == [(SECOND, SECOND)]


def served_on(engine: Engine, path: str, device: torch.device, name: str) -> Any:
    """Let the engine adopt a model that claims to be on this device."""
    model = BaseModel(path, torch.device("cpu"), torch.float32)
    model.device, model.name = device, name
    return engine.submit("models", lambda: engine.adopt(model)).result()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TINKER_LOCAL_KV_CACHE_TOKENS", "64")
    monkeypatch.setenv("TINKER_LOCAL_ACTIVATION_MB", "1")
    idle: Any = SimpleNamespace(busy=False, tenants=(), fail_all=lambda error: None)
    engine = Engine(make_sampler=lambda *arguments: idle)
    yield engine
    engine.close()


def test_the_worker_takes_the_device_of_the_model_that_it_adopts(
    engine: Engine, current: dict[str, torch.device], tied_model: str
) -> None:
    served_on(engine, tied_model, SECOND, "one")
    assert current == {"tinker-local-engine": SECOND}


def test_a_second_device_is_refused_by_name(engine: Engine, current: dict[str, torch.device], tied_model: str) -> None:
    served_on(engine, tied_model, SECOND, "one")
    served_on(engine, tied_model, SECOND, "two")
    with pytest.raises(ModelLoadError, match=r"'three' cannot be served: it is on cuda:2, and 'one' on cuda:1"):
        served_on(engine, tied_model, THIRD, "three")
    assert current == {"tinker-local-engine": SECOND}


def test_a_model_on_the_cpu_changes_no_device(
    engine: Engine, current: dict[str, torch.device], tied_model: str
) -> None:
    served_on(engine, tied_model, torch.device("cpu"), "one")
    assert current == {}
