"""A decode step on tensors that say they are on a GPU: nothing on another device takes part, and nothing is read back."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException

from benchmarks.fake_gpu import GPU, NoCopies, on_a_fake_gpu
from tinker_local_backend.engine.cuda import step as step_module
from tinker_local_backend.engine.cuda.adapter_slots import AdapterSlots
from tinker_local_backend.engine.cuda.execution import CudaExecution
from tinker_local_backend.engine.cuda.step import StepState, decode_step
from tinker_local_backend.engine.model.attention import PackedPlan, Segment
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.model.lora_spec import LoraSpec
from tinker_local_backend.engine.models import load_model


@pytest.fixture
def model(untied_model: str) -> BaseModel:
    model = load_model(untied_model, torch.device("cpu"), torch.float32)
    model.execution = CudaExecution(model)  # norms, rotary positions and SwiGLU are fused
    return model


def run_step(model: BaseModel) -> torch.Tensor:
    state = StepState(8, 4, 4, GPU)
    slots = AdapterSlots(model.products, model.dtype, GPU, model.targets)
    slots.fit([model.new_adapter(model.widest_spec(4), 0)])
    with NoCopies():
        return decode_step(model, model.new_cache(16), state, slots, 8, True)


def test_a_step_stays_on_the_device(model: BaseModel) -> None:
    with on_a_fake_gpu(model):
        tempered = run_step(model)
        assert tempered.device == GPU and tempered.dtype == torch.float32
        assert tempered.shape == (8, model.vocab_size)


def on_the_cpu(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda seeds, drawn: original(torch.zeros(len(seeds), dtype=torch.int64), torch.zeros(len(seeds)).long())


def read_back(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda seeds, drawn: original(seeds, drawn + int(drawn.max()))


def copied_back(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda seeds, drawn: original(seeds.cpu(), drawn.cpu()).to(GPU)


@pytest.mark.parametrize(
    ("plant", "error", "message"),
    [
        pytest.param(
            on_the_cpu,
            RuntimeError,
            r"(at least two|two different) devices,? cpu(,| and) cuda",
            id="a tensor on the CPU",
        ),
        pytest.param(read_back, DataDependentOutputException, "_local_scalar_dense", id="a number read back"),
        pytest.param(copied_back, RuntimeError, "copies from the GPU", id="a tensor copied back"),
    ],
)
def test_what_is_planted_in_a_step_is_caught(
    model: BaseModel, monkeypatch: pytest.MonkeyPatch, plant: Any, error: type[Exception], message: str
) -> None:
    monkeypatch.setattr(step_module, "uniforms", plant(step_module.uniforms))
    with on_a_fake_gpu(model), pytest.raises(error, match=message):
        run_step(model)


def test_a_packed_pass_stays_on_the_device(model: BaseModel) -> None:
    """Through varlen_attn, whose kernel wants 16 bits and a GPU. Its gradients: test_fake_training.py."""
    plan = PackedPlan([Segment(0, 9), Segment(9, 20, 9, (0, 9)), Segment(20, 24)])
    with on_a_fake_gpu(model):
        execution: Any = model.execution
        execution._device = GPU
        adapter = model.new_adapter(LoraSpec(4), 0)
        tokens = torch.zeros(24, dtype=torch.int64, device=GPU)
        with NoCopies():
            hidden = model.hidden_states(tokens, tokens, plan, adapter)
            logits = model.logits(hidden, adapter)
        assert hidden.device == GPU and hidden.dtype == torch.bfloat16
        assert logits.device == GPU and logits.dtype == torch.float32
