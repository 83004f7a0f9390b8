"""The circumstances of a result: the machine, the versions, the commit, and other programs' CPU use."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PACKAGES = ("torch", "transformers", "peft", "tinker", "tokenizers", "accelerate", "trl")
_PATH_KEYS = ("vllm_python=", "models_dir=", "output=", "stub=")
_ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class CpuClock:
    """Seconds of CPU time so far: of the whole machine, and of this process with all its descendants."""

    wall: float
    machine: float
    own: float

    @classmethod
    def now(cls) -> CpuClock:
        return cls(time.perf_counter(), _machine_seconds(), _own_seconds())

    def usage_since(self, start: CpuClock) -> tuple[float, float]:
        """Cores used (by us, by all other programs) on average since `start`."""
        wall = max(self.wall - start.wall, 1e-9)
        own = self.own - start.own
        foreign = max(0.0, self.machine - start.machine - own)
        return own / wall, foreign / wall


def wait_until_quiet(longest: float, max_foreign_cores: float, window: float = 0.3) -> None:
    """Wait until other programs are idle for two consecutive windows, or for `longest` seconds at most."""
    deadline, quiet = time.monotonic() + longest, 0
    while quiet < 2 and time.monotonic() < deadline:
        start = CpuClock.now()
        time.sleep(window)
        _, foreign = CpuClock.now().usage_since(start)
        quiet = quiet + 1 if foreign <= max_foreign_cores else 0


def _machine_seconds() -> float:
    # user, nice, system, idle, iowait, irq, softirq, steal: all but idle and iowait count as used.
    fields = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / _TICKS_PER_SECOND


def _own_seconds() -> float:
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = resource.getrusage(resource.RUSAGE_SELF)
    total = own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime
    return total + sum(process_seconds(pid) for pid in descendants(os.getpid()))


def process_seconds(pid: int) -> float:
    """CPU time of a process so far; 0 when it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:  # it has ended
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND


def descendants(pid: int) -> list[int]:
    """All descendants of a process."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []
    return children + [grandchild for child in children for grandchild in descendants(child)]


def facts(threads: int, ask_gpu: bool = True) -> dict[str, str]:
    """The machine, package versions, the commit, the date and the command, as text.

    ask_gpu: False in a process that must not use CUDA, because it forks.
    """
    info = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "command": _command(),
        "cpu": f"{_cpu_model()}, {os.cpu_count()} cores",
        "threads": str(threads),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "python": platform.python_version(),
    }
    if ask_gpu and torch.cuda.is_available():
        info["gpu"] = gpu_name()
    for package in _PACKAGES:
        try:
            info[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return info


def gpu_name() -> str:
    """Name of torch's current CUDA device, and the CUDA version."""
    return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _commit() -> str:
    """Short hash, with `+changes` when the code differs from it (results and their tables do not count)."""
    head = _git("rev-parse", "--short=12", "HEAD")
    if head is None:
        return "unknown"
    changes = _git("status", "--porcelain", "--", ".", ":!benchmarks/results", ":!benchmarks/README.md")
    return f"{head}+changes" if changes else head


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(_ROOT), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _command() -> str:
    """The command as typed, without paths, which are meaningless on other machines."""
    module = sys.modules["__main__"].__spec__
    shown = [argument for argument in sys.argv[1:] if not argument.startswith(_PATH_KEYS)]
    name = module.name.removesuffix(".__main__") if module else "benchmarks"
    return " ".join(["python", "-m", name, *shown])
