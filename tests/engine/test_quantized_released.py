"""Released checkpoints that are dequantised when they are loaded, and what is refused before any weight is read."""

import importlib.util
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GptOssConfig, Qwen3Config, Qwen3MoeConfig

from benchmarks.reference import Reference
from tests.engine.conftest import small_config, write_model
from tests.engine.devices import here
from tests.engine.helpers import assert_near, datum, make_training_client, params, prompt, random_tokens
from tests.engine.quantized_models import (
    MADE,
    RELEASED,
    WIDE,
    Write,
    needs,
    write_fp8,
    write_int4,
    write_mxfp4,
    write_plain,
)
from tests.engine.test_checkpoints import train
from tinker_local_backend import ModelLoadError, RequestError, ServiceClient
from tinker_local_backend.engine.model import loading
from tinker_local_backend.engine.model.quantization import VARIABLE
from tinker_local_backend.engine.models import load_model
from tinker_local_backend.environment import check_environment, describe
from tinker_local_backend.merge import merge_adapter

RANK = 4
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MIXTURES: dict[str, tuple[Any, dict[str, Any], Write, list[str]]] = {
    "fp8": (Qwen3MoeConfig, EXPERTS, write_fp8, []),
    "int4": (Qwen3MoeConfig, EXPERTS, write_int4, ["compressed-tensors"]),
    "mxfp4": (GptOssConfig, GPT_OSS, write_mxfp4, []),
}


def folders(base: Path, *names: str) -> list[Path]:
    paths = [base / name for name in names]
    for path in paths:
        path.mkdir()
    return paths


@pytest.fixture
def dense(tmp_path: Path) -> str:
    return write_model(Qwen3Config(**WIDE), tmp_path / "dense", 3)


@pytest.fixture
def no_weight_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def auto_class(config: Any) -> Any:
        raise AssertionError("weights would be read")

    monkeypatch.setattr(loading, "auto_class", auto_class)


@pytest.mark.skipif(here().dtype != torch.float32, reason="in 16 bits a token may go to another expert than in float64")
@pytest.mark.parametrize("name", [pytest.param(name, marks=needs(*case[3])) for name, case in MIXTURES.items()])
def test_quantized_experts_are_dequantized_with_a_warning(
    name: str, service: ServiceClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kind, fields, write, _ = MIXTURES[name]
    plain, released, copy = folders(tmp_path, "plain", "released", "copy")
    path = write(write_model(kind(**{**WIDE, **fields}), plain, 5), released)
    with caplog.at_level(logging.WARNING):
        client = make_training_client(service, path, RANK, train_mlp=False)
    (told,) = [record.getMessage() for record in caplog.records if "dequantized" in record.getMessage()]
    assert path in told and "take the memory of plain ones: quantized routed experts" in told
    reference = Reference(write_plain(path, copy, quantization_config=dequantizing(path)))
    tokens = random_tokens(12, 0)
    sampler = client.save_weights_and_get_sampling_client().result()
    (sequence,) = sampler.sample(prompt(tokens), 1, params(12, stop=[], seed=0)).result().sequences
    expected = reference.completion_logprobs(tokens, sequence.tokens, reference.adapter_of(client), 32 / RANK)
    assert_near(sequence.logprobs, expected, atol=3e-5)


def dequantizing(path: str) -> Any:
    from transformers.quantizers.auto import AutoQuantizationConfig

    config = json.loads((Path(path) / "config.json").read_text())["quantization_config"]
    return AutoQuantizationConfig.from_dict({**config, "dequantize": True})


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs(*case[1])) for name, case in RELEASED.items()])
def test_none_makes_plain_weights(
    name: str, dense: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (released,) = folders(tmp_path, "released")
    path = RELEASED[name][0](dense, released)
    monkeypatch.setenv(VARIABLE, "none")
    model = load_model(path)
    assert not model.quantized and all(linear.weight.dtype == model.dtype for linear in model.linears.values())
    monkeypatch.delenv(VARIABLE)
    kept = load_model(path)
    assert bool(kept.quantized) == (name != "fp8" or here().device.type == "cuda")
    for path, linear in model.linears.items():
        if (quantized := kept.linears[path].quantized) is not None:
            assert torch.equal(quantized.dequantized(model.dtype), linear.weight)


@needs("torchao")
def test_a_model_without_a_linear_that_can_be_quantized_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-2's are of a class of their own, which bitsandbytes quantizes and torchao does not."""
    path = write_model(small_config("gpt2"), tmp_path, 0)
    monkeypatch.setenv(VARIABLE, "fp8")
    with pytest.raises(ModelLoadError, match=f"cannot be loaded: {VARIABLE}: it has no linears"):
        load_model(path)


@needs("bitsandbytes")
@pytest.mark.parametrize("name", ["nf4", "int8"])
@pytest.mark.parametrize("architecture", ["gpt2", "qwen3_5_text", "nemotron_h", "deepseek_v3"])
def test_other_architectures_are_sampled_trained_and_merged(
    name: str, architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that are (in, out), recurrent layers, weights that are read and not called, latent attention."""
    if architecture == "gpt2" and here().captured:
        pytest.skip("GPT-2's own code makes a tensor from a number in every pass, so nothing of it is captured")
    path = write_model(small_config(architecture), tmp_path / "model", 0)
    monkeypatch.setenv(VARIABLE, name)
    tokens = random_tokens(9, 0)
    with ServiceClient(home=tmp_path / "home") as service:
        client = make_training_client(service, path, RANK)
        assert client._run.model.quantized
        train(client, range(1))
        sampler = client.save_weights_and_get_sampling_client().result()
        (sequence,) = sampler.sample(prompt(tokens), 1, params(8, stop=[], seed=0)).result().sequences
        whole = [*tokens, *sequence.tokens]
        given = {"target_tokens": whole[1:], "weights": [1.0] * (len(whole) - 1)}
        (output,) = client.forward([datum(whole[:-1], **given)], "cross_entropy").result().loss_fn_outputs
        assert_near(sequence.logprobs, output["logprobs"].to_numpy()[len(tokens) - 1 :], atol=3e-5)
        saved = client.save_weights_for_sampler("to-merge").result().path
    result = merge_adapter(saved, tmp_path / "merged", home=tmp_path / "home")
    assert result.dequantized == name and result.max_abs_diff < 1e-3 * result.max_abs_effect


@pytest.mark.usefixtures("no_weight_is_read")
class TestRefusals:
    @pytest.mark.parametrize("name", ["nf4", "int8", "torchao", "int4"])
    def test_a_released_model_without_its_package(
        self, name: str, dense: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        method = {"nf4": "bitsandbytes", "int8": "bitsandbytes", "int4": "compressed-tensors"}.get(name, name)
        hide(monkeypatch, method)
        quantization = {"quant_method": method, "load_in_8bit": name == "int8", "bnb_4bit_quant_type": "nf4"}
        with pytest.raises(ModelLoadError, match=rf"which needs {method}: pip install '{method}>=") as refusal:
            load_model(with_quantization(dense, tmp_path, quantization))
        assert "\n" not in str(refusal.value)

    @pytest.mark.parametrize("name", list(MADE))
    def test_quantizing_without_the_package(self, name: str, dense: str, monkeypatch: pytest.MonkeyPatch) -> None:
        hide(monkeypatch, MADE[name])
        monkeypatch.setenv(VARIABLE, name)
        match = rf"^model '.*': {VARIABLE}={name}, which needs {MADE[name]}: pip install '{MADE[name]}>=[\d.]+'$"
        with pytest.raises(ModelLoadError, match=match):
            load_model(dense)

    @pytest.mark.parametrize(
        ("quantization", "asked"),
        [
            ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "nf4"),
            ({"quant_method": "mxfp4"}, "int8"),
            ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "int8"),
            ({"quant_method": "torchao"}, "fp8"),
        ],
    )
    def test_a_checkpoint_that_is_quantized_in_another_way(
        self, quantization: dict[str, Any], asked: str, dense: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(VARIABLE, asked)
        with pytest.raises(ModelLoadError, match=rf"has weights in .*, not in {VARIABLE}={asked}: unset it"):
            load_model(with_quantization(dense, tmp_path, quantization))

    def test_a_method_that_is_not_known(self, dense: str, tmp_path: Path) -> None:
        match = r"\(qwen3\) is quantized with gptq; the local engine loads bitsandbytes, compressed-tensors, fp8"
        with pytest.raises(ModelLoadError, match=match):
            load_model(with_quantization(dense, tmp_path, {"quant_method": "gptq", "bits": 4}))

    def test_weights_that_would_be_divided(self, dense: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TINKER_LOCAL_BASE_WEIGHTS", "sharded")
        path = with_quantization(dense, tmp_path, {"quant_method": "fp8", "weight_block_size": [128, 128]})
        with pytest.raises(ModelLoadError, match=rf"=sharded cannot shard: unset it, or set {VARIABLE}=none"):
            load_model(path)


def with_quantization(dense: str, folder: Path, quantization: dict[str, Any]) -> str:
    config = json.loads((Path(dense) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return str(folder)


def hide(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    find, hidden = importlib.util.find_spec, package.replace("-", "_")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == hidden else find(name, *rest))


class TestVariable:
    @pytest.mark.parametrize("value", ["int4", "NF4"])
    def test_a_wrong_value(self, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(VARIABLE, value)
        with pytest.raises(RequestError, match=f"^{VARIABLE}='{value}' must be nf4 or int8 or fp8 or none$"):
            check_environment()

    @pytest.mark.parametrize(
        ("other", "value", "why"),
        [
            ("TINKER_LOCAL_SAMPLER", "vllm", "would sample from other weights than are trained; unset one of them"),
            ("TINKER_LOCAL_BASE_WEIGHTS", "sharded", "cannot be divided; unset one of them"),
        ],
    )
    def test_what_cannot_go_with_it(self, other: str, value: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(VARIABLE, "nf4")
        monkeypatch.setenv(other, value)
        monkeypatch.setenv("TINKER_LOCAL_VLLM_URL", "http://nowhere")
        if value != "vllm":
            monkeypatch.delenv("TINKER_LOCAL_VLLM_URL")
        with pytest.raises(RequestError, match=why):
            check_environment()

    def test_it_is_described(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert "quantization" not in describe()
        monkeypatch.setenv(VARIABLE, "nf4")
        assert describe()["quantization"] == "nf4"
