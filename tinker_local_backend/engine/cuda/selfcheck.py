"""Checks at start-up on a GPU that each part of the CUDA path agrees with the reference at the model's real shapes.

A part that fails is turned off, with a warning that names the check and its numbers; the reference computes it instead.
TINKER_LOCAL_CUDA=strict raises an error instead, and =eager uses only the reference.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tinker_local_backend import environment
from tinker_local_backend.engine.cuda import checks
from tinker_local_backend.engine.cuda.execution import ATTENTION, DECODING, FLASH, LAYERS, CudaExecution
from tinker_local_backend.engine.cuda.graphs import Graphs
from tinker_local_backend.engine.model.attention import Execution
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.errors import ModelLoadError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Check:
    """`measure` returns the relative error of a part against the reference."""

    part: str
    name: str
    measure: Callable[[BaseModel, Graphs], float]


CHECKS = (
    Check(LAYERS, "operations between products, and their gradients", checks.joined_layers),
    Check(DECODING, "paged attention", checks.paged_attention),
    Check(DECODING, "stored keys", checks.stored_keys),
    Check(DECODING, "top-k, top-p and min-p", checks.limits),
    Check(DECODING, "LoRA by slot", checks.lora_by_slot),
    Check(DECODING, "replayed against eager steps", checks.replay_against_eager),
    Check(DECODING, "all slots and base rows in one batch", checks.all_slots_in_one_batch),
    Check(DECODING, "sampled against trained logprobs", checks.sampled_against_trained),
    Check(ATTENTION, "one call for all sequences, and its gradients", checks.varlen_attention),
    Check(FLASH, "that call by flash-attn-4, and its gradients", checks.flash_attention),
    Check("rotary", "rotary positions and their gradient", checks.rotary),
    Check("swiglu", "SwiGLU and its gradients", checks.swiglu),
)
"""In order. After a check fails, the other checks of its part are skipped. `fuse_norms` itself checks the norms."""


@dataclass(frozen=True)
class Checked:
    """The result of a check. `failure` says what is wrong; None if it passed."""

    check: Check
    error: float | None
    bound: float
    failure: str | None


def run_checks(model: BaseModel, execution: CudaExecution) -> Iterator[Checked]:
    """Check every part that is on, and turn off those that fail."""
    bound = checks.BOUNDS[model.dtype]
    for check in CHECKS:
        if not execution.runs(check.part):
            continue
        error, failure = None, None
        try:
            error = check.measure(model, execution.graphs)
            if not error <= bound:
                failure = f"{check.name} is off by {error:.1e}, more than {bound:.0e}"
        except Exception as problem:
            lines = str(problem).strip().splitlines() or [""]
            failure = f"{check.name} failed with {type(problem).__name__}: {lines[0][:300]}"
        if failure is not None:
            execution.turn_off(check.part, failure)
        yield Checked(check, error, bound, failure)


def checked_execution(model: BaseModel, graphs: Graphs | None = None) -> Execution | None:
    """The CUDA path of this model without the parts that failed; None (the reference) under TINKER_LOCAL_CUDA=eager.

    Raises ModelLoadError if a part fails under TINKER_LOCAL_CUDA=strict.
    """
    mode = environment.read("TINKER_LOCAL_CUDA")
    if mode == "eager":
        return None
    began = time.monotonic()
    execution = CudaExecution(model, graphs)
    for checked in run_checks(model, execution):
        if checked.failure is None:
            continue
        if mode == "strict":
            raise ModelLoadError(
                f"model {model.name!r}: {checked.check.part} on {model.device} is wrong: {checked.failure}. "
                "TINKER_LOCAL_CUDA=strict makes this an error; unset it to run without this part, and report it (docs/gpu.md)"
            )
        logger.warning(
            "%s on %s is turned off, the reference computes it: %s. Please report this (docs/gpu.md)",
            checked.check.part,
            model.device,
            checked.failure,
        )
    parts = ", ".join(f"{part} {state}" for part, state in execution.parts().items())
    logger.info("checked the CUDA path in %.1f s: %s", time.monotonic() - began, parts)
    return execution
