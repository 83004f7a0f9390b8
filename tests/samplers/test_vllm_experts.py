"""Adapters on routed experts in vLLM, on a CPU: its own loader fills its own buffers, of which plain_experts.py computes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import GptOssConfig, PretrainedConfig, Qwen2MoeConfig, Qwen3MoeConfig

from tests.engine.conftest import write_model
from tests.engine.helpers import make_training_client
from tests.samplers.conftest import HEAD_DIM_32, vllm_sampler
from tests.samplers.test_vllm import LARGEST, PROMPTS, in_a_process, params, sampling_with, snapshot
from tinker_local_backend import ServiceClient
from tinker_local_backend.check_logprobs import compare
from tinker_local_backend.engine.model.lora import Adapter
from tinker_local_backend.engine.model.lora_spec import ExpertLayout
from tinker_local_backend.samplers.adapters import AdapterFiles
from tinker_local_backend.samplers.vllm import VllmSampler
from tinker_local_backend.storage.adapter_forms import ExpertForm
from tinker_local_backend.storage.checkpoints import write_adapter
from tinker_local_backend.storage.foreign_adapters import convert_adapter

pytestmark = pytest.mark.vllm

EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS: dict[str, PretrainedConfig] = {
    "qwen3_moe": Qwen3MoeConfig(**HEAD_DIM_32, **EXPERTS, norm_topk_prob=True),
    "qwen2_moe": Qwen2MoeConfig(**HEAD_DIM_32, **EXPERTS, shared_expert_intermediate_size=32),
    "gpt_oss": GptOssConfig(**HEAD_DIM_32, num_local_experts=6, num_experts_per_tok=2, sliding_window=64),
}


HEADLESS = ("qwen2_moe", "gpt_oss")
"""vLLM takes no adapter on the head of these."""


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(MODELS[request.param], tmp_path_factory.mktemp(request.param), seed=5)


@contextmanager
def plain_vllm(model: str, folder: Path) -> Iterator[ServiceClient]:
    """With a vLLM whose experts are computed in plain torch."""
    variables = in_a_process()
    program, script = folder / "python", Path(__file__).with_name("plain_experts.py")
    program.write_text(f'#!/bin/sh\nexec {variables["VLLM_PYTHON"]} -P {script} "$@"\n')
    program.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch, sampling_with(**variables | {"VLLM_PYTHON": str(program)}):
        patch.setattr("tinker_local_backend.samplers.worker_process.refuse_experts_on_cpu", lambda model: None)
        with ServiceClient(home=folder / "home") as service:
            service.create_sampling_client(base_model=model).result()  # here, where the variables are set
            yield service


@pytest.fixture(scope="module")
def service(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceClient]:
    with plain_vllm(model, tmp_path_factory.mktemp("plain")) as service:
        yield service


def flags_for(model: str, layout: ExpertLayout) -> dict[str, Any]:
    chosen: dict[str, Any] = {"train_mlp": False} if layout == "frozen" else {"expert_lora": layout}
    return {**chosen, "train_unembed": not any(name in model for name in HEADLESS)}


@pytest.mark.parametrize("layout", ["shared_outer", "per_expert", "frozen"])
def test_logprobs_are_the_trainers(service: ServiceClient, model: str, layout: ExpertLayout) -> None:
    """Of two adapters, one after the other; a process that was started for the other layout is replaced."""
    sampler = vllm_sampler(service, model)
    for seed in (0, 1):
        training = make_training_client(service, model, rank=4, seed=seed, **flags_for(model, layout))
        found = compare(training, snapshot(training), PROMPTS, 2, params())
        assert found.size == len(PROMPTS) * 2 * 16
        assert found.max() < LARGEST
    assert isinstance(sampler, VllmSampler) and sampler.stats.restarts == 0


def test_exports_are_read_without_options(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `recipes.export format=vllm` writes, in a vLLM that was started for no form of experts in particular."""

    def write_export(folder: Path, adapter: Adapter, base_model: str, form: ExpertForm) -> None:
        saved = folder.with_name(f"{folder.name}-peft")
        write_adapter(saved, adapter, base_model)
        convert_adapter(saved, folder, base_model, for_vllm=True)

    for module in ("worker_process", "adapters"):
        monkeypatch.setattr(f"tinker_local_backend.samplers.{module}.expert_option", lambda layout: None)
    monkeypatch.setattr("tinker_local_backend.samplers.adapters.write_adapter", write_export)
    monkeypatch.setattr(AdapterFiles, "is_3d", False)
    with plain_vllm(model, tmp_path) as service:
        for layout in ("shared_outer", "per_expert"):
            training = make_training_client(service, model, rank=4, **flags_for(model, layout))
            assert compare(training, snapshot(training), PROMPTS, 2, params()).max() < LARGEST
        assert vllm_sampler(service, model).stats.restarts == 0
