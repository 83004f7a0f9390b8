"""A decode step on tensors that say they are on a GPU: nothing on another device takes part, and nothing is read back."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tinker_local_backend.engine.attention import PackedPlan, Segment
from tinker_local_backend.engine.base_model import BaseModel
from tinker_local_backend.engine.cuda import step as step_module
from tinker_local_backend.engine.cuda.execution import CudaExecution
from tinker_local_backend.engine.cuda.slots import AdapterSlots
from tinker_local_backend.engine.cuda.step import StepState, decode_step
from tinker_local_backend.engine.lora import LoraSpec

GPU = torch.device("cuda", 0)


class NoCopies(TorchDispatchMode):
    """Refuses copies between the CPU and the GPU, which fake tensors allow."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [t for t in args if isinstance(t, torch.Tensor)]
        if func is torch.ops.aten.copy_.default and given[1].device != GPU and given[1].dim():
            raise RuntimeError(f"{func} copies from the CPU to the GPU")
        if isinstance(result, torch.Tensor) and result.device.type == "cpu" and any(t.device == GPU for t in given):
            raise RuntimeError(f"{func} copies from the GPU to the CPU")
        return result


class Indexing(TorchFunctionMode):
    """tensor[...], tensor[index] = ..., copy_ and numbers by operations: torch's own ask for the device's driver, which a CPU
    build does not have.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_:
            return torch.ops.aten.copy_.default(*args)
        if func in (torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__bool__, torch.Tensor.item):
            return torch.ops.aten._local_scalar_dense.default(args[0])
        if func is torch.Tensor.__setitem__ and isinstance(args[1], torch.Tensor):
            return torch.ops.aten.index_put_.default(args[0], [args[1]], args[2])
        if func is not torch.Tensor.__getitem__:
            return func(*args, **(kwargs or {}))
        tensor, index = args
        index = index if isinstance(index, tuple) else (index,)
        named = sum(item is not None and item is not Ellipsis for item in index)
        dim = 0
        for item in index:
            if item is None:
                tensor, dim = tensor.unsqueeze(dim), dim + 1
            elif item is Ellipsis:
                dim += args[0].dim() - named
            elif isinstance(item, int):
                tensor = tensor.select(dim, item)
            elif isinstance(item, torch.Tensor):
                assert len(index) == 1
                tensor = tensor.index_select(0, item)
            else:
                start, end, step = item.indices(tensor.shape[dim])
                tensor, dim = torch.ops.aten.slice.Tensor(tensor, dim, start, max(start, end), step), dim + 1
        return tensor


@contextlib.contextmanager
def on_a_fake_gpu(model: BaseModel) -> Iterator[None]:
    """Within: the model has tensors without data that say they are on a GPU, in bfloat16."""

    def fake(module: nn.Module) -> None:
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                like = torch.empty(parameter.shape, dtype=torch.bfloat16, device=GPU)
                module._parameters[name] = nn.Parameter(like, requires_grad=False)
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=GPU)

    with FakeTensorMode(), Indexing(), torch.no_grad():
        for module in model.module.modules():
            fake(module)
        model.device, model.dtype = GPU, torch.bfloat16
        yield


@pytest.fixture
def model(untied_model: str) -> BaseModel:
    model = BaseModel(untied_model, torch.device("cpu"), torch.float32)
    model.execution = CudaExecution(model)  # norms, rotary positions and SwiGLU are fused
    return model


def run_step(model: BaseModel) -> torch.Tensor:
    state = StepState(8, 4, 4, GPU)
    slots = AdapterSlots(model.linears, model.dtype, GPU)
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
        pytest.param(on_the_cpu, RuntimeError, "at least two devices, cpu and cuda", id="a tensor on the CPU"),
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
    """Through varlen_attn, whose kernel wants 16 bits and a GPU. (Its gradients: the pretended GPU of benchmarks.gpu, as torch
    aborts in autograd where it is built without CUDA.)"""
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
