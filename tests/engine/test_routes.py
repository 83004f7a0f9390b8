"""Routing replay: the experts of sampling are chosen again, with the weights of the router that trains."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from benchmarks.architectures import write_model
from benchmarks.ours import sampled_datum
from tests.engine.devices import here
from tests.engine.helpers import (
    STEP,
    assert_close,
    drop_gradients,
    gradients,
    make_training_client,
    params,
    prompt,
    random_tokens,
)
from tests.engine.test_families import write_family
from tinker_local_backend import RequestError, ServiceClient, TrainingClient
from tinker_local_backend.engine.model.attention import PackedPlan
from tinker_local_backend.engine.model.passes import Pass, running
from tinker_local_backend.engine.model.routes import FREE, Replay
from tinker_local_backend.engine.models import load_model
from tinker_local_backend.engine.training.provenance import Sampled

LOSS, REPLAY = "importance_sampling", {"route_replay": 1}
PROMPT = random_tokens(9, 0)
ROUTERS = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "nemotron_h", "glm4_moe", "ernie4_5_moe")
"""Softmax before and after the choice, sigmoids with a bias, groups of experts, a scaled sum."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_family("qwen2-moe", tmp_path_factory.mktemp("qwen2-moe"))


def sampled(client: TrainingClient, count: int = 4, length: int = 24) -> list[tinker.Datum]:
    sampler = client.save_weights_and_get_sampling_client(record_stability_info=True).result()
    response = sampler.sample(prompt(PROMPT), count, params(length, stop=[], seed=1)).result()
    return [sampled_datum(PROMPT, sequence, 1.0) for sequence in response.sequences]


def scores(client: TrainingClient, data: list[tinker.Datum], config: dict[str, Any] | None) -> list[np.ndarray]:
    outputs = client.forward(data, LOSS, config).result().loss_fn_outputs
    return [output["logprobs"].to_numpy()[len(PROMPT) - 1 :] for output in outputs]


def recorded(client: TrainingClient, datum: tinker.Datum) -> Sampled:
    assert datum.model_input_spans is not None
    found = client._run.engine.samples.get(datum.model_input_spans[-1].sequence_id)
    assert found is not None
    return found


def test_a_block_computes_with_these_experts_and_its_own_weights(path: str) -> None:
    """Against the formula, with weights from the router's logits: softmax over all, then those of the chosen."""
    model = load_model(path, torch.device("cpu"), torch.float32)
    block: Any = model.module.get_submodule("model.layers.0.mlp")
    x = torch.randn(1, 5, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    number, chosen = model.config.num_experts, model.config.num_experts_per_tok
    wanted = torch.stack(
        [torch.randperm(number, generator=torch.Generator().manual_seed(i))[:chosen] for i in range(5)]
    )
    wanted[4] = FREE
    routes = torch.full((5, len(model.experts), chosen), FREE)
    routes[:, 0] = wanted
    with torch.no_grad():
        with running(Pass(PackedPlan.whole([5]), routes=Replay(routes))):
            found = block(x)[0]
        free = block(x)[0]
        probabilities = F.linear(x[0], block.gate.weight).softmax(-1)
        experts, expected = block.experts, torch.zeros(4, x.shape[-1])
        for t in range(4):
            for expert in wanted[t].tolist():
                gate, up = (experts.gate_up_proj[expert] @ x[0, t]).chunk(2)
                expected[t] += probabilities[t, expert] * (experts.down_proj[expert] @ (F.silu(gate) * up))
        shared = block.shared_expert(x[0]) * torch.sigmoid(block.shared_expert_gate(x[0]))
    torch.testing.assert_close(found[:4], expected + shared[:4], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[4], free[4])
    assert (found[:4] - free[:4]).abs().max() > 1e-2


@pytest.mark.parametrize("model_type", ROUTERS)
def test_every_kind_of_router_can_be_replayed(model_type: str, tmp_path: Path) -> None:
    """`Replay` raises where a router chooses otherwise than through topk."""
    write_model(model_type, tmp_path / "model")
    model = load_model(str(tmp_path / "model"), torch.device("cpu"), torch.float32)
    tokens, positions = torch.tensor(random_tokens(6, 1)) % 60, torch.arange(6)
    chosen = 2
    routes = torch.randint(0, 2, (6, len(model.experts), 1), generator=torch.Generator().manual_seed(0))
    routes = torch.cat([routes, routes + 2], dim=2)[:, :, :chosen]
    with torch.no_grad():
        hidden = [
            model.hidden_states(tokens, positions, PackedPlan.whole([6]), None, replay)
            for replay in (None, Replay(routes))
        ]
    assert model.has_routes and (hidden[0] - hidden[1]).abs().max() > 1e-3


def test_what_was_recorded_is_what_transformers_chooses(service: ServiceClient, path: str) -> None:
    client = make_training_client(service, path)
    with torch.no_grad():
        for matrix in client._run.state.adapter.b.values():
            matrix.zero_()
    (datum, *_) = sampled(client)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, experts_implementation="eager").eval()
    ids = torch.tensor([datum.model_input.to_ints()])
    with torch.no_grad():
        logits = plain(ids, output_router_logits=True).router_logits
    expected = torch.stack([layer.topk(plain.config.num_experts_per_tok, dim=-1).indices for layer in logits], dim=1)
    routes = recorded(client, datum).routes
    assert routes is not None and routes.shape == (len(ids[0]) - len(PROMPT), len(logits), expected.shape[2])
    if here().is_reference:
        np.testing.assert_array_equal(np.sort(routes), np.sort(expected[len(PROMPT) :].numpy()))


def test_without_ties_nothing_changes_and_the_gradient_is_the_same(service: ServiceClient, path: str) -> None:
    client, found = make_training_client(service, path), []
    data = sampled(client)
    for config in (None, REPLAY):
        client.forward_backward(data, LOSS, config).result()
        found.append(gradients(client))
        drop_gradients(client)
    assert_close(*found, rtol=1e-4)
    for free, replayed in zip(scores(client, data, None), scores(client, data, REPLAY), strict=True):
        np.testing.assert_allclose(free, replayed, atol=1e-4)


@pytest.mark.cpu_promise  # captured steps record no routes
def test_in_sixteen_bits_a_token_stays_with_its_experts(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_LOCAL_DTYPE", "bfloat16")
    with ServiceClient(home=tmp_path) as service:
        client = make_training_client(service, path)
        data = [datum for _ in range(4) for datum in sampled(client, 8)]
        given = [datum.loss_fn_inputs["logprobs"].to_numpy()[len(PROMPT) - 1 :] for datum in data]
        worst = [
            max(
                float(np.abs(one - other).max()) for one, other in zip(given, scores(client, data, config), strict=True)
            )
            for config in (None, REPLAY)
        ]
    assert worst[1] < worst[0] / 2, worst


def test_another_choice_than_the_recorded_one_shows(service: ServiceClient, path: str) -> None:
    """Planted: the records of one sequence, shifted by one token or by one layer."""
    client = make_training_client(service, path)
    data = sampled(client, 1)
    right = scores(client, data, REPLAY)[0]
    record = recorded(client, data[0])
    routes = record.routes
    assert routes is not None
    for axis in (0, 1):
        object.__setattr__(record, "routes", np.roll(routes, 1, axis))
        assert np.abs(scores(client, data, REPLAY)[0] - right).max() > 1e-2
    object.__setattr__(record, "routes", routes)
    np.testing.assert_array_equal(scores(client, data, REPLAY)[0], right)


def test_samples_are_forgotten_after_the_step_that_trained_on_them(service: ServiceClient, path: str) -> None:
    client = make_training_client(service, path)
    data = sampled(client)
    client.forward_backward(data, LOSS, REPLAY).result()
    client.optim_step(STEP).result()
    with pytest.raises(RequestError, match=r"data\[0\].*has no record of sequence"):
        client.forward(data, LOSS, REPLAY).result()
    client.forward(data, LOSS).result()


def test_what_cannot_be_replayed_is_refused(
    service: ServiceClient, path: str, tied_model: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = make_training_client(service, path)
    data = sampled(client)
    record = recorded(client, data[0])
    object.__setattr__(record, "routes", None)
    with pytest.raises(RequestError, match=r"data\[0\]: no experts were recorded for sequence"):
        client.forward(data[:1], LOSS, REPLAY).result()
    unnamed = tinker.Datum(model_input=data[1].model_input, loss_fn_inputs=data[1].loss_fn_inputs)
    with pytest.raises(RequestError, match="has no provenance"):
        client.forward([unnamed], LOSS, REPLAY).result()
    with pytest.raises(RequestError, match=r"must be 1 \(yes\) or 0 \(no\), got 2"):
        client.forward(data, LOSS, {"route_replay": 2}).result()
    with pytest.raises(RequestError, match=r"loss_fn_config\['route_replay'\] is unknown to cross_entropy"):
        client.forward(data, "cross_entropy", REPLAY).result()
    dense = make_training_client(service, tied_model)
    with caplog.at_level(logging.ERROR), pytest.raises(RequestError, match="has no routers to replay"):
        dense.forward(sampled(dense), LOSS, REPLAY).result()
