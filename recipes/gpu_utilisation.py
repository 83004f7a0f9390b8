"""How busy the device is while commands run: nvidia-smi polled twice a second, or the CPU time of the commands."""

import os
import resource
import subprocess
import threading
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

INTERVAL_SECONDS = 0.5
LEAST_GPU_PERCENT, LEAST_CPU_PERCENT = 1.0, 1.0
"""Minimum mean over all samples; below it, the work ran elsewhere."""


@dataclass
class Utilisation:
    """Takes samples inside `with`. `on_gpu` polls nvidia-smi, for the GPUs in CUDA_VISIBLE_DEVICES if that is set."""

    on_gpu: bool
    percent: list[float] = field(default_factory=list)
    """GPU utilisation in each sample; for the CPU one number for the whole time, above 100 with several cores"""
    memory_mib: list[float] = field(default_factory=list)
    problem: str | None = None
    """why nothing could be measured"""

    def __enter__(self) -> Self:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="utilisation", daemon=True)
        self._started, self._used = time.perf_counter(), _children_cpu_seconds()
        if self.on_gpu:
            self._ask()  # idle baseline, before anything runs
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.on_gpu:
            seconds = time.perf_counter() - self._started
            self.percent.append(100 * (_children_cpu_seconds() - self._used) / seconds)
            return
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(INTERVAL_SECONDS) and self.problem is None:
            self._ask()

    def _ask(self) -> None:
        """One sample: the busiest GPU's utilisation, and the memory of all."""
        command = ["nvidia-smi", "--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits"]
        if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
            command += ["-i", visible]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
            rows = [[float(cell) for cell in line.split(",")] for line in done.stdout.strip().splitlines()]
            self.percent.append(max(percent for percent, _ in rows))
            self.memory_mib.append(sum(memory for _, memory in rows))
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            self.problem = f"nvidia-smi failed: {error}"

    def verdict(self) -> tuple[bool, str]:
        """Whether the device was used, with the numbers."""
        if self.problem is not None or not self.percent:
            return False, self.problem or "no sample was taken"
        mean = sum(self.percent) / len(self.percent)
        if not self.on_gpu:
            return mean >= LEAST_CPU_PERCENT, f"CPU: {mean:.0f} % of one core (no GPU is used)"
        idle, most = self.memory_mib[0], max(self.memory_mib)
        detail = f"GPU busy {mean:.0f} % of the time on average, {max(self.percent):.0f} % at most; memory {idle:.0f} MiB idle, "
        return mean >= LEAST_GPU_PERCENT and most > idle, detail + f"{most:.0f} MiB at most"


def _children_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
