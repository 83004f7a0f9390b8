"""Capture a step once and replay it: a CUDA graph, or on a CPU a stand-in, which tests run.

A replay runs no Python: scalars, shapes and addresses are those of the capture. A step must read everything that changes from
tensors at fixed addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


class CaptureError(RuntimeError):
    """The step contains an operation that cannot be captured."""


class Graphs(Protocol):
    """Captures steps."""

    def capture(self, step: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Returns a function that replays the step, and the tensor that the step returned, which every replay overwrites.

        A capture runs the step at least once, so call this while its tensors hold nothing that matters.
        """
        ...


class CudaGraphs:
    """CUDA graphs that share one memory pool. Only one of them may run at a time."""

    def __init__(self, device: torch.device):
        self._device = device
        self._pool: Any = None

    def capture(self, step: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):  # warm up: compile kernels and allocate the workspaces of libraries
            step()
            step()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # thread_local: another thread of the program may use CUDA in ways that a capture forbids.
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            result = step()
        self._pool = self._pool or graph.pool()
        return graph.replay, result


class Uncaptured:
    """Captures nothing: every replay runs the step in Python. Captured steps are compared with this."""

    def capture(self, step: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        result = step()

        def again() -> None:
            result.copy_(step())

        return again, result


_WAITS = ("_local_scalar_dense", "nonzero", "unique_dim", "_unique", "_unique2", "masked_select", "equal")
_FROM_PYTHON = ("lift_fresh", "lift_fresh_copy")


class RecordedGraphs:
    """The stand-in: records the operations of a step with their tensors, and runs them again."""

    def capture(self, step: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Raises CaptureError for operations that wait for the device, and for tensors made from Python values."""
        step()
        recording = _Recording()
        with recording:
            result = step()
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
            raise CaptureError("a tensor made from Python values: it would be the one of the capture for ever")
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


def graphs_for(device: torch.device) -> Graphs:
    """The implementation for this device."""
    return CudaGraphs(device) if device.type == "cuda" else RecordedGraphs()
