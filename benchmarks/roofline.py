"""Upper bounds for the speed of decoding and training on a GPU: arithmetic, nothing is measured (docs/gpu.md).

    python -m benchmarks.roofline

A decode step runs once on tensors without data, with the model's real widths, and every operator's launches, bytes and
operations are counted. Each takes as long as its bytes at the GPU's bandwidth, its operations at the GPU's rate, or its launches,
whichever is longest. Rates are those of datasheets, which no program reaches, so speeds are upper bounds.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import chz
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from benchmarks.config import run_benchmark
from benchmarks.fake_gpu import on_a_fake_gpu
from benchmarks.gpu.decoding import Cell, step_bytes
from benchmarks.gpu.models import shape_of
from benchmarks.models import Shape, model_config, word_tokenizer
from tinker_cookbook.utils.misc_utils import markdown_table
from tinker_local_backend.engine.cuda.decoder import Decoder
from tinker_local_backend.engine.cuda.execution import CudaExecution
from tinker_local_backend.engine.cuda.graphs import Uncaptured
from tinker_local_backend.engine.cuda.ops import NAMESPACE
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.model.lora_spec import LoraSpec
from tinker_local_backend.engine.models import adopt_module
from tinker_local_backend.engine.sampling.pages import PAGE_TOKENS

MODELS = ("qwen3-4b", "qwen3-8b")
CELLS = tuple(Cell(batch, 1024, min(batch, 8)) for batch in (1, 8, 64, 256))
CONTEXTS = (1024, 4096, 16384)
RANK = 32
ITEM_BYTES = 2
"""bytes of a bfloat16 number"""

LAUNCH_SECONDS = 2e-6
"""Shortest time of a kernel in a replayed graph: assumed, not measured."""

MEMORY_SHARE = 0.9
"""share of a GPU's memory for weights and keys; activations and buffers take the rest"""

LAUNCHES = {"lora_add": 2, "paged_attention": 2}
"""Number of kernels of the operations of engine/cuda/ops.py that launch more than one."""

NO_LAUNCH = ("prim::", "aten::empty", "aten::new_empty")
"""Prefixes of the names of operators that compute nothing."""


@dataclass(frozen=True)
class Operator:
    """The work of one call on a GPU."""

    name: str
    launches: int
    bytes: int
    operations: int = 0


@dataclass(frozen=True)
class Card:
    """A GPU by its datasheet: memory, and rate of bfloat16 products that are summed in float32, without sparsity."""

    name: str
    memory: int
    bytes_per_second: float
    operations_per_second: float

    def seconds(self, operator: Operator) -> float:
        by_size = operator.bytes / self.bytes_per_second, operator.operations / self.operations_per_second
        return max(operator.launches * LAUNCH_SECONDS, *by_size)


CARDS = (
    Card("4090", 24 << 30, 1.008e12, 165e12),
    Card("H100", 80 << 30, 3.35e12, 989e12),
    Card("H200", 140 << 30, 4.8e12, 989e12),
)


Step = Mapping[Operator, int]
"""How often each operator is called."""


class _Counting(TorchDispatchMode):
    """Counts the operators of a step."""

    def __init__(self, moved: Mapping[str, Callable[..., int]]) -> None:
        super().__init__()
        self.counted: Counter[Operator] = Counter()
        self._moved = moved

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().removesuffix(".default")
        if not func.is_view and not name.startswith(NO_LAUNCH):
            short = name.removeprefix(f"{NAMESPACE}::")
            bytes_of = self._moved.get(short, _all_bytes)
            operations = 2 * result.numel() * args[0].shape[-1] if name.startswith("aten::mm") else 0
            self.counted[Operator(short, LAUNCHES.get(short, 1), bytes_of(result, *args), operations)] += 1
        return result


def _size(*tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))


def _all_bytes(result: Any, *args: Any) -> int:
    """Bytes of all arguments and results of an operator. A result that is also an argument is read and written."""
    inputs = [tensor for arg in args for tensor in (arg if isinstance(arg, list | tuple) else [arg])]
    return _size(*inputs) + _size(*(result if isinstance(result, list | tuple) else [result]))


def moved_bytes(cell: Cell) -> Mapping[str, Callable[..., int]]:
    """For operators that touch a part of their arguments only: the bytes they move, from result and arguments."""

    def attention(result: Any, query: Any, keys: Any, values: Any, *_: Any) -> int:
        of_token = _size(keys, values) // (keys.shape[0] * keys.shape[2])
        return _size(result, query) + cell.batch * cell.context * of_token

    def adapters(result: Any, y: Any, x: Any, a: Any, b: Any, *_: Any) -> int:
        inner = 4 * len(x) * a.shape[1]
        return 2 * _size(y) + _size(x) + cell.adapters * (_size(a, b) // len(a)) + 2 * inner

    return {
        "paged_attention": attention,
        "lora_add": adapters,
        "store_heads": lambda result, qkv, norm, cos, sin, *_: 2 * _size(qkv) + _size(norm, cos, sin),
        "store_keys": lambda result, key, value, *_: 2 * _size(key, value),
        "aten::embedding": lambda result, table, tokens, *_: 2 * _size(result) + _size(tokens),
        "aten::gather": lambda result, values, dim, index, *_: 2 * _size(result) + _size(index),
        "aten::index_copy_": lambda result, target, dim, index, values: 2 * _size(values),
    }


class _Counted(Uncaptured):
    """Captures a step by counting its operators."""

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        self._counting = _Counting(moved_bytes(cell))

    @property
    def operators(self) -> Counter[Operator]:
        return self._counting.counted

    def capture(self, step: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        with self._counting:
            return lambda: None, step()


def small_model(shape: Shape) -> BaseModel:
    """On the CPU. Its numbers are simple, because random ones take long to draw and only the checks of its parts use them."""
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(model_config(shape), dtype=torch.bfloat16)
    module = module.to_empty(device="cpu").eval()
    module.tie_weights()
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.dim() == 2:
                rows, columns = ((torch.arange(size) % 7 - 3).to(tensor.dtype) for size in tensor.shape)
                torch.outer(rows, columns / 100, out=tensor)
            else:
                tensor.fill_(1.0)
    return adopt_module("random/roofline", module, word_tokenizer(shape.vocab))


def _counted(shape: Shape, cells: Sequence[Cell]) -> list[Counter[Operator]]:
    """The operators of a step for each cell, in bfloat16, with adapters on every linear and the head."""
    model = small_model(shape)
    model.execution = CudaExecution(model, Uncaptured())
    adapter = model.new_adapter(LoraSpec(RANK), 0)
    steps = []
    with mock.patch.object(torch.cuda, "_lazy_init", lambda: None), on_a_fake_gpu(model):
        for cell in cells:
            counted = _Counted(cell)
            cache = model.new_cache(cell.batch * (cell.context // PAGE_TOKENS))
            decoder = Decoder(model, cache, counted, cell.context)
            decoder.slots.fit([adapter])
            decoder._capture(cell.batch, True, False, None, False)
            steps.append(counted.operators)
    return steps


def decode_steps(name: str, cells: Sequence[Cell] = CELLS) -> list[Step]:
    """The operators of a step of the whole model for each cell: counted with one and with two layers."""
    steps: list[Step] = []
    for one, two in zip(*(_counted(shape_of(name, layers), cells) for layers in (1, 2)), strict=True):
        layer = two - one
        rest = one - layer
        assert rest + layer + layer == two, "its layers differ"
        steps.append(rest + Counter({operator: count * shape_of(name).layers for operator, count in layer.items()}))
    return steps


def decoding_rows() -> list[list[str]]:
    rows = []
    for name in MODELS:
        shape = shape_of(name)
        for cell, step in zip(CELLS, decode_steps(name), strict=True):
            launches, moved = (
                sum(getattr(operator, what) * count for operator, count in step.items())
                for what in ("launches", "bytes")
            )
            needed = step_bytes(shape, RANK, cell, ITEM_BYTES)
            speeds = [decoding_speed(card, step, cell, needed) for card in CARDS]
            rows.append([name, str(cell.batch), f"{launches:,}", f"{moved / 1e9:.1f}", f"{needed / 1e9:.1f}", *speeds])
    return rows


def decoding_speed(card: Card, step: Step, cell: Cell, needed: float) -> str:
    """Tokens per second, and the share of the bandwidth that the bytes a step must read then take; "-" if they do not fit."""
    if needed > MEMORY_SHARE * card.memory:
        return "-"
    seconds = sum(card.seconds(operator) * count for operator, count in step.items())
    return f"{cell.batch / seconds:,.0f} ({needed / card.bytes_per_second / seconds:.0%})"


def training_operations(shape: Shape, context: int) -> tuple[float, float]:
    """Per token of a forward and backward pass without recomputed layers: 4 for each frozen weight, and all.

    All: also 6 for each of an adapter, and attention to half of the context: 2 products forward and 5 backward, each of 2
    operations for a number of a head.
    """
    frozen = 4.0 * shape.parameters
    attention = 7.0 * shape.layers * shape.heads * shape.head_dim * context
    return frozen, frozen + 6 * shape.adapter_parameters(RANK) + attention


def training_rows() -> list[list[str]]:
    rows = []
    for name in MODELS:
        for context in CONTEXTS:
            frozen, every = training_operations(shape_of(name), context)
            speeds = [f"{card.operations_per_second / every:,.0f}" for card in CARDS]
            rows.append([name, f"{context:,}", f"{every / 1e9:.1f}", f"{frozen / every:.0%}", *speeds])
    return rows


@chz.chz(typecheck=True)
class Config:
    """Keys of `python -m benchmarks.roofline`."""

    threads: int = chz.field(default=1, doc="CPU threads", validator=chz.validators.gt(0))


def tables() -> Sequence[list[list[str]]]:
    """Decoding and training, with their heads."""
    cards = [card.name for card in CARDS]
    decoding = ["model", "batch", "launches", "GB moved", "GB needed", *(f"{name}, tokens/s" for name in cards)]
    training = ["model", "context", "10^9 operations a token", "for frozen weights", *decoding[-len(cards) :]]
    return [decoding, *decoding_rows()], [training, *training_rows()]


def main(config: Config) -> None:
    torch.set_num_threads(config.threads)
    for table in tables():
        print(f"{markdown_table(table)}\n")


if __name__ == "__main__":
    run_benchmark(main)
