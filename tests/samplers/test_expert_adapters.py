"""What the sampler tells vLLM of adapters on routed experts, and the files it writes for each layout."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker
from safetensors.torch import load_file
from transformers import NemotronHConfig, Qwen3MoeConfig

from tests.engine.conftest import write_model
from tests.engine.helpers import make_training_client, prompt
from tests.samplers.conftest import HEAD_DIM_32, StandIn, likeliest_after
from tinker_local_backend import ModelLoadError, RequestError, ServiceClient
from tinker_local_backend.engine.model.lora_spec import ExpertLayout
from tinker_local_backend.samplers.adapters import AdapterFiles
from tinker_local_backend.samplers.transport import Accepts
from tinker_local_backend.samplers.vllm_server import VllmServer, _Refused

EXPERTS, WIDTH, INNER, RANK = 6, 64, 32, 4
ONE_TOKEN = tinker.SamplingParams(max_tokens=1, stop=[])


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = Qwen3MoeConfig(**HEAD_DIM_32, num_experts=EXPERTS, num_experts_per_tok=2, moe_intermediate_size=INNER)
    return write_model(config, tmp_path_factory.mktemp("experts"), seed=5)


@pytest.fixture(scope="session")
def likeliest(model: str) -> list[float]:
    return likeliest_after(model)


@pytest.fixture
def service(stand_in: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServiceClient]:
    monkeypatch.setattr("tinker_local_backend.samplers.worker_process.refuse_experts_on_cpu", lambda model: None)
    with ServiceClient(home=tmp_path / "home") as service:
        yield service


def sample(service: ServiceClient, model: str, layout: ExpertLayout) -> None:
    """One token with a new adapter."""
    train_mlp = layout != "frozen"
    client = make_training_client(
        service, model, rank=RANK, train_mlp=train_mlp, expert_lora=layout if train_mlp else None
    )
    client.save_weights_and_get_sampling_client().result().sample(prompt([1, 40]), 1, ONE_TOKEN).result()


def options(stand_in: StandIn) -> list[list[str]]:
    """Of each process."""
    return [[key for key in arguments if key.startswith("enable_m")] for arguments in stand_in.arguments]


def test_shared_factors_are_written_once_and_vllm_is_started_to_read_them(
    service: ServiceClient, stand_in: StandIn, model: str
) -> None:
    sample(service, model, "shared_outer")
    (folder,) = (Path(order["adapter"][2]) for order in stand_in.told("add"))
    assert [order["adapter"][3] for order in stand_in.told("add")] == [False]
    assert options(stand_in) == [["enable_moe_shared_loras"]]
    tensors = load_file(folder / "adapter_model.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if ".experts." in name}
    prefix = "base_model.model.model.layers.1.mlp.experts."
    assert {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)} == {
        "w1.lora_A.weight": (1, RANK, WIDTH),
        "w1.lora_B.weight": (EXPERTS, INNER, RANK),
        "w2.lora_A.weight": (EXPERTS, RANK, INNER),
        "w2.lora_B.weight": (1, WIDTH, RANK),
        "w3.lora_A.weight": (1, RANK, WIDTH),
        "w3.lora_B.weight": (EXPERTS, INNER, RANK),
    }


def test_the_process_is_replaced_for_the_other_layout_alone(
    service: ServiceClient, stand_in: StandIn, model: str
) -> None:
    for layout in ("frozen", "shared_outer", "frozen", "per_expert", "frozen", "per_expert"):
        sample(service, model, layout)
    assert options(stand_in) == [["enable_moe_shared_loras"], ["enable_mixed_moe_lora_format"]]
    assert [order["adapter"][3] for order in stand_in.told("add")] == [False, False, False, True, False, True]


def test_the_layout_of_the_environment_is_the_first(
    service: ServiceClient, stand_in: StandIn, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_LOCAL_EXPERT_LORA", "per_expert")
    sample(service, model, "per_expert")
    assert options(stand_in) == [["enable_mixed_moe_lora_format"]]


def test_experts_on_a_cpu_are_refused_with_the_fix(stand_in: StandIn, model: str, tmp_path: Path) -> None:
    fix = r"routed experts.*Triton.*TINKER_LOCAL_SAMPLER=transformers"
    with ServiceClient(home=tmp_path / "home") as service, pytest.raises(ModelLoadError, match=fix):
        service.create_sampling_client(base_model=model).result()
    assert stand_in.arguments == []


def test_one_matrix_of_each_expert_without_a_gate_is_refused(
    service: ServiceClient, stand_in: StandIn, tmp_path: Path
) -> None:
    shape = {**HEAD_DIM_32, "num_hidden_layers": 2, "n_routed_experts": 4, "num_experts_per_tok": 2}
    config = NemotronHConfig(**shape, layers_block_type=["attention", "moe"], moe_intermediate_size=16)
    path = write_model(config, tmp_path / "ungated", seed=3)
    stand_in.write(probe=likeliest_after(path))
    sample(service, path, "shared_outer")
    with pytest.raises(RequestError, match=r"without a gate.*TINKER_LOCAL_EXPERT_LORA=shared_outer"):
        sample(service, path, "per_expert")


@pytest.mark.parametrize(
    ("layout", "is_3d", "option"),
    [
        ("shared_outer", False, "--enable-lora, --enable-moe-shared-loras, --max"),
        ("per_expert", True, "--enable-lora, --enable-mixed-moe-lora-format, --max"),
        ("frozen", False, "--enable-lora, --max"),
    ],
)
def test_a_server_is_told_the_form_and_an_error_names_its_option(
    layout: ExpertLayout, is_3d: bool, option: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told = []

    async def refuse(self: VllmServer, method: str, path: str, body: dict | None = None) -> None:
        if body is not None:
            told.append(body["is_3d_lora_weight"])
        raise _Refused("no")

    monkeypatch.setattr(VllmServer, "_ask", refuse)
    server = VllmServer("http://127.0.0.1:9", None, Accepts(4), lambda event: None)
    try:
        with pytest.raises(_Refused, match=f"was not loaded: no; start the server with {option}"):
            asyncio.run(server._load_now(AdapterFiles(1, "one", tmp_path, layout)))
    finally:
        server.close()
    assert told == [is_3d]
