"""The inputs of a peer."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.config import ComparisonConfig
from benchmarks.models import Shape
from benchmarks.workload import Workload


@dataclass(frozen=True)
class Setup:
    """The inputs of a peer. Resources to close at the end go into `stack`; a peer may add to `versions`."""

    config: ComparisonConfig
    shape: Shape
    model: Path
    adapter: Path | None
    """PEFT folder; None in benchmarks that train a new one"""
    workload: Workload
    stack: ExitStack
    vllm_python: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
