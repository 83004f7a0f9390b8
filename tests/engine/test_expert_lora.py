"""Adapters on routed experts: products and gradients against merged weights, both layouts, mixed batches, files, mistakes."""

import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, Qwen3MoeConfig

from tests.engine.conftest import SHAPE, write_model
from tests.engine.helpers import (
    STEP,
    assert_near,
    assert_repeats,
    cross_entropy_datum,
    datum,
    make_training_client,
    params,
    prompt,
    random_tokens,
)
from tests.engine.test_checkpoints import folder, train, weights
from tests.engine.test_experts import EXACT, KINDS, PRECISION, TOKENS, WIDTH, make_experts, routed
from tests.engine.test_families import write_family
from tinker_cookbook.models.hyperparameters import get_lora_param_count
from tinker_local_backend import CheckpointError, RequestError, ServiceClient
from tinker_local_backend.engine.cuda.adapter_slots import SLOTS, AdapterSlots
from tinker_local_backend.engine.model.expert_matrices import ExpertMatrix, from_peft, matrices_of, to_peft
from tinker_local_backend.engine.model.experts import EXPERTS_NAME, use_adapters
from tinker_local_backend.engine.model.grouped_experts import GROUPED_NAME
from tinker_local_backend.engine.model.lora import Adapter, AdapterRouting, Spans, group_rows
from tinker_local_backend.engine.model.lora_spec import ExpertLayout, LoraSpec
from tinker_local_backend.engine.model.lora_targets import LoraTargets
from tinker_local_backend.storage.database import REGISTRY_FILE
from tinker_local_backend.storage.registry import Registry

LAYOUTS: tuple[ExpertLayout, ...] = ("shared_outer", "per_expert")
RANK, PATH = 3, "layers.0.experts"


def make_adapter(experts: Any, layout: ExpertLayout, seed: int, alpha: float = 6.0) -> Adapter:
    """Random matrices in float64, as leaves."""
    matrices, generator = matrices_of(PATH, experts, layout), torch.Generator().manual_seed(seed)
    a, b = {}, {}
    for matrix in matrices:
        for table, shape in zip((a, b), matrix.shapes(RANK), strict=True):
            table[matrix.name] = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
    return Adapter(LoraSpec(RANK, alpha=alpha, experts=layout), a, b, experts=tuple(matrices))


def merged(kind: str, adapter: Adapter) -> Any:
    """transformers' experts whose weights have the adapter's products added, differentiable by its matrices."""
    module = make_experts(kind, "eager")
    for matrix in adapter.experts:
        delta = adapter.spec.scale * adapter.b[matrix.name] @ adapter.a[matrix.name]
        weight = getattr(module, matrix.tensor)
        by_output = weight.transpose(1, 2) if module.is_transposed else weight
        at = torch.arange(by_output.shape[1])[matrix.columns]
        changed = by_output.index_add(1, at, delta.expand(len(by_output), -1, -1))
        module.__dict__[matrix.tensor] = changed.transpose(1, 2) if module.is_transposed else changed
        module._parameters.pop(matrix.tensor, None)
    return module


def with_adapters(kind: str, name: str) -> tuple[Any, AdapterRouting]:
    """Experts that compute in one of our ways, and what says which rows use which adapter."""
    module, routing = make_experts(kind, name, PRECISION.get(name, EXACT)[0]), AdapterRouting()
    assert use_adapters(module, PATH, routing)
    return module, routing


@pytest.mark.parametrize("name", [EXPERTS_NAME, GROUPED_NAME])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_products_and_gradients_are_those_of_merged_weights(kind: str, layout: ExpertLayout, name: str) -> None:
    x, index, shares = routed()
    ours, routing = with_adapters(kind, name)
    adapter = make_adapter(ours, layout, seed=1)
    dtype, bound = PRECISION.get(name, EXACT)
    found = []
    for module, used in ((ours, dtype), (merged(kind, adapter), torch.float64)):
        leaves = [x.to(used, copy=True).requires_grad_(), shares.to(used, copy=True).requires_grad_()]
        with routing.use([(slice(None), adapter)]):
            out = module(leaves[0], index, leaves[1])
        gradient = torch.linspace(-1, 1, out.numel(), dtype=used).view(out.shape)
        found.append([out.detach(), *torch.autograd.grad(out, [*leaves, *adapter.parameters()], gradient)])
    assert (found[1][0] - make_experts(kind, "eager")(x, index, shares)).abs().max() > 1, "the adapter does something"
    for one, other in zip(*found, strict=True):
        assert other.abs().max() > 1e-3
        torch.testing.assert_close(one.double(), other, rtol=bound, atol=bound * float(other.abs().max()))


@pytest.mark.parametrize("name", [EXPERTS_NAME, GROUPED_NAME])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_several_adapters_and_of_none_get_their_own(kind: str, layout: ExpertLayout, name: str) -> None:
    x, index, shares = routed()
    ours, routing = with_adapters(kind, name)
    adapters = [make_adapter(ours, layout, seed=1), make_adapter(ours, layout, seed=2, alpha=1.5)]
    owners = [(None, *adapters)[i % 3] for i in range(TOKENS)]
    dtype, bound = PRECISION.get(name, EXACT)
    with torch.no_grad():
        spans: Spans = group_rows(owners, torch.device("cpu"))
        with routing.use(spans):
            found = ours(x.to(dtype), index, shares.to(dtype)).double()
        for owner in (None, *adapters):
            rows = [i for i in range(TOKENS) if owners[i] is owner]
            alone = make_experts(kind, "eager") if owner is None else merged(kind, owner)
            expected = alone(x, index, shares)
            torch.testing.assert_close(
                found[rows], expected[rows], rtol=bound, atol=bound * float(expected.abs().max())
            )


class Targets(LoraTargets):
    """Of one experts module."""

    def __init__(self, experts: Any):
        self._experts = {PATH: experts}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_in_slots_give_what_spans_give(kind: str, layout: ExpertLayout) -> None:
    """As in a captured step: some rows idle or of the base model, and an adapter that was evicted leaves nothing behind."""
    x, index, shares = (t.float() if t.is_floating_point() else t for t in routed())
    ours, routing = with_adapters(kind, GROUPED_NAME)
    slots = AdapterSlots([], torch.float32, torch.device("cpu"), Targets(ours))
    adapters = [make_adapter(ours, layout, seed, alpha=1.0 + seed) for seed in range(SLOTS + 2)]
    assert slots.fit(adapters[:2])
    with torch.no_grad():
        for used in (adapters[:3], adapters[3:6], adapters[6:9], adapters[-3:]):
            owners = [(None, *used)[i % 4] for i in range(TOKENS)]
            slots.fit([*used])
            at = torch.tensor([SLOTS if slot < 0 else slot for slot in slots.assign(owners)])
            with routing.use_slots(lambda *_: None, slots.on_experts(at)):
                found = ours(x, index, shares)
            with routing.use(group_rows(owners, torch.device("cpu"))):
                expected = ours(x, index, shares)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_slots_hold_one_layout_and_say_when_they_move() -> None:
    ours, _ = with_adapters("gated", GROUPED_NAME)
    slots = AdapterSlots([], torch.float64, torch.device("cpu"), Targets(ours))
    shared, separate = (make_adapter(ours, layout, seed=0) for layout in LAYOUTS)
    assert slots.fit([shared]) and not slots.fit([shared])
    before = slots.a[f"{PATH}.gate_proj"].shape
    assert slots.fit([separate]) and f"{PATH}.gate_proj" not in slots.a
    assert slots.fit([shared]) and slots.a[f"{PATH}.gate_proj"].shape == before
    with pytest.raises(ValueError, match="shared_outer and per_expert"):
        slots.fit([shared, separate])


@pytest.mark.parametrize(
    ("kind", "columns"),
    [
        ("gated", [slice(0, 8), slice(8, 16)]),
        ("transposed, with biases", [slice(0, 16, 2), slice(1, 16, 2)]),
    ],
)
def test_gate_and_up_are_halves_or_every_other_output(kind: str, columns: list[slice]) -> None:
    gate, up, down = matrices_of(PATH, make_experts(kind, "eager"), "shared_outer")
    assert [gate.columns, up.columns] == columns and gate.tensor == up.tensor == "gate_up_proj"
    assert gate.shapes(4) == ((1, 4, WIDTH), (7, 8, 4)) and down.shapes(4) == ((7, 4, 8), (1, WIDTH, 4))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_stored_for_peft_gives_the_same_bits_back(kind: str, layout: ExpertLayout) -> None:
    adapter = make_adapter(make_experts(kind, "eager"), layout, seed=4)
    stored = to_peft(adapter.experts, (adapter.a, adapter.b))
    for table, found in zip((adapter.a, adapter.b), from_peft(adapter.experts, RANK, stored), strict=True):
        assert table.keys() == found.keys() and all(torch.equal(table[name], found[name]) for name in table)


def test_a_parameter_count_is_that_of_the_hosted_service(tmp_path: Path) -> None:
    for config in (
        Qwen3MoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
        GptOssConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
    ):
        path = tmp_path / config.model_type
        write_model(config, path, 0)
        with ServiceClient() as service:
            for part in ("train_mlp", "train_attn", "train_unembed"):
                flags: dict[str, Any] = {"train_mlp": False, "train_attn": False, "train_unembed": False, part: True}
                client = service.create_lora_training_client(str(path), 6, 0, **flags).result()
                count = sum(matrix.numel() for matrix in client._run.state.adapter.parameters())
                assert count == get_lora_param_count(str(path), lora_rank=6, **flags), (config.model_type, part)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {name: write_family(name, tmp_path_factory.mktemp(name)) for name in ("qwen2-moe", "gpt-oss")}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["qwen2-moe", "gpt-oss"])
def test_sampled_and_trained_logprobs_agree_for_two_adapters_at_once(
    name: str, layout: ExpertLayout, service: ServiceClient, paths: dict[str, str]
) -> None:
    clients = [make_training_client(service, paths[name], seed=seed, expert_lora=layout) for seed in (0, 1)]
    samplers = [client.save_weights_and_get_sampling_client("now").result() for client in clients]
    samplers.append(service.create_sampling_client(base_model=paths[name]).result())
    pending = [s.sample(prompt(random_tokens(9, 3)), 3, params(20, stop=[], seed=i)) for i, s in enumerate(samplers)]
    for client, sampler, sampled in zip([*clients, None], samplers, pending, strict=True):
        for sequence in sampled.result().sequences:
            whole = [*random_tokens(9, 3), *sequence.tokens]
            scored = sampler.compute_logprobs(prompt(whole)).result()[9:]
            assert_near(torch.tensor(sequence.logprobs), torch.tensor(scored), atol=1e-4)
            if client is None:
                continue
            scores = datum(whole[:-1], target_tokens=np.array(whole[1:]), weights=np.ones(len(whole) - 1, np.float32))
            output = client.forward([scores], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
            assert_near(torch.tensor(sequence.logprobs), torch.from_numpy(output)[8:], atol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_goes_on_as_if_it_had_never_stopped(
    layout: ExpertLayout, service: ServiceClient, paths: dict[str, str]
) -> None:
    first = make_training_client(service, paths["gpt-oss"], expert_lora=layout)
    train(first, range(2))
    path = first.save_state("half").result().path
    train(first, range(2, 4))
    through = service.create_training_client_from_state_with_optimizer(path).result()
    assert through._run.state.adapter.spec.experts == layout
    train(through, range(2, 4))
    assert_repeats(weights(first), weights(through))
    moved = [name for name in first._run.state.adapter.a if ".experts." in name]
    assert len(moved) == (3 if layout == "shared_outer" else 2) * SHAPE["num_hidden_layers"]


def test_the_environment_chooses_and_an_argument_wins(
    service: ServiceClient, paths: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_LOCAL_EXPERT_LORA", "per_expert")
    chosen = service.create_lora_training_client(paths["qwen2-moe"], 4).result()
    named = service.create_lora_training_client(paths["qwen2-moe"], 4, expert_lora="shared_outer").result()
    without = service.create_lora_training_client(paths["qwen2-moe"], 4, train_mlp=False).result()
    found = [client._run.state.adapter.spec.experts for client in (chosen, named, without)]
    assert found == ["per_expert", "shared_outer", "frozen"]
    monkeypatch.setenv("TINKER_LOCAL_EXPERT_LORA", "shared")
    with pytest.raises(
        RequestError, match="TINKER_LOCAL_EXPERT_LORA='shared' must be shared_outer or per_expert or frozen"
    ):
        service.create_lora_training_client(paths["qwen2-moe"], 4).result()


def test_experts_asked_of_a_dense_model_are_refused_before_weights_load(
    tied_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinker_local_backend.engine.model.loading.load_module", lambda *_: pytest.fail("loaded"))
    with ServiceClient(home=tmp_path) as service:
        with pytest.raises(RequestError, match="has no routed experts; leave it out"):
            service.create_lora_training_client(tied_model, 4, expert_lora="per_expert").result()
        wrong: Any = "outer"
        with pytest.raises(RequestError, match="expert_lora must be shared_outer or per_expert or frozen, got 'outer'"):
            service.create_lora_training_client(tied_model, 4, expert_lora=wrong)


def test_a_state_of_another_layout_is_refused(service: ServiceClient, paths: dict[str, str]) -> None:
    shared, separate = (make_training_client(service, paths["qwen2-moe"], expert_lora=layout) for layout in LAYOUTS)
    path = shared.save_state("x").result().path
    with pytest.raises(CheckpointError, match=r"experts='shared_outer'.*this client has .*experts='per_expert'"):
        separate.load_state(path).result()


def rewrite(path: Path, change: Any) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_matrices_that_a_layout_cannot_hold_are_refused(
    service: ServiceClient, home: Path, paths: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinker_local_backend.storage.checkpoints._check_unchanged", lambda *_: None)
    client = make_training_client(service, paths["qwen2-moe"], expert_lora="shared_outer")
    gate_up = "base_model.model.model.layers.0.mlp.experts.base_layer"

    def set_one(name: str, at: tuple[int, int]) -> Any:
        return lambda tensors: tensors[name].__setitem__(at, 7.0)

    for i, (change, message) in enumerate(
        (
            (set_one(f"{gate_up}.lora_A.weight", (0, 0)), "have separate factors where this layout shares one"),
            (set_one(f"{gate_up}.lora_B.weight", (0, 5 * 6)), "have one matrix for gate and up"),
            (lambda tensors: tensors.update({f"{gate_up}.lora_A.weight": torch.zeros(2, 2)}), "have the shapes"),
        )
    ):
        saved = client.save_weights_for_sampler(f"changed-{i}").result().path
        rewrite(folder(home, saved) / "adapter_model.safetensors", change)
        with pytest.raises(CheckpointError, match=message):
            service.create_sampling_client(saved).result()


def test_a_registry_from_before_has_runs_that_left_experts_frozen(tmp_path: Path, paths: dict[str, str]) -> None:
    with ServiceClient(home=tmp_path) as service:
        client = service.create_lora_training_client(paths["qwen2-moe"], 4).result()
        run_id = client.model_id
    with sqlite3.connect(tmp_path / REGISTRY_FILE) as connection:
        assert connection.execute("SELECT lora_experts FROM runs").fetchall() == [("shared_outer",)]
        connection.execute("ALTER TABLE runs DROP COLUMN lora_experts")
        connection.execute("PRAGMA user_version = 1")
    connection.close()
    (run,) = Registry(tmp_path).runs()
    assert run.run_id == run_id and run.spec.experts == "frozen"


def test_it_learns_with_the_experts_alone(service: ServiceClient, paths: dict[str, str]) -> None:
    """With everything else frozen: the loss falls, and no weight of the model moves."""
    client = service.create_lora_training_client(paths["gpt-oss"], 8, 0, True, False, False).result()
    module = client._run.model.module
    before = {name: weight.clone() for name, weight in module.named_parameters()}
    data, losses = [cross_entropy_datum(24, seed) for seed in range(2)], []
    for _ in range(8):
        output = client.forward_backward(data, "cross_entropy").result()
        losses.append(output.metrics["loss:sum"])
        client.optim_step(STEP).result()
    assert losses[-1] < 0.8 * losses[0]
    assert all(torch.equal(weight, before[name]) for name, weight in module.named_parameters())


def test_a_matrix_names_its_place(paths: dict[str, str]) -> None:
    (matrix, *_) = matrices_of("m", make_experts("without a gate", "eager"), "shared_outer")
    assert (
        matrix == ExpertMatrix("m", "up_proj", "up_proj", 7, WIDTH, 8, slice(0, 8), "a") and matrix.name == "m.up_proj"
    )
