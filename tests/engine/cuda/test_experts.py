"""The CUDA path of models with routed experts and attention sinks, with its stand-ins on a CPU."""

import itertools
from typing import Any

import pytest
import torch

from benchmarks.gpu.stand_ins import graphs_for
from tests.engine.cuda.test_placement import on_a_fake_gpu, run_step
from tests.engine.devices import here
from tests.engine.direct import Direct, assert_same_samples, frozen_adapter, request
from tests.engine.helpers import random_tokens
from tests.engine.test_families import write_family
from tinker_local_backend.engine.cuda.execution import DECODING, ON, CudaExecution
from tinker_local_backend.engine.cuda.generation import BurstGenerator
from tinker_local_backend.engine.cuda.selfcheck import run_checks
from tinker_local_backend.engine.model.attention import Reference
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.models import load_model


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_family("gpt-oss", tmp_path_factory.mktemp("gpt-oss"))


def load(path: str) -> BaseModel:
    model = load_model(path, here().device, here().dtype)
    model.execution = Reference()  # what is compared is chosen here
    return model


class Captured(Direct):
    def __init__(self, model: BaseModel):
        self.generator: Any = BurstGenerator(model, 4096, itertools.count().__next__, graphs_for(model.device))


def test_bursts_give_what_the_reference_gives(path: str) -> None:
    """Across the end of the sliding window, with an adapter and without."""
    results = []
    for captured in (False, True):
        model = load(path)
        if captured:
            CudaExecution(model)  # takes experts that read nothing back
        adapter = frozen_adapter(model, 4, seed=1)
        requests = [
            request(random_tokens(5, 0), adapter, samples=2, max_tokens=21),
            request(random_tokens(20, 1), None, max_tokens=9),
        ]
        results.append((Captured if captured else Direct)(model).run(*requests))
    for expected, found in zip(*results, strict=True):
        assert_same_samples(found, expected)


def test_checks_at_start_pass(path: str) -> None:
    model = load(path)
    execution = CudaExecution(model, graphs_for(model.device))
    found = {one.check.name: one.failure for one in run_checks(model, execution)}
    assert execution.parts()[DECODING] == ON and set(found.values()) == {None}
    assert "paged attention" in found and "sampled against trained logprobs" in found


def test_a_step_stays_on_the_device(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(path, torch.device("cpu"), torch.float32)
    model.execution = CudaExecution(model)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with on_a_fake_gpu(model):
        assert run_step(model).shape == (8, model.vocab_size)
