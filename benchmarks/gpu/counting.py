"""Device activity of one call: kernel launches, waits of the host, and the most expensive kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
"""Calls of the CUDA runtime in which the host waits for the device."""

READ_BACK = "_local_scalar_dense"
"""Operator behind `.item()`, `bool()` and `.tolist()` of a tensor; on a GPU each is a wait."""


@dataclass(frozen=True)
class Counts:
    """On a GPU: kernel launches (graph launches count once) and waits. On a CPU, instead: operators and read-backs."""

    launches: int
    waits: int


def count_step(device: torch.device, action: Callable[[], object]) -> Counts:
    """Run the action once and count."""
    if device.type != "cuda":
        counter = _Operators()
        with counter:
            action()
        return Counts(counter.operators, counter.read_backs)
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        action()
    names = [event.name for event in profiler.events() or [] if event.device_type == DeviceType.CPU]
    launches = sum(name.startswith(("cudaLaunch", "cuLaunch", "cudaGraphLaunch")) for name in names)
    return Counts(launches, sum(name in WAITS for name in names))


class _Operators(TorchDispatchMode):
    """Counts operators, except views, and read-backs."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0
        self.read_backs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += not func.is_view
        self.read_backs += READ_BACK in func.name()
        return func(*args, **(kwargs or {}))


def top_kernels(device: torch.device, action: Callable[[], object], count: int) -> list[tuple[str, int, float, float]]:
    """(name, calls, milliseconds, share of the total) of the most expensive kernels, or operators on a CPU, in one run."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        action()
        if on_gpu:
            torch.cuda.synchronize(device)
    device_type = DeviceType.CUDA if on_gpu else DeviceType.CPU
    rows = []
    for event in profiler.key_averages():
        if event.device_type != device_type:
            continue
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if microseconds > 0:
            rows.append((event.key, event.count, microseconds / 1e3))
    total = sum(row[2] for row in rows) or 1.0
    rows.sort(key=lambda row: -row[2])
    return [(name, calls, milliseconds, milliseconds / total) for name, calls, milliseconds in rows[:count]]
