"""Sections run in this process, on the CPU, at the tiny scale."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.case import Case, open_case
from benchmarks.gpu.findings import Findings
from benchmarks.gpu.scale import SCALES
from benchmarks.gpu.stand_ins import varlen_on_a_cpu
from benchmarks.gpu.visit import Visit

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="session")
def attention_on_a_cpu() -> Iterator[None]:
    with varlen_on_a_cpu():
        yield


@pytest.fixture
def findings(tmp_path: Path) -> Findings:
    return Findings("test", tmp_path / "findings.json")


@pytest.fixture
def visit(findings: Findings) -> Visit:
    rates = {"copy": 1e10, "bfloat16": 1e11, "float32": 1e11}
    return Visit(CPU, SCALES["tiny"], 4, findings, rates)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def case(findings: Findings, request: pytest.FixtureRequest) -> Iterator[Case]:
    """A random model with a trained adapter."""
    with open_case("random", SCALES["tiny"], CPU, request.param, 4, findings) as case:
        yield case
