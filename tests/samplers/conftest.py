"""An engine whose vLLM is a stand-in: a script that is started in the place of vLLM's Python."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tinker
from transformers import Qwen3Config

from tests.engine.conftest import SHAPE, write_model
from tests.engine.helpers import prompt
from tinker_local_backend import SamplingClient, SamplingParams, ServiceClient, TrainingClient
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.samplers.vllm_rules import probe_prompt

STAND_IN = Path(__file__).with_name("stand_in.py")

HEAD_DIM_32 = {**SHAPE, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
"""vLLM's attention on a CPU takes no smaller heads."""


@pytest.fixture(autouse=True)
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("TINKER_LOCAL_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("TINKER_LOCAL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TINKER_LOCAL_DEVICE", "cpu")
    monkeypatch.setenv("TINKER_LOCAL_DTYPE", "float32")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(Qwen3Config(**HEAD_DIM_32), tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="session")
def likeliest(model: str) -> list[float]:
    return likeliest_after(model)


def likeliest_after(model: str) -> list[float]:
    """What follows the prompt of the first questions: a token, its logprob at temperature 1, and at 0.5 twice."""
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ:
            if name.startswith("TINKER_LOCAL_"):
                patch.delenv(name)
        patch.setenv("TINKER_LOCAL_DEVICE", "cpu")
        with ServiceClient() as service:
            client = service.create_sampling_client(base_model=model).result()
            found = []
            for temperature in (1.0, 0.5):
                params = tinker.SamplingParams(max_tokens=1, temperature=temperature, stop=[], seed=0)
                asked = prompt(probe_prompt(client._model))
                response = client.sample(asked, 1, params, topk_sample_logprobs=1).result()
                topk = response.sequences[0].topk_logprobs
                assert topk is not None and topk[0] is not None
                found.append(topk[0][0])
    (token, plain), (_, tempered) = found
    return [token, plain, tempered, tempered]


class StandIn:
    """The stand-in and what it was told."""

    def __init__(self, folder: Path, plan: dict[str, Any]):
        self._log, self._plan = folder / "stand_in.log", folder / "stand_in.json"
        self.settings = {**plan, "log": str(self._log)}
        self.write()

    @property
    def plan(self) -> Path:
        return self._plan

    def write(self, **changes: Any) -> None:
        self.settings |= changes
        self._plan.write_text(json.dumps(self.settings))

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._log.read_text().splitlines()] if self._log.exists() else []

    @property
    def pids(self) -> list[int]:
        return [line["pid"] for line in self.lines if "pid" in line]

    @property
    def arguments(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if "model" in line]

    def told(self, op: str) -> list[dict[str, Any]]:
        """Without the questions at the start."""
        return [line for line in self.lines if line.get("op") == op and line.get("number", 0) >= 0]


@pytest.fixture
def stand_in(likeliest: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """vLLM's Python is the stand-in, and it behaves."""
    program = tmp_path / "python"
    program.write_text(f"#!{sys.executable}\n{STAND_IN.read_text()}")
    program.chmod(0o755)
    made = StandIn(tmp_path, {"probe": likeliest})
    monkeypatch.setenv("STAND_IN", str(made.plan))
    monkeypatch.setenv("TINKER_LOCAL_SAMPLER", "vllm")
    monkeypatch.setenv("TINKER_LOCAL_VLLM_PYTHON", str(program))
    return made


@pytest.fixture
def service(stand_in: StandIn, tmp_path: Path) -> Iterator[ServiceClient]:
    with ServiceClient(home=tmp_path / "home") as service:
        yield service


@pytest.fixture
def sampler(service: ServiceClient, model: str) -> SamplingClient:
    return service.create_sampling_client(base_model=model).result()


@pytest.fixture
def training(service: ServiceClient, model: str) -> TrainingClient:
    return service.create_lora_training_client(model, rank=4, seed=0).result()


@pytest.fixture
def ask(sampler: SamplingClient) -> Callable[..., Any]:
    """The future of a request for three tokens by default."""

    def ask(tokens: list[int], client: SamplingClient = sampler, samples: int = 1, **fields: Any) -> Any:
        params = SamplingParams(**{"max_tokens": 3, "stop": [], "seed": 5, **fields})
        return client.sample(prompt(tokens), samples, params)

    return ask


def vllm_sampler(service: ServiceClient, model: BaseModel | str) -> Any:
    """The VllmSampler of a model."""
    return service._engine._generators[model if isinstance(model, str) else model.name]
