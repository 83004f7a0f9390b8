"""Capture a step once and replay it, as a CUDA graph.

A replay runs no Python: scalars, shapes and addresses are those of the capture. A step must read everything that changes from
tensors at fixed addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


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
