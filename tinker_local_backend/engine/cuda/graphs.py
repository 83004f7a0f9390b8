"""Capture a step once and replay it, as a CUDA graph.

A replay runs no Python: scalars, shapes and addresses are those of the capture. A step must read everything that changes from
tensors at fixed addresses.
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
    """changes when captured steps were given back: from then on no earlier one may be replayed"""

    def capture(self, step: Step) -> tuple[Callable[[], None], torch.Tensor]:
        """Returns a function that replays the step, and the tensor that the step returned, which every replay overwrites.

        A capture runs the step at least once, so call this while its tensors hold nothing that matters. An error of the step
        is raised as it is, and leaves the next capture possible.
        """
        ...

    def release(self) -> bool:
        """Give the memory of all captured steps back. Returns whether there were any."""
        ...


class CudaGraphs:
    """CUDA graphs of one device that share a memory pool and a stream. Only one of them may run at a time.

    What a graph needs while it runs is shared: torch gives a later capture the memory that an earlier one has freed, if both
    used one pool and one stream. It gives it whole blocks, so a batch takes the memory of a larger one, and hardly that of a
    smaller one; decoder.py drops the smaller ones where they add up. What a step returns stays its own while somebody holds it.
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
            # thread_local: another thread of the program may use CUDA in ways that a capture forbids.
            # The outer context: where a capture cannot be ended, torch stays on its stream.
            with (
                _nothing_collected(),
                torch.cuda.stream(current),
                torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"),
                _noting(failures),
            ):
                result = step()
        except Exception as error:
            self._abandon()
            if not failures:
                raise
            raise failures[0] from error  # that of ending the capture says only that there was another one
        self._graphs.add(graph)
        return graph.replay, result

    def release(self) -> bool:
        graphs = list(self._graphs)
        for graph in graphs:
            graph.reset()
        self._graphs.clear()
        self._pool = None  # a pool that no graph uses is gone
        self.epoch += 1
        return bool(graphs)

    def _abandon(self) -> None:
        """After a capture that failed: end what is left of it, and use its pool no more."""
        if self._pool is None:
            return
        index = self._device.index if self._device.index is not None else torch.cuda.current_device()
        # Where the device refuses to end a capture, torch does not get to the end of its own part: the allocator keeps
        # recording, and every later capture into this pool fails. If it did get there, it refuses to do so twice.
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(index, self._pool)
            torch._C._cuda_releasePool(index, self._pool)
        self.release()


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Collecting an earlier graph gives it back to the driver, which breaks the capture that is under way (seen on an H100)."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def _noting(failures: list[Exception]) -> Iterator[None]:
    """Append an error to the list on its way."""
    try:
        yield
    except Exception as error:
        failures.append(error)
        raise


class Uncaptured:
    """Captures nothing: every replay runs the step in Python. Captured steps are compared with this."""

    epoch = 0

    def capture(self, step: Step) -> tuple[Callable[[], None], torch.Tensor]:
        result = step()

        def again() -> None:
            result.copy_(step())

        return again, result

    def release(self) -> bool:
        return False
