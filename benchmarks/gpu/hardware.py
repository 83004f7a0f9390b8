"""Facts about the machine, and its peak rates."""

from __future__ import annotations

import os
import subprocess

import torch

from benchmarks import rates
from benchmarks.gpu.visit import Visit
from benchmarks.machine import gpu_name
from benchmarks.report import number


def run(visit: Visit) -> None:
    """Record facts, and the three rates that later sections divide by (`copy`, `bfloat16`, `float32`)."""
    add = visit.findings.table("Machine", ["what", "value"])
    for row in facts(visit.device):
        add(row)
    measured = {"copy": rates.copy_bandwidth(visit.device.type)}
    add(["copy within the device's memory, bytes read and written", f"{number(measured['copy'] / 1e9)} GB/s"])
    for dtype in ("bfloat16", "float32"):
        measured[dtype] = rates.matmul_rate(visit.device.type, dtype)
        add([f"large {dtype} matrix product", f"{number(measured[dtype] / 1e12)} TFLOP/s"])
    visit.findings.data["rates"] = measured
    if visit.on_gpu:
        visit.findings.data["gpu"] = gpu_name()
        visit.findings.require(
            "float32 products are float32",
            torch.get_float32_matmul_precision() == "highest",
            "TF32 would hide errors of the engine; unset torch.set_float32_matmul_precision",
        )


def facts(device: torch.device) -> list[list[str]]:
    rows = [["torch", torch.__version__], ["cores", str(os.cpu_count())]]
    if device.type != "cuda":
        return [["device", "CPU: the command is tried, no GPU is measured"], *rows]
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return [
        ["GPU", properties.name],
        ["compute capability", f"{properties.major}.{properties.minor}"],
        ["multiprocessors", str(properties.multi_processor_count)],
        ["driver", _driver()],
        ["CUDA of torch", str(torch.version.cuda)],
        ["memory", f"{total / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free"],
        *rows,
    ]


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown (nvidia-smi does not answer)"
    return done.stdout.splitlines()[0].strip()
