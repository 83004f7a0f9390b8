"""The checks that run when a model is loaded on a GPU (engine/cuda/selfcheck.py), with the numbers that users do not see."""

from __future__ import annotations

import time
from unittest import mock

from benchmarks.gpu.models import random_model
from benchmarks.gpu.stand_ins import graphs_for
from benchmarks.gpu.visit import Visit
from tinker_local_backend.engine import models
from tinker_local_backend.engine.cuda.execution import FUSED, CudaExecution
from tinker_local_backend.engine.cuda.selfcheck import run_checks


def run(visit: Visit) -> None:
    """Every part at the real shapes of each model, against the reference."""
    for name in visit.scale.decoding_shapes:
        if visit.findings.time_is_up:
            visit.findings.leave_out(f"checks of {name}")
            continue
        with visit.findings.guarded(f"checks of {name}"):
            _check(visit, name)
        visit.free()


def _check(visit: Visit, name: str) -> None:
    with mock.patch.object(models, "start", lambda model: None):  # it would run the checks without reporting numbers
        model = random_model(name, visit.device, visit.dtype)
    execution = CudaExecution(model, graphs_for(visit.device))
    add = visit.findings.table(
        f"Checks at start, {name}, {visit.dtype_name}: relative error against the reference",
        ["part", "check", "error", "bound", "seconds"],
    )
    start = time.perf_counter()
    for checked in run_checks(model, execution):
        seconds, start = time.perf_counter() - start, time.perf_counter()
        error = float("nan") if checked.error is None else checked.error
        part, what = checked.check.part, checked.check.name
        add([part, what, f"{error:.1e}", f"{checked.bound:.0e}", f"{seconds:.1f}"])
        visit.findings.check(f"{name}: {part}, {what}", error, checked.bound, checked.failure or "")
    for part in FUSED:
        count, state = len(execution._fused.get(part, [])), execution.parts()[part]
        visit.findings.require(f"{name}: {part} are fused as the modules compute them", count > 0, f"{count}, {state}")
