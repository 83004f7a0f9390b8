"""The estimate of what a training pass keeps of a token is what autograd keeps, within a fifth, in every way that layers run."""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from benchmarks.gpu.models import random_module
from benchmarks.gpu.stand_ins import graphs_for, varlen_on_a_cpu
from benchmarks.models import Experts, Shape, word_tokenizer
from tinker_local_backend.engine.cuda.execution import LAYERS, CudaExecution
from tinker_local_backend.engine.model.attention import PackedPlan
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.model.footprint import TokenBytes

CPU = torch.device("cpu")
RANK = 4
SHAPE = Shape(hidden=320, layers=2, heads=8, kv_heads=2, head_dim=64, mlp=1216, vocab=256)
"""an eighth of Qwen3-4B"""

SHAPES = {
    "as 4B": SHAPE,
    "as 8B": replace(SHAPE, hidden=512, mlp=1536),
    "as 0.6B": replace(SHAPE, hidden=256, heads=4, kv_heads=2, mlp=768),
}


def made(shape: Shape, dtype: torch.dtype, way: str) -> BaseModel:
    module = random_module(shape, CPU, dtype)
    model = BaseModel.from_module("random", module, word_tokenizer(shape.vocab))
    if way == "fused":
        model.execution = CudaExecution(model, graphs_for(CPU), {LAYERS: "not in this test"})
    elif way == "layers":
        model.execution = CudaExecution(model, graphs_for(CPU))
    elif way == "modules":
        model.join(None)
    return model


def pass_of(model: BaseModel, tokens: int, recompute: bool) -> Iterator[Callable[[], object]]:
    """A pass over two sequences; yields its backward pass while the adapter is in use."""
    half, adapter = tokens // 2, model.new_adapter(replace(model.widest_spec(RANK), train_unembed=False), 0)
    ids, positions = torch.arange(tokens) % 200, torch.arange(tokens) % half
    with varlen_on_a_cpu(), model.routed(adapter), model.recompute(recompute):
        hidden, backward = model.training_pass(ids, positions, PackedPlan.whole([half, half]), adapter)
        yield lambda: backward(torch.ones_like(hidden))


def saved(model: BaseModel, tokens: int, recompute: bool) -> int:
    """Bytes that autograd keeps in a pass, weights aside."""
    known = {parameter.untyped_storage().data_ptr() for parameter in model.module.parameters()}
    kept: dict[int, int] = {}
    alive: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        alive.append(tensor)  # so that no address comes twice
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for _ in pass_of(model, tokens, recompute):
            pass
    return sum(kept.values())


def per_token(model: BaseModel, recompute: bool = False) -> float:
    """Without what does not grow with the tokens."""
    return (saved(model, 192, recompute) - saved(model, 64, recompute)) / 128


@pytest.mark.cpu_promise
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("way", ["modules", "joined", "fused", "layers"])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_what_autograd_keeps_of_a_token(shape: str, way: str, dtype: torch.dtype) -> None:
    """Elsewhere torch's fused norm would be one operation in 16 bits too; a CPU computes it in parts, as if it were not fused."""
    model = made(SHAPES[shape], dtype, way)
    parts = model.execution.parts()
    if way == "fused":
        assert {parts[name] for name in ("norms", "rotary", "swiglu")} == {"on"}
        if dtype == torch.bfloat16:
            turned_off: Any = model.execution
            turned_off.turn_off("norms", "in parts on a CPU")
    assert (model.operations is not None) == (way in ("joined", "layers"))
    found, estimate = per_token(model), model.token_bytes().kept
    assert found / 1.2 <= estimate <= found * 1.2, f"{found:,.0f} kept, {estimate:,} estimated"


@pytest.mark.cpu_promise
@pytest.mark.parametrize("way", ["modules", "joined"])
def test_a_recomputed_layer_keeps_its_input(way: str) -> None:
    model = made(SHAPE, torch.float32, way)
    found = per_token(model, recompute=True)
    sizes = model.token_bytes()
    inputs = sizes.recomputed - sizes.kept // SHAPE.layers
    assert inputs == SHAPE.layers * SHAPE.hidden * 4
    assert inputs <= found <= inputs + 3 * SHAPE.hidden * 4, "and the last norm what it needs"


@pytest.mark.cpu_promise
def test_experts() -> None:
    model = made(replace(SHAPE, experts=Experts(number=8, chosen=2, inner=192)), torch.float32, "modules")
    found, estimate = per_token(model), model.token_bytes().kept
    assert found / 1.2 <= estimate <= found * 1.2, f"{found:,.0f} kept, {estimate:,} estimated"


class Live(TorchDispatchMode):
    """Bytes of the tensors that exist."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.most = 0, 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_flatten(result)[0]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self._known:
                storage = tensor.untyped_storage()
                self._known.add(storage.data_ptr())
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._gone, storage.data_ptr(), storage.nbytes())
        return result

    def _gone(self, address: int, size: int) -> None:
        if address in self._known:
            self._known.remove(address)
            self.now -= size


def peak(tokens: int, way: str, recompute: bool) -> int:
    """Most bytes of tensors at a time in the backward pass of one pass."""
    model = made(replace(SHAPE, layers=4), torch.float32, way)
    with Live() as live:
        for backward in pass_of(model, tokens, recompute):
            live.most = live.now
            backward()
    return live.most


@pytest.mark.cpu_promise
@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "recomputed"])
@pytest.mark.parametrize("way", ["modules", "joined"])
def test_the_most_that_is_in_memory_at_a_time(way: str, recompute: bool) -> None:
    """What the plan divides by: kept activations, and what comes and goes beside them."""
    found = (peak(384, way, recompute) - peak(128, way, recompute)) / 256
    sizes: TokenBytes = made(replace(SHAPE, layers=4), torch.float32, way).token_bytes()
    estimate = sizes.with_recomputation if recompute else sizes.plain
    assert found / 1.1 <= estimate <= found * 1.4, f"{found:,.0f} in memory, {estimate:,} estimated"
