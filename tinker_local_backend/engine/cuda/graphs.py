"""Capture a step once and replay it, as a CUDA graph.

A replay runs no Python: scalars, shapes and addresses are fixed at capture. A step must read all changing inputs from tensors at
fixed addresses.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol
from weakref import WeakSet

import torch

Step = Callable[[], torch.Tensor]


class Graphs(Protocol):
    """Captures steps."""

    epoch: int
    """changes when captured steps are released; steps of earlier epochs must not be replayed"""

    def capture(self, step: Step) -> tuple[Callable[[], None], torch.Tensor]:
        """Returns a function that replays the step, and the tensor that the step returned, which every replay overwrites.

        A capture runs the step at least once, so its tensors must not hold live data. Errors of the step are raised unchanged,
        and later captures still work.
        """
        ...

    def release(self) -> bool:
        """Free the memory of all captured steps. Returns whether there were any."""
        ...


class CudaGraphs:
    """CUDA graphs of one device that share a memory pool and a stream. Only one of them may run at a time.

    Graphs share temporary memory: a capture reuses memory that an earlier one freed in the same pool and stream. It reuses whole
    blocks, so a batch fits into the memory of a larger one, but hardly into that of smaller ones; decoder.py drops smaller graphs
    when they add up. A step's result is not reused while it is referenced.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._graphs = WeakSet[torch.cuda.CUDAGraph]()
        self.epoch = 0

    def capture(self, step: Step) -> tuple[Callable[[], None], torch.Tensor]:
        stream = self._stream = self._stream or torch.cuda.Stream(self._device)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        current = torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):  # warm up: compile kernels and allocate the workspaces of libraries
            step()
            step()
        current.wait_stream(stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        failures: list[Exception] = []
        try:
            # thread_local: other threads may use CUDA in ways that a capture forbids.
            # The outer stream context: if a capture cannot be ended, torch stays on the capture's stream.
            with (
                _no_garbage_collection(),
                torch.cuda.stream(current),
                torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"),
                _recording(failures),
            ):
                result = step()
        except Exception as error:
            self._abandon()
            if not failures:
                raise
            raise failures[0] from error  # `error` only says that the capture was invalidated
        self._graphs.add(graph)
        return graph.replay, result

    def release(self) -> bool:
        graphs = list(self._graphs)
        for graph in graphs:
            graph.reset()
        self._graphs.clear()
        self._pool = None  # torch frees a pool that no graph uses
        self.epoch += 1
        return bool(graphs)

    def _abandon(self) -> None:
        """Clean up after a failed capture, and drop its pool."""
        if self._pool is None:
            return
        index = self._device.index if self._device.index is not None else torch.cuda.current_device()
        # If the device refuses to end a capture, torch's allocator keeps recording into the pool, and every later capture fails.
        # If the allocator has already stopped, these calls raise RuntimeError.
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(index, self._pool)
            torch._C._cuda_releasePool(index, self._pool)
        self.release()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collecting an earlier graph frees it in the driver, which breaks the current capture (seen on an H100)."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def _recording(failures: list[Exception]) -> Iterator[None]:
    """Append an error to the list and re-raise it."""
    try:
        yield
    except Exception as error:
        failures.append(error)
        raise


class Uncaptured:
    """Runs the step in Python at every replay, to compare captured steps with, or without a GPU."""

    epoch = 0

    def capture(self, step: Step) -> tuple[Callable[[], None], torch.Tensor]:
        result = step()

        def again() -> None:
            result.copy_(step())

        return again, result

    def release(self) -> bool:
        return False
