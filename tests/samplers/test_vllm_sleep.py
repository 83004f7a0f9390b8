"""vLLM's memory while the engine trains: when it is told to give it back, and what its process does then."""

import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import tinker
import torch

from tests.engine.helpers import STEP, cross_entropy_datum, prompt
from tests.samplers.conftest import StandIn, vllm_sampler
from tests.samplers.stand_in import SILENT
from tests.waiting import until
from tinker_local_backend import RequestError, SamplingClient, ServiceClient, TrainingClient
from tinker_local_backend.samplers import vllm, vllm_worker
from tinker_local_backend.samplers.transport import Accepts
from tinker_local_backend.samplers.vllm_settings import VllmSettings
from tinker_local_backend.samplers.worker_process import engine_arguments

PARAMS = tinker.SamplingParams(max_tokens=2, stop=[])


@pytest.fixture
def sleepy(service: ServiceClient, sampler: SamplingClient, model: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A sampler of vLLM that sleeps, on a device that would not: the stand-in has no memory to give."""
    made = vllm_sampler(service, model)
    monkeypatch.setattr(made, "_settings", replace(made._settings, sleep=True))
    return made


def train(training: TrainingClient) -> None:
    training.forward_backward([cross_entropy_datum(6, seed=0)], "cross_entropy").result()
    training.optim_step(STEP).result()


def ops(stand_in: StandIn) -> list[str]:
    return [line["op"] for line in stand_in.lines if line.get("number", 0) >= 0 and "op" in line]


def test_it_sleeps_once_before_training_and_wakes_for_a_sample(
    sleepy: Any,
    training: TrainingClient,
    sampler: SamplingClient,
    stand_in: StandIn,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released: list[torch.device] = []
    monkeypatch.setattr(vllm, "release_cached_memory", released.append)
    train(training)
    train(training)
    assert ops(stand_in) == ["sleep"] and released == []
    for _ in range(2):
        sampler.sample(prompt([1, 40]), 1, PARAMS).result()
    assert ops(stand_in) == ["sleep", "add", "add"]
    assert released == [torch.device("cpu")]  # before the first of them
    train(training)
    assert ops(stand_in)[-1] == "sleep"


def test_it_does_not_while_it_samples(
    sleepy: Any, training: TrainingClient, sampler: SamplingClient, stand_in: StandIn
) -> None:
    running = sampler.sample(prompt([SILENT]), 1, PARAMS)
    until(lambda: "add" in ops(stand_in))
    train(training)
    assert "sleep" not in ops(stand_in)
    running.future().cancel()
    until(lambda: "abort" in ops(stand_in))
    train(training)
    assert ops(stand_in)[-1] == "sleep"


def test_one_that_is_not_asked_to_never_does(
    training: TrainingClient, sampler: SamplingClient, stand_in: StandIn
) -> None:
    train(training)
    assert ops(stand_in) == []


def test_training_goes_on_if_it_dies_then(
    sleepy: Any, training: TrainingClient, sampler: SamplingClient, stand_in: StandIn
) -> None:
    stand_in.write(dies_at_sleep=True)
    sampler.sample(prompt([1, 40]), 1, PARAMS).result()
    vllm_sampler(training._owner, training._run.model)._disconnect()  # pyright: ignore[reportArgumentType]
    sampler.sample(prompt([1, 40]), 1, PARAMS).result()
    train(training)
    stand_in.write(dies_at_sleep=False)
    until(lambda: sleepy._transport is None)
    assert sampler.sample(prompt([1, 40]), 1, PARAMS).result().sequences[0].tokens == [41, 42]


def test_it_is_started_so_that_it_can_and_refused_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_LOCAL_SAMPLER", "vllm")
    monkeypatch.setenv("TINKER_LOCAL_VLLM_PYTHON", sys.executable)
    model: Any = SimpleNamespace(
        name="m", dtype=torch.bfloat16, context_length=9, device=torch.device("cuda"), experts=[]
    )
    plain = engine_arguments(model, VllmSettings.from_environment(model.device), Accepts(32))
    monkeypatch.setenv("TINKER_LOCAL_VLLM_SLEEP", "1")
    asked = engine_arguments(model, VllmSettings.from_environment(model.device), Accepts(32))
    assert asked == {**plain, "enable_sleep_mode": True}
    with pytest.raises(RequestError, match="TINKER_LOCAL_VLLM_SLEEP=1 on cpu: vLLM can free only GPU memory"):
        VllmSettings.from_environment(torch.device("cpu"))


class Engine:
    """vLLM's engine, as far as a worker calls it; it refuses what a sleeping one cannot do."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.asleep = self.busy = False
        self.engine_core = SimpleNamespace(collective_rpc=lambda name: None)
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=64))

    def has_unfinished_requests(self) -> bool:
        return self.busy

    def sleep(self, level: int) -> None:
        assert not self.asleep
        self.asleep = True
        self.calls.append(("sleep", level))

    def wake_up(self) -> None:
        self.asleep = False
        self.calls.append(("wake_up",))

    def add_lora(self, lora: tuple) -> None:
        assert not self.asleep
        self.calls.append(("add_lora", lora[1]))

    def remove_lora(self, number: int) -> None:
        assert not self.asleep
        self.calls.append(("remove_lora", number))

    def add_request(self, number: str, *rest: Any, **named: Any) -> None:
        assert not self.asleep
        self.calls.append(("add_request", int(number)))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """What the worker imports of vLLM."""
    made = Engine()

    def module(name: str, **members: Any) -> None:
        stub = ModuleType(name)
        vars(stub).update(members)
        monkeypatch.setitem(sys.modules, name, stub)

    module(
        "vllm",
        __version__="0",
        EngineArgs=lambda **arguments: arguments,
        LLMEngine=SimpleNamespace(from_engine_args=lambda arguments: made),
        SamplingParams=lambda **fields: fields,
    )
    module("vllm.lora.request", LoRARequest=lambda name, number, folder, is_3d_lora_weight: (name, number, folder))
    module("vllm.sampling_params", RequestOutputKind=SimpleNamespace(DELTA="delta"))
    module(vllm_worker.SAMPLING)
    return made


def add(number: int, adapter: int, folder: Path) -> dict[str, Any]:
    fields = dict(temperature=1.0, top_k=-1, top_p=1.0, min_p=0.0, seed=0, max_tokens=2, stop=[], topk=0, salt="")
    return {
        "op": "add",
        "number": number,
        "adapter": [adapter, f"a{adapter}", str(folder), False],
        "prompt": [1],
        **fields,
    }


def test_its_process_sleeps_wakes_and_forgets_adapters_in_order(engine: Engine, tmp_path: Path) -> None:
    answers = io.StringIO()
    worker = vllm_worker.Worker({"model": "m", "enable_sleep_mode": True}, answers)
    worker._handle(add(1, 7, tmp_path))
    engine.busy = True
    worker._handle({"op": "sleep"})
    engine.busy = False
    for command in ({"op": "sleep"}, {"op": "sleep"}, {"op": "unload", "adapter": 7}, add(2, 8, tmp_path)):
        worker._handle(command)
    said = [json.loads(line) for line in answers.getvalue().splitlines()[1:]]
    assert said == [{"asleep": False}, {"asleep": True}, {"asleep": True}]
    assert engine.calls == [
        ("add_lora", 7),
        ("add_request", 1),
        ("sleep", 1),
        ("wake_up",),
        ("remove_lora", 7),
        ("add_lora", 8),
        ("add_request", 2),
    ]


def test_no_memory_to_wake_into_fails_the_request_alone(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = io.StringIO()
    worker = vllm_worker.Worker({"model": "m"}, answers)
    worker._handle({"op": "sleep"})

    def no_room() -> None:
        raise RuntimeError("CUDA Error: out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "wake_up", no_room)
        worker._handle(add(1, 7, tmp_path))
    assert json.loads(answers.getvalue().splitlines()[-1]) == {
        "failed": 1,
        "error": "RuntimeError: CUDA Error: out of memory",
    }
    worker._handle(add(2, 7, tmp_path))
    assert engine.calls[-1] == ("add_request", 2)
