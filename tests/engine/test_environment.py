"""Environment variables of the engine: none is ignored, and what cannot be is said before a model is loaded."""

import logging
import os
import sys
from pathlib import Path

import pytest
import torch

from tests.engine.helpers import params, prompt
from tinker_local_backend import RequestError, ServiceClient, environment
from tinker_local_backend.engine.engine import Engine
from tinker_local_backend.engine.sampling import requests
from tinker_local_backend.samplers.vllm_settings import VllmSettings
from tinker_local_backend.storage.paths import check_writable


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(environment.PREFIX):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("TINKER_LOCAL_SMAPLER", "vllm", r"TINKER_LOCAL_SMAPLER is set.*did you mean TINKER_LOCAL_SAMPLER\?"),
        (
            "TINKER_LOCAL_ZZZ",
            "",
            r"no such variable; unset it. Known: .*TINKER_LOCAL_HOME.*TINKER_LOCAL_KV_CACHE_TOKENS",
        ),
        ("TINKER_LOCAL_VLLM_MAX_LORA", "8", r"TINKER_LOCAL_VLLM_MAX_LORA is set, but there is no such variable"),
        (
            "TINKER_LOCAL_VLLM_MAX_LORAS",
            "8",
            r"TINKER_LOCAL_VLLM_MAX_LORAS is set, but TINKER_LOCAL_SAMPLER is not vllm",
        ),
        ("TINKER_LOCAL_SAMPLER", "sglang", r"TINKER_LOCAL_SAMPLER='sglang' must be transformers or vllm"),
        ("TINKER_LOCAL_VLLM_URL", "host:8000", r"VLLM_URL='host:8000' must begin with http:// or https://"),
        ("TINKER_LOCAL_VLLM_PYTHON", "/no/python", r"VLLM_PYTHON='/no/python' is not an executable program"),
        ("TINKER_LOCAL_VLLM_GPU_MEMORY_UTILIZATION", "1.5", r"UTILIZATION='1.5' must be a number between 0 and 1"),
        ("TINKER_LOCAL_VLLM_GPU_MEMORY_UTILIZATION", "most", r"UTILIZATION='most' must be a number between 0 and 1"),
        ("TINKER_LOCAL_VLLM_ENFORCE_EAGER", "yes", r"VLLM_ENFORCE_EAGER='yes' must be 0 or 1"),
        ("TINKER_LOCAL_VLLM_RESTART_EVERY", "-1", r"VLLM_RESTART_EVERY='-1' must be at least 0"),
        ("TINKER_LOCAL_BACKEND", "jax", r"TINKER_LOCAL_BACKEND='jax' must be transformers"),
        ("TINKER_LOCAL_DTYPE", "fp16", r"TINKER_LOCAL_DTYPE='fp16' must be float32 or bfloat16"),
        ("TINKER_LOCAL_SEED", "-1", r"TINKER_LOCAL_SEED='-1' must be at least 0"),
        ("TINKER_LOCAL_GRAD_ACCUM_STEPS", "1.5", r"TINKER_LOCAL_GRAD_ACCUM_STEPS='1.5' must be an integer"),
        ("TINKER_LOCAL_DEVICE", "gpu", r"TINKER_LOCAL_DEVICE='gpu' must be cpu, cuda or cuda:N"),
        ("TINKER_LOCAL_DEVICE", "meta", r"TINKER_LOCAL_DEVICE='meta' must be cpu, cuda or cuda:N"),
    ],
)
def test_what_is_set_and_not_understood_ends_it(
    name: str, value: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(RequestError, match=error):
        ServiceClient(home=tmp_path)


def test_what_is_understood_is_read(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    values = {
        "TINKER_LOCAL_BACKEND": "transformers",
        "TINKER_LOCAL_SAMPLER": "transformers",
        "TINKER_LOCAL_SEED": "7",
        "TINKER_LOCAL_DEVICE": "cpu",
        "TINKER_LOCAL_DTYPE": "bfloat16",
        "TINKER_LOCAL_KV_CACHE_TOKENS": "",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    environment.check_environment()
    assert environment.read("TINKER_LOCAL_SEED") == 7
    assert environment.read("TINKER_LOCAL_KV_CACHE_TOKENS") is None
    assert environment.read("TINKER_LOCAL_HOME") is None
    assert environment.default_dtype(environment.default_device()) is torch.bfloat16
    assert not [record for record in caplog.records if "TINKER_LOCAL" in record.getMessage()]


def test_what_belongs_to_a_process_is_not_given_to_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_LOCAL_SAMPLER", "vllm")
    monkeypatch.setenv("TINKER_LOCAL_VLLM_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("TINKER_LOCAL_VLLM_MAX_LORAS", "2")
    environment.check_environment()
    monkeypatch.setenv("TINKER_LOCAL_VLLM_RESTART_EVERY", "50")
    with pytest.raises(
        RequestError, match=r"RESTART_EVERY is set together with TINKER_LOCAL_VLLM_URL.*unset TINKER_LOCAL_VLLM_RES"
    ):
        environment.check_environment()


def test_without_a_vllm_there_is_nothing_to_sample_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_LOCAL_SAMPLER", "vllm")
    with pytest.raises(
        RequestError, match=r"this Python has no vLLM: set TINKER_LOCAL_VLLM_PYTHON.*TINKER_LOCAL_VLLM_URL"
    ):
        environment.check_environment()
    monkeypatch.setenv("TINKER_LOCAL_VLLM_PYTHON", sys.executable)
    environment.check_environment()
    assert VllmSettings.from_environment(torch.device("cpu")).python == sys.executable


def test_unsloth_is_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("TINKER_LOCAL_BACKEND", "unsloth")
    environment._warn.cache_clear()
    environment.check_environment()
    environment.check_environment()
    (record,) = [record for record in caplog.records if "unsloth" in record.getMessage()]
    assert record.levelno == logging.WARNING


class TestDevices:
    @pytest.fixture(autouse=True)
    def no_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)

    @pytest.mark.parametrize(("cuda", "why"), [(None, "is built without CUDA"), ("13.0", "finds no CUDA device")])
    def test_cuda_that_is_not_there(self, cuda: str | None, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setenv("TINKER_LOCAL_DEVICE", "cuda")
        with pytest.raises(RequestError, match=rf"TINKER_LOCAL_DEVICE='cuda' asks for CUDA.*{why}; unset it") as error:
            environment.default_device()
        assert "\n" not in str(error.value)

    def test_a_device_beyond_the_last(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setenv("TINKER_LOCAL_DEVICE", "cuda:1")
        assert environment.default_device() == torch.device("cuda:1")
        monkeypatch.setenv("TINKER_LOCAL_DEVICE", "cuda:2")
        with pytest.raises(
            RequestError, match="'cuda:2' asks for a device that does not exist; there are 2, from cuda:0"
        ):
            environment.default_device()

    @pytest.mark.parametrize(
        ("cuda", "fix"), [(None, "is built for CPUs only; install"), ("13.0", "update the driver")]
    )
    @pytest.mark.parametrize("device", [None, "cpu"])
    def test_an_idle_gpu_is_a_warning_unless_the_cpu_is_meant(
        self,
        cuda: str | None,
        fix: str,
        device: str | None,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        (tmp_path / "nvidia-smi").touch(mode=0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setattr(torch.version, "cuda", cuda)
        if device is not None:
            monkeypatch.setenv("TINKER_LOCAL_DEVICE", device)
        environment._warn.cache_clear()
        environment.check_environment()
        told = [record.getMessage() for record in caplog.records if "NVIDIA" in record.getMessage()]
        assert [fix in message for message in told] == ([True] if device is None else [])


def test_a_home_that_cannot_be_written_to_is_found_before_the_model_loads(
    tmp_path: Path, tied_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(engine: Engine, name: str) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(Engine, "load", never)
    (tmp_path / "file").touch()
    monkeypatch.setenv("TINKER_LOCAL_HOME", str(tmp_path / "file" / "home"))
    with ServiceClient() as service:
        for create in (
            lambda: service.create_lora_training_client(tied_model),
            lambda: service.create_training_client_from_state("tinker://run/weights/a"),
        ):
            with pytest.raises(
                RequestError, match=r"cannot be written to .*file/home.*set TINKER_LOCAL_HOME to another"
            ):
                create()
    check_writable(tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []


def test_a_sample_without_max_tokens_fits_the_cache_and_says_so_once(
    tmp_path: Path, tied_model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    requests._warn_bounded.cache_clear()
    monkeypatch.setenv("TINKER_LOCAL_KV_CACHE_TOKENS", "40")
    with ServiceClient(home=tmp_path) as service:
        sampler = service.create_sampling_client(base_model=tied_model).result()
        for _ in range(2):
            (sequence,) = sampler.sample(prompt([1, 2, 3]), 1, params(None, stop=[])).result().sequences
            assert len(sequence.tokens) == 37
        with pytest.raises(RequestError, match="more than the KV cache budget of 40 tokens"):
            sampler.sample(prompt(list(range(45))), 1, params(None)).result()
    told = [record.getMessage() for record in caplog.records if "max_tokens is not given" in record.getMessage()]
    assert len(told) == 1
    assert "40 tokens together" in told[0]
