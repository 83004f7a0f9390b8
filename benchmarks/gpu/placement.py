"""Section 7, which needs no GPU: is every tensor on the device, and where does the engine read from it?"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.errors import BenchmarkError
from benchmarks.gpu.visit import Visit

_SOURCE = Path(__file__).with_name("no_cuda.cpp")
TIMEOUT_SECONDS = 110
DECODING = "one decode step"


def run(visit: Visit) -> None:
    """A decode step and a training pass on fake tensors of device `cuda`: no mixed devices; read-backs are listed."""
    add = visit.findings.table(
        "Where the host reads from the device (each is a wait), per action", ["action", "what", "where", "times"]
    )
    for found in examine():
        if found["action"] != DECODING and not can_go_backward():
            add(
                [found["action"], "not examined: torch has CUDA and sees no GPU, so autograd refuses fake ones", "", ""]
            )
            continue
        name = f"placement: {found['action']}"
        detail = f"{found['place']}: {found['error']}" if found["error"] else ""
        visit.findings.require(name, found["error"] is None, detail[:400])
        for what, place, count in found["read_backs"]:
            add([found["action"], what, place, str(count)])


def can_go_backward() -> bool:
    """Whether autograd takes fake CUDA tensors here: with a GPU, or where the stand-in of no_cuda.cpp is loaded."""
    return torch.cuda.is_available() or not torch.backends.cuda.is_built()


def examine(module: str = "benchmarks.gpu.fake_device") -> list[dict[str, Any]]:
    """What fake_device.py found, in a process of its own. Raises BenchmarkError when it ends without an answer."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if not torch.backends.cuda.is_built():
        environment["LD_PRELOAD"] = str(stand_in())
    done = subprocess.run(
        [sys.executable, "-m", module], capture_output=True, text=True, env=environment, timeout=TIMEOUT_SECONDS
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        raise BenchmarkError(f"{module} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    return json.loads(lines[-1])


def stand_in() -> Path:
    """The library of no_cuda.cpp for this torch, compiled on first use."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise BenchmarkError("torch is built without CUDA and there is no C++ compiler: install g++, or set CXX")
    torch_folder = Path(torch.__file__).parent
    root = Path(tempfile.gettempdir()) / f"tinker-no-cuda-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    digest = hashlib.sha256(f"{torch_folder}\n{_SOURCE.read_text()}".encode()).hexdigest()[:12]
    target = root / f"{torch.__version__}-{digest}.so"
    if target.exists():
        return target
    library = torch_folder / "lib"
    staging = target.with_suffix(f".{os.getpid()}.so")
    command = [compiler, "-shared", "-fPIC", "-std=c++20", f"-I{torch_folder / 'include'}", str(_SOURCE)]
    command += ["-o", str(staging), f"-L{library}", f"-Wl,-rpath,{library}", "-lc10", "-ltorch_cpu"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise BenchmarkError(f"no_cuda.cpp does not compile: {done.stderr.strip()[-2000:]}")
    os.replace(staging, target)
    return target
