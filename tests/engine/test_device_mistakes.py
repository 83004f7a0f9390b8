"""On a pretended GPU nothing in the engine mixes devices, and the numbers are those of the CPU."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch

from benchmarks.gpu.pretended_gpu import DeviceMistake, OnGpu, pretend
from tests.engine.helpers import (
    STEP,
    activation_memory,
    at_once,
    cross_entropy_datum,
    datum,
    make_training_client,
    params,
    pass_tokens,
    policy_datum,
    prompt,
    random_tokens,
    weights,
)
from tests.engine.test_families import write_family
from tinker_local_backend import SamplingClient, ServiceClient, TrainingClient
from tinker_local_backend.engine.training.losses import LOSSES

pytestmark = pytest.mark.cpu_promise
"""where there is a GPU, none is pretended"""

STEM = random_tokens(20, 1)


MISTAKES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "sum": lambda gpu, cpu: gpu + cpu,
    "sum the other way": lambda gpu, cpu: cpu + gpu,
    "cat": lambda gpu, cpu: torch.cat([gpu, cpu]),
    "linear": lambda gpu, cpu: torch.nn.functional.linear(gpu, cpu[None]),
    "gather": lambda gpu, cpu: gpu.gather(0, cpu.long()),
    "index_add": lambda gpu, cpu: gpu.index_add_(0, cpu.long(), gpu),
    "where": lambda gpu, cpu: torch.where(cpu > 0, gpu, 0.0),
    "in place": lambda gpu, cpu: cpu.add_(gpu),
    "numpy": lambda gpu, cpu: gpu.numpy(),
    "asarray": lambda gpu, cpu: np.asarray(gpu),
    "made there": lambda gpu, cpu: torch.arange(3, device=gpu.device) + cpu,
    "moved there": lambda gpu, cpu: cpu.to("cuda") * cpu,
}
CORRECT: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": lambda gpu, cpu: gpu + cpu.to(gpu.device),
    "back": lambda gpu, cpu: gpu.cpu() + cpu,
    "copy": lambda gpu, cpu: gpu.copy_(cpu),
    "index on the CPU": lambda gpu, cpu: gpu[cpu.long()],
    "a number": lambda gpu, cpu: gpu * torch.tensor(2.0),
    "like": lambda gpu, cpu: torch.zeros_like(gpu) + gpu,
    "dtype": lambda gpu, cpu: gpu.to(torch.bfloat16).float() + gpu.to(gpu),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_pretence_refuses_what_a_gpu_refuses(name: str) -> None:
    with pretend():
        gpu, cpu = torch.zeros(3, device="cuda"), torch.zeros(3)
        assert isinstance(gpu, OnGpu) and gpu.device.type == "cuda" and not isinstance(cpu, OnGpu)
        with pytest.raises(DeviceMistake):
            MISTAKES[name](gpu, cpu)


@pytest.mark.parametrize("name", CORRECT)
def test_the_pretence_allows_what_a_gpu_allows(name: str) -> None:
    with pretend():
        result = CORRECT[name](torch.ones(3, device="cuda"), torch.ones(3))
        assert isinstance(result, OnGpu) == (name != "back")
    assert torch.zeros(1).device.type == "cpu"


def training_data(loss_fn: str) -> list[tinker.Datum]:
    """Two that begin alike, one that does not."""
    data = []
    for seed in range(3):
        plain = (cross_entropy_datum if loss_fn == "cross_entropy" else policy_datum)(26, seed)
        more = {"sequence_ratio_mask": np.ones(26, dtype=np.float32)} if loss_fn == "gspo" else {}
        tokens = plain.model_input.to_ints()
        tokens = [*STEM, *tokens[20:]] if seed < 2 else tokens
        data.append(datum(tokens, **plain.loss_fn_inputs, **more))
    return data


def squares(data: list[tinker.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    return torch.stack([(lp**2).mean() for lp in logprobs]).sum(), {}


def train(client: TrainingClient) -> Iterator[Any]:
    """Every loss, in one pass and in several with recomputation, and a step."""
    for loss_fn in LOSSES:
        yield client.forward_backward(training_data(loss_fn), loss_fn).result()
    yield client.forward(training_data("ppo"), "ppo", {"temperature": 0.7}).result()
    yield client.forward_backward_custom(training_data("cross_entropy"), squares).result()
    with pytest.MonkeyPatch.context() as patch:
        pass_tokens(patch, 30)
        activation_memory(patch, 1)
        yield client.forward_backward(training_data("cross_entropy"), "cross_entropy").result()
        yield client.forward_backward_custom(training_data("cross_entropy"), squares).result()
    yield client.optim_step(STEP).result()


def sample(clients: list[SamplingClient]) -> list[Any]:
    """Everything that a request may ask for, several snapshots in a batch, twice so that prefixes are found again."""
    targets = tinker.TensorData.from_numpy(np.full((len(STEM) - 1, 2), 7))
    scored: dict[str, Any] = {
        "include_prompt_logprobs": True,
        "topk_prompt_logprobs": 2,
        "topk_sample_logprobs": 2,
        "target_prompt_logprobs": targets,
        "prompt_alt_tokens_k": 2,
    }
    limits = [{}, {"top_k": 5, "stop": ["e"]}, {"top_p": 0.7, "temperature": 0.6}, {"temperature": 0.0}]

    def submit() -> list[tinker.APIFuture[Any]]:
        futures = [
            client.sample(prompt([*STEM, *random_tokens(i, i)]), 2, params(12, seed=i, **fields))
            for i, fields in enumerate(limits)
            for client in clients
        ]
        return [*futures, clients[0].sample(prompt(STEM), 1, params(3, seed=5), **scored)]

    return [*at_once(submit), *at_once(submit)]


def everything(home: Path, model: str) -> list[Any]:
    """What comes out of an engine's life: numbers that can be compared."""
    found: list[Any] = []
    with ServiceClient(home=home, deterministic=True) as service:
        client = make_training_client(service, model)
        snapshots = [service.create_sampling_client(base_model=model).result()]
        snapshots.append(client.save_weights_and_get_sampling_client().result())
        for output in train(client):
            records = [record["logprobs"].to_numpy() for record in getattr(output, "loss_fn_outputs", [])]
            found += [output.metrics, *records]
        path = client.save_state("there", overwrite=True).result().path
        again = service.create_training_client_from_state_with_optimizer(path).result()
        again.forward_backward([cross_entropy_datum(9, 0)], "cross_entropy")
        found += [again.optim_step(STEP).result().metrics, *weights(again).values()]
        snapshots.append(again.save_weights_and_get_sampling_client().result())
        for response in sample(snapshots):
            found += [(s.tokens, s.logprobs, s.topk_logprobs) for s in response.sequences]
            found += [response.prompt_logprobs, response.topk_prompt_logprobs]
        found.append(snapshots[1].compute_logprobs(prompt(random_tokens(40, 3))).result())
        matrices = again._run.state.adapter.parameters()
        found.append({isinstance(tensor, OnGpu) for tensor in [snapshots[0]._model._head.weight, *matrices]})
    return found


@pytest.mark.parametrize("family", ["qwen3-tied", pytest.param("gemma2-untied", marks=pytest.mark.slow)])
def test_no_device_meets_another_and_the_numbers_are_those_of_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    # These round differently, and are used on a real CPU alone.
    monkeypatch.setattr("tinker_local_backend.engine.training.optimizer.MAX_JOINED", 0)
    monkeypatch.setattr("tinker_local_backend.engine.model.products.onednn_is_usable", lambda: False)
    monkeypatch.setattr("tinker_local_backend.engine.model.head._exp_", torch.exp_)
    monkeypatch.setattr("tinker_local_backend.engine.model.base_model.checked_decoder", lambda *arguments: None)
    model = write_family(family, tmp_path / "model")
    *expected, without = everything(tmp_path / "cpu", model)
    with pretend():
        *found, tagged = everything(tmp_path / "gpu", model)
    assert (without, tagged) == ({False}, {True})
    assert len(found) == len(expected) > 100
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_equal(one, other)
