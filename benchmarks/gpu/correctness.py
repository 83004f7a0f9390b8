"""Compare the engine's results on this device with a float64 reference on the CPU."""

from __future__ import annotations

import itertools

import torch

from benchmarks.gpu import sampling_checks, state_checks, training_checks
from benchmarks.gpu.case import open_case
from benchmarks.gpu.visit import Visit

CHECKS = (*sampling_checks.CHECKS, *training_checks.CHECKS, *state_checks.CHECKS)
"""Each takes a case and adds its findings. One that raises counts as a failed check, and the others still run."""


def run(visit: Visit) -> None:
    """Every check on tiny_chat and on a random model of a real shape, in float32 and in bfloat16."""
    cases = itertools.product(("tiny_chat", "random"), (torch.float32, torch.bfloat16))
    for name, dtype in cases:
        label = f"{name} {str(dtype).removeprefix('torch.')}"
        if visit.findings.time_is_up:
            visit.findings.leave_out(f"correctness: {label}")
            continue
        with (
            visit.findings.guarded(f"{label}: the model loads and closes"),
            open_case(name, visit.scale, visit.device, dtype, visit.rank, visit.findings) as case,
        ):
            for check in CHECKS:
                if visit.findings.time_is_up:
                    visit.findings.leave_out(f"correctness: {label}, {check.__name__}")
                    continue
                with visit.findings.guarded(f"{case.name}: {check.__name__}"):
                    check(case)
        visit.free()
