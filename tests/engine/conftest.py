"""One engine for all tests of the folder, on random models so small that a pass takes milliseconds.

It runs on the device and in the dtype that TINKER_TEST_DEVICE and TINKER_TEST_DTYPE name (devices.py).
"""

import faulthandler
import os
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

from benchmarks.architecture_configs import make_config
from benchmarks.gpu.stand_ins import graphs_for, varlen_on_a_cpu
from benchmarks.reference import Reference
from tests.engine.architectures import DENSE, pytest_generate_tests  # noqa: F401  (a hook of this folder)
from tests.engine.devices import here
from tests.engine.helpers import make_training_client, tokens_compared
from tests.engine.selection import (  # noqa: F401  (hooks of this folder)
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_report_collectionfinish,
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_testnodedown,
)
from tests.waiting import HANG_SECONDS
from tinker_local_backend import SamplingClient, ServiceClient, TrainingClient
from tinker_local_backend.engine import models
from tinker_local_backend.engine.cuda.execution import CudaExecution

TINY_CHAT = Path(__file__).resolve().parents[2] / "example_data" / "tiny_chat"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

KV_TOKENS = "TINKER_LOCAL_KV_CACHE_TOKENS"
KV_TOKENS_CUDA = "131072"
"""Of each model's cache on a GPU, unless the environment says otherwise: the default is half of what is free, for every model of
every process. 32 MiB with SHAPE."""

TEST_SECONDS = 2 * HANG_SECONDS
"""that a test may take, so that one whose own waits end says which of them did"""

SHAPE = {
    "vocab_size": 1536,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "eos_token_id": 1513,
    "pad_token_id": 1511,
    "bos_token_id": None,
    # Large enough that next-token distributions are far from uniform.
    "initializer_range": 0.2,
}


def write_model(config: PretrainedConfig, folder: Path, seed: int) -> str:
    """A random model and the shipped tokenizer in a folder."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    save_model(model, folder)
    for name in TOKENIZER_FILES:
        shutil.copy(TINY_CHAT / name, folder)
    return str(folder)


def save_model(model: Any, folder: Path | str) -> None:
    """In float32, with numbers that the engine's dtype has too: loading does not round them once more."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(here().dtype).float()
    model.save_pretrained(folder)


def small_config(architecture: str) -> PretrainedConfig:
    """One of benchmarks/architecture_configs.py, with distributions that are far from uniform too.

    Its weights are a little smaller than those of SHAPE: a delta rule has more rounding than attention.
    """
    config = make_config(architecture)
    config.initializer_range = 0.17
    return config


def with_random_biases(path: str) -> str:
    """The model in a folder with random biases and norms too: as they are initialised, a forgotten one would change nothing.

    States decay slowly: what is wrong in one is seen many tokens later, and the sum of their decays has little rounding. Time
    steps are long: transformers bounds them from below in Nemotron H's forward of a sequence, but not in that of one token.
    """
    model = AutoModelForCausalLM.from_pretrained(path)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or "bias" in name:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
            if name.endswith("A_log"):
                parameter -= 3
            if name.endswith("dt_bias") and hasattr(model.config, "time_step_min"):
                parameter += 5
    save_model(model, path)
    return path


@pytest.fixture(autouse=True, scope="session")
def engine_place() -> Iterator[None]:
    """The engine and the processes that tests start run where TINKER_TEST_DEVICE and TINKER_TEST_DTYPE say."""
    with pytest.MonkeyPatch.context() as patch, varlen_on_a_cpu():
        patch.setenv("TINKER_LOCAL_DEVICE", str(here().device))
        patch.setenv("TINKER_LOCAL_DTYPE", str(here().dtype).removeprefix("torch."))
        if here().captured:
            patch.setattr(models, "start", lambda model: CudaExecution(model, graphs_for(model.device)))
            # The CUDA path allocates its cache when a model is loaded, and the session keeps its models: 2 GiB for each of
            # test_families are more than the memory of a machine.
            patch.setattr("tinker_local_backend.engine.engine.DEFAULT_KV_BYTES_CPU", 32 << 20)
        if here().device.type == "cuda":
            patch.setenv(KV_TOKENS, os.environ.get(KV_TOKENS) or KV_TOKENS_CUDA)
        yield


@pytest.fixture(autouse=True)
def no_hangs_and_no_real_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A deadlock ends the test run with every thread's stack, and nothing is written to the user's folder."""
    monkeypatch.setenv("TINKER_LOCAL_HOME", str(tmp_path / "default-home"))
    for name in ("TINKER_LOCAL_SEED", KV_TOKENS, "TINKER_LOCAL_GRAD_ACCUM_STEPS"):
        if name != KV_TOKENS or here().device.type != "cuda":
            monkeypatch.delenv(name, raising=False)
    tokens_compared.clear()
    faulthandler.dump_traceback_later(TEST_SECONDS, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def one_token_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that count steps: a burst on a GPU, or of captured steps, has one step too."""
    monkeypatch.setattr("tinker_local_backend.engine.cuda.generation.BURST", 1)


@pytest.fixture(scope="session")
def written_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Writes a model of an architecture once. Returns its folder."""

    @cache
    def write(architecture: str) -> str:
        folder = tmp_path_factory.mktemp("models") / architecture
        if architecture == DENSE:
            return write_model(Qwen3Config(**SHAPE, tie_word_embeddings=True), folder, 1)
        return with_random_biases(write_model(small_config(architecture), folder, 1))

    return write


@pytest.fixture(scope="session")
def tied_model(request: pytest.FixtureRequest, written_model: Callable[[str], str]) -> str:
    """A Qwen3 whose head is its embedding, as in most small models; or the architecture that the test runs over."""
    return written_model(getattr(request, "param", DENSE))


@pytest.fixture(scope="session")
def delta_model(written_model: Callable[[str], str]) -> str:
    """Gated delta rules and attention, as in Qwen 3.5."""
    return written_model("qwen3_5_text")


@pytest.fixture(scope="session")
def mamba_model(written_model: Callable[[str], str]) -> str:
    """Mamba 2, attention, an MLP and experts, as in Nemotron H."""
    return written_model("nemotron_h")


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Llama with a head of its own."""
    return write_model(LlamaConfig(**SHAPE, tie_word_embeddings=False), tmp_path_factory.mktemp("models") / "llama", 2)


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tinker-home")


@pytest.fixture(scope="session")
def service(home: Path) -> Iterator[ServiceClient]:
    with ServiceClient(home=home) as service:
        yield service


@pytest.fixture(scope="session")
def reference(tied_model: str) -> Reference:
    """transformers' own tied_model in float64."""
    return Reference(tied_model)


@pytest.fixture(scope="session")
def base_sampler(service: ServiceClient, tied_model: str) -> SamplingClient:
    return service.create_sampling_client(base_model=tied_model).result()


@pytest.fixture
def training(service: ServiceClient, tied_model: str) -> TrainingClient:
    """A client whose adapter is not the identity."""
    return make_training_client(service, tied_model)


@pytest.fixture
def sampler(training: TrainingClient) -> SamplingClient:
    return training.save_weights_and_get_sampling_client().result()
