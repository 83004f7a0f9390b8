"""The same work beside other tools, in turns in one run: transformers with PEFT, and TRL and vLLM where installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks import rl_step, sampling, training
from benchmarks.gpu.visit import Visit
from benchmarks.report import Report


def run(visit: Visit) -> None:
    """The benchmarks of sampling, training and GRPO steps with few repetitions; a peer that is missing has a row that says so."""
    keys: dict[str, Any] = {
        "shape": visit.scale.peer_shape,
        "device": visit.device.type,
        "dtype": visit.dtype_name,
        "threads": 1 if visit.scale.name == "tiny" else 4,
        "rank": visit.rank,
        "repetitions": visit.scale.peer_repetitions,
        "max_new_tokens": visit.scale.peer_tokens,
        "quiet_seconds": 0.0,
        "reruns": 0,
    }
    comparisons: tuple[tuple[str, Callable[[], Report]], ...] = (
        (
            "sampling",
            lambda: sampling.run(
                sampling.Config(**keys, peers=["hf", "vllm"], vllm_python=visit.vllm_python, decode_rows=())
            ),
        ),
        ("training", lambda: training.run(training.Config(**keys, peers=["trl"]))),
        ("GRPO and DPO steps", lambda: rl_step.run(rl_step.Config(**keys))),
    )
    for name, compare in comparisons:
        if visit.findings.time_is_up:
            visit.findings.leave_out(f"beside other tools: {name}")
            continue
        with visit.findings.guarded(f"beside other tools: {name}"):
            report = compare()
            visit.findings.data[name] = report.measurements
            for table in report.tables:
                add = visit.findings.table(f"{table.title} ({visit.scale.peer_shape})", table.columns)
                for row in table.rows:
                    add(row)
        visit.free()
