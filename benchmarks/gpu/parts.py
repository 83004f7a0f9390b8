"""Each part of the CUDA path on and off, with all others on: its gain, and a check that results do not change."""

from __future__ import annotations

from benchmarks.gpu import decode_parts, training_parts
from benchmarks.gpu.models import random_model
from benchmarks.gpu.visit import Visit
from tinker_local_backend.engine.cuda.execution import CudaExecution


def run(visit: Visit) -> None:
    """Measure the first shape: decoding at the first mark's batch and context, then training."""
    name = visit.scale.decoding_shapes[0]
    model = random_model(name, visit.device, visit.dtype)
    if not isinstance(model.execution, CudaExecution):
        visit.findings.leave_out("parts on and off: TINKER_LOCAL_CUDA=eager leaves nothing to turn off")
        return
    for what, measure in (("decoding", decode_parts.run), ("training", training_parts.run)):
        with visit.findings.guarded(f"parts of {what} on and off"):
            measure(visit, name, model, model.execution)
        visit.free()
