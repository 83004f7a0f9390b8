"""Exports of adapters on routed experts: for PEFT, for vLLM, merged; and hosted files through the functions for archives."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from tests.engine.conftest import write_model
from tests.engine.helpers import make_training_client, prompt
from tests.engine.test_foreign_adapters import CONFIGS, PREFIX, TOKENS, by_hand, hosted, logits, plain, write
from tinker_cookbook import weights
from tinker_cookbook.exceptions import ConfigurationError, WeightsAdapterError
from tinker_local_backend import ServiceClient


@pytest.fixture(scope="module", params=CONFIGS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(kind: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(CONFIGS[kind], tmp_path_factory.mktemp(kind), seed=1)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceClient]:
    with ServiceClient(home=tmp_path / "home") as service:
        yield service


def scores(model: Any) -> torch.Tensor:
    return logits(model).log_softmax(-1)[:-1].gather(1, TOKENS[0, 1:, None])[:, 0]


def test_an_export_computes_what_was_trained(kind: str, model: str, service: Any, tmp_path: Path) -> None:
    client = make_training_client(service, model)
    path = client.save_weights_for_sampler("mine").result().path
    sampler = service.create_sampling_client(path).result()
    expected = torch.tensor(sampler.compute_logprobs(prompt(TOKENS[0].tolist())).result()[1:])
    for format in ("adapter", "vllm", "merged"):
        exported = asyncio.run(weights.export(service, path, tmp_path / format, format))
        assert exported.base_model == model and (tmp_path / format / "README.md").is_file()
    assert "vllm serve" in (tmp_path / "vllm" / "README.md").read_text()
    for found in (
        PeftModel.from_pretrained(plain(model), str(tmp_path / "adapter")),
        plain(tmp_path / "merged"),
    ):
        torch.testing.assert_close(scores(found), expected, rtol=0, atol=5e-5)
    names = {
        format: {name.removeprefix(PREFIX) for name in load_file(tmp_path / format / "adapter_model.safetensors")}
        for format in ("adapter", "vllm")
    }
    one = "mlp.experts.3.down_proj.lora_B.weight"
    assert "mlp.experts.lora_B.weight" in names["adapter"] and one not in names["adapter"]
    assert (one in names["vllm"]) == (kind != "gpt_oss")
    with pytest.raises(ConfigurationError, match=r"dtype='float32'.*format=merged"):
        asyncio.run(weights.export(service, path, tmp_path / "more", "vllm", dtype="float32"))


def test_a_downloaded_hosted_adapter_becomes_an_adapter_or_a_model(kind: str, model: str, tmp_path: Path) -> None:
    tensors = hosted(kind)
    folder = str(write(tmp_path / "hosted", tensors))
    weights.build_hf_model(base_model=model, adapter_path=folder, output_path=str(tmp_path / "merged"), dtype="float32")
    expected = by_hand(kind, model, tensors)
    torch.testing.assert_close(logits(plain(tmp_path / "merged")), expected, rtol=1e-4, atol=1e-4)
    weights.build_lora_adapter(base_model=model, adapter_path=folder, output_path=str(tmp_path / "adapter"))
    names = set(load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    assert f"{PREFIX}self_attn.o_proj.lora_A.weight" in names and "base_model.model.lm_head.lora_A.weight" in names
    assert (f"{PREFIX}mlp.experts.0.up_proj.lora_B.weight" in names) == (kind != "gpt_oss")
    if kind != "deepseek_v3":  # which PEFT does not convert
        found = logits(PeftModel.from_pretrained(plain(model), str(tmp_path / "adapter")))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_one_that_does_not_fit_is_an_error_of_the_adapter(tmp_path: Path) -> None:
    other = write_model(CONFIGS["gpt_oss"], tmp_path / "model", seed=1)
    folder = str(
        write(tmp_path / "hosted", {**hosted("gpt_oss"), f"{PREFIX}mlp.gate.lora_A.weight": torch.ones(3, 32)})
    )
    with pytest.raises(WeightsAdapterError, match=r"mlp\.gate, which is neither a linear nor experts"):
        weights.build_lora_adapter(base_model=other, adapter_path=folder, output_path=str(tmp_path / "adapter"))
    assert not (tmp_path / "adapter").exists()
