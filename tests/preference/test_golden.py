"""Our DPO against TRL's DPOTrainer: loss, metrics and every LoRA gradient of one batch, through the whole engine."""

import asyncio
import json
import shutil
from collections.abc import Iterator

import numpy as np
import pytest
import tinker
import torch

from tests.engine.helpers import drop_gradients, gradients
from tests.preference.golden_trl import ALPHA, GOLDEN, LOSSES, RANK, TINY_CHAT, adapter_matrix, new_model, pairs
from tinker_cookbook.preference.dpo import LossType, compute_reference_logprobs, dpo_loss_fn
from tinker_cookbook.supervised.common import datum_from_model_input_weights
from tinker_local_backend import ServiceClient, TrainingClient

TRL = json.loads(GOLDEN.read_text())["losses"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    new_model().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_CHAT / name, folder)
    return str(folder)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceClient]:
    with ServiceClient(home=tmp_path_factory.mktemp("home")) as service:
        yield service


@pytest.fixture(scope="module")
def client(service: ServiceClient, model: str) -> TrainingClient:
    """With the adapter of the golden numbers."""
    client = service.create_lora_training_client(model, RANK, train_unembed=False).result()
    with torch.no_grad():
        for name, matrix in client._run.state.adapter.named_parameters():
            matrix.copy_(adapter_matrix(name, tuple(matrix.shape)))
    return client


def interleaved() -> list[tinker.Datum]:
    data = []
    for pair in pairs():
        for reply in (pair["chosen_ids"], pair["rejected_ids"]):
            weights = torch.tensor([0.0] * len(pair["prompt_ids"]) + [1.0] * len(reply))
            sequence = tinker.ModelInput.from_ints([*pair["prompt_ids"], *reply])
            data.append(datum_from_model_input_weights(sequence, weights))
    return data


@pytest.mark.parametrize("loss_type", list(LOSSES))
def test_loss_metrics_and_gradients_are_those_of_trl(
    service: ServiceClient, client: TrainingClient, model: str, loss_type: LossType
) -> None:
    assert ALPHA == 32, "the engine's own"
    golden, data = TRL[loss_type], interleaved()
    reference = service.create_sampling_client(base_model=model).result()
    reference_logprobs = asyncio.run(compute_reference_logprobs(reference, data))
    assert golden["beta"] == LOSSES[loss_type][1]
    loss_fn = dpo_loss_fn(reference_logprobs, golden["beta"], loss_type)
    output = client.forward_backward_custom(data, loss_fn).result()
    found = gradients(client)
    drop_gradients(client)

    assert output.metrics["dpo_loss"] == output.metrics["loss:sum"] == pytest.approx(golden["loss"], abs=1e-4)
    for name, value in golden["metrics"].items():
        assert output.metrics[name] == pytest.approx(value, abs=1e-4), name
    assert found.keys() == golden["gradients"].keys()
    for name, matrix in golden["gradients"].items():
        wanted = np.array(matrix)
        np.testing.assert_allclose(found[name], wanted, rtol=0, atol=1e-4 * np.abs(wanted).max(), err_msg=name)


def test_the_golden_gradients_are_not_nothing() -> None:
    for numbers in TRL.values():
        assert all(np.abs(matrix).max() > 1e-5 for matrix in numbers["gradients"].values())
