"""Without a GPU, models run the CUDA path with stand-ins on a CPU.

Steps are recorded and replayed without Python instead of in a CUDA graph, and kernels are plain torch.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any
from unittest import mock

import torch
from torch.nn import functional as F
from torch.nn.attention import varlen
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from tinker_local_backend.engine import models
from tinker_local_backend.engine.cuda.execution import CudaExecution
from tinker_local_backend.engine.cuda.graphs import CudaGraphs, Graphs
from tinker_local_backend.engine.model.attention import Execution
from tinker_local_backend.engine.model.base_model import BaseModel

CACHE_TOKENS = 1 << 10
"""Small, because the stand-in for the attention kernel gathers all tokens that a row's table could hold."""


@contextmanager
def stand_ins() -> Iterator[None]:
    """Inside the context every model gets the CUDA path without its checks (the section `checks` runs them once per model), and
    on a CPU a small cache, because that path allocates all of it at once.
    """
    small: dict[str, str] = {}

    def start(model: BaseModel) -> Execution | None:
        return CudaExecution(model, graphs_for(model.device))

    if not torch.cuda.is_available() and "TINKER_LOCAL_KV_CACHE_TOKENS" not in os.environ:
        small = {"TINKER_LOCAL_KV_CACHE_TOKENS": str(CACHE_TOKENS)}
    with mock.patch.object(models, "start", start), mock.patch.dict(os.environ, small), varlen_on_a_cpu():
        yield


@contextmanager
def varlen_on_a_cpu() -> Iterator[None]:
    """Inside the context torch's `varlen_attn` also accepts CPU tensors, in any dtype."""
    on_cuda: Any = varlen.varlen_attn

    @wraps(on_cuda)
    def varlen_attn(query: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        attend = _plain_varlen if query.device.type == "cpu" else on_cuda
        return attend(query, *arguments, **options)

    with mock.patch.object(varlen, "varlen_attn", varlen_attn):
        yield


def _plain_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
) -> torch.Tensor:
    """varlen_attn sequence by sequence; the last query of a sequence has the position of its last key."""
    outputs = []
    ends = zip(cu_seq_q.tolist(), cu_seq_q.tolist()[1:], cu_seq_k.tolist(), cu_seq_k.tolist()[1:], strict=False)
    for first_q, last_q, first_k, last_k in ends:
        q, k, v = query[first_q:last_q], key[first_k:last_k], value[first_k:last_k]
        positions = torch.arange(len(k) - len(q), len(k), device=q.device)[:, None]
        keys = torch.arange(len(k), device=q.device)[None]
        visible = keys <= positions
        if window_size[0] >= 0:
            visible &= keys >= positions - window_size[0]
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
        outputs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale, enable_gqa=True)[0])
    return torch.cat(outputs, dim=1).transpose(0, 1)


def graphs_for(device: torch.device) -> Graphs:
    """CUDA graphs on a GPU, recorded steps on a CPU."""
    return CudaGraphs(device) if device.type == "cuda" else RecordedGraphs()


class CaptureError(RuntimeError):
    """The step contains an operation that cannot be captured."""


_WAITS = ("_local_scalar_dense", "nonzero", "unique_dim", "_unique", "_unique2", "masked_select", "equal")
_FROM_PYTHON = ("lift_fresh", "lift_fresh_copy")


class RecordedGraphs:
    """The stand-in for CUDA graphs: records the operations of a step with their tensors, and replays them."""

    def __init__(self) -> None:
        self.epoch = 0
        self._any = False

    def release(self) -> bool:
        """Invalidate recorded steps (they would still run). Returns whether there were any."""
        self.epoch += 1
        released, self._any = self._any, False
        return released

    def capture(self, step: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Raises CaptureError for operations that wait for the device, and for tensors made from Python values."""
        step()
        recording = _Recording()
        with recording:
            result = step()
        self._any = True
        return recording.replay, result


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        if name in _WAITS:
            raise CaptureError(f"{name} waits for the device: a captured step cannot")
        if name in _FROM_PYTHON:
            raise CaptureError("a tensor made from Python values: every replay would use the value at capture")
        with self:  # in inference mode, torch also passes composite operations here
            whole = func.decompose(*args, **kwargs)
        if whole is not NotImplemented:
            return whole
        result = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, torch.Tensor)]
        inputs = {_memory(leaf) for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)}
        is_view = bool(outputs) and not func._schema.is_mutable and all(_memory(out) in inputs for out in outputs)
        if not is_view:
            self._calls.append((func, args, kwargs, outputs))
        return result

    def replay(self) -> None:
        with nullcontext() if torch.is_inference_mode_enabled() else torch.no_grad():
            for func, args, kwargs, outputs in self._calls:
                again = [leaf for leaf in tree_flatten(func(*args, **kwargs))[0] if isinstance(leaf, torch.Tensor)]
                for old, new in zip(outputs, again, strict=True):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
