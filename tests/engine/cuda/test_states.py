"""Models with layers that keep a state: what the CUDA path leaves to the reference, and which kernels a GPU misses."""

import importlib.util
import itertools
import logging
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import logging as transformers_logging

from benchmarks.architecture_configs import make_config
from benchmarks.gpu.stand_ins import graphs_for
from tests.engine.conftest import write_model
from tests.engine.devices import here
from tests.engine.helpers import random_tokens
from tinker_local_backend.engine import models
from tinker_local_backend.engine.cuda.execution import ATTENTION, DECODING, ON, CudaExecution
from tinker_local_backend.engine.cuda.selfcheck import checked_execution
from tinker_local_backend.engine.model.attention import PackedPlan, Reference, Segment
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.models import KERNELS, describe, load_model, missing_kernels, new_generator
from tinker_local_backend.engine.sampling.generation import Generator

ROOT = Path(__file__).resolve().parents[3]


def load(model_type: str, folder: Path) -> BaseModel:
    model = load_model(write_model(make_config(model_type), folder, seed=3), here().device, here().dtype)
    model.execution = Reference()  # what is compared is chosen here
    return model


@torch.inference_mode()
def logits(model: BaseModel) -> torch.Tensor:
    """Of two sequences that share a prefix, and another one."""
    segments = [Segment(0, 9), Segment(9, 14, 9, (0, 9)), Segment(14, 16, 9, (0, 9)), Segment(16, 23)]
    positions = [*range(9), *range(9, 14), *range(9, 11), *range(7)]
    tokens, at = (torch.tensor(ids, device=model.device) for ids in (random_tokens(23, 0), positions))
    return model.logits(model.hidden_states(tokens, at, PackedPlan(segments), None), None)


@pytest.mark.parametrize(
    ("model_type", "off"),
    [
        ("qwen3_5_text", {DECODING: "off: recurrent layers"}),
        ("nemotron_h", {DECODING: "off: recurrent layers"}),
        ("lfm2", {DECODING: "off: recurrent layers"}),
        ("kimi_linear", dict.fromkeys((DECODING, ATTENTION), "off: heads or their widths differ")),
        ("mamba", dict.fromkeys((DECODING, ATTENTION), "off: no attention layers")),
    ],
)
def test_decoding_is_left_to_the_reference_and_the_rest_agrees(
    model_type: str, off: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = load(model_type, tmp_path)
    expected = logits(model)
    execution = checked_execution(model, graphs_for(model.device))
    assert isinstance(execution, CudaExecution)
    model.execution = execution
    shown = describe(model)
    assert {part: shown[part] for part in (DECODING, ATTENTION)} == {ATTENTION: ON, **off} and shown["path"] == "cuda"
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [text for text in warnings if "pip install" not in text] == [], "but for kernels that are not installed"
    assert type(new_generator(model, 512, itertools.count().__next__)) is Generator
    difference = (logits(model) - expected).norm() / expected.norm()
    assert difference < {torch.float32: 1e-5, torch.bfloat16: 2e-2}[model.dtype]


def test_heads_of_which_a_part_is_rotated_are_fused(tmp_path: Path) -> None:
    """Qwen3.5 rotates a quarter of each head."""
    model = load("qwen3_5_text", tmp_path)
    expected = logits(model)
    model.execution = CudaExecution(model, graphs_for(model.device))
    assert model.execution.parts()["rotary"] == ON
    assert (logits(model) - expected).norm() / expected.norm() < {torch.float32: 1e-5, torch.bfloat16: 2e-2}[
        model.dtype
    ]


class TestKernels:
    @pytest.fixture(autouse=True)
    def not_warned(self) -> None:
        models._warn_of_kernels.cache_clear()

    @pytest.mark.parametrize(
        ("model_type", "packages"),
        [
            ("qwen3_5_text", [KERNELS["fla"], KERNELS["causal_conv1d"]]),
            ("kimi_linear", [KERNELS["fla"], KERNELS["causal_conv1d"]]),
            ("nemotron_h", [KERNELS["causal_conv1d"], KERNELS["mamba_ssm"]]),
            ("lfm2", [KERNELS["causal_conv1d"]]),
            ("qwen3", []),
        ],
    )
    def test_those_of_an_architecture(
        self, model_type: str, packages: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = load(model_type, tmp_path)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        assert missing_kernels(model) == tuple(packages)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "causal_conv1d" else object())
        assert missing_kernels(model) == tuple(package for package in packages if package == KERNELS["causal_conv1d"])

    def test_on_a_gpu_one_line_names_them_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = load("qwen3_5_text", tmp_path)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        monkeypatch.setattr(models, "start", lambda model: None)
        models._started(model)
        assert caplog.records == [] or here().device.type == "cuda"
        caplog.clear()
        models._warn_of_kernels.cache_clear()
        monkeypatch.setattr(model, "device", torch.device("cuda"))
        for _ in range(2):
            models._started(model)
        (line,) = [record.getMessage() for record in caplog.records]
        assert "pip install 'flash-linear-attention>=0.6' causal-conv1d (docs/gpu.md" in line

    def test_transformers_says_nothing_of_them_at_load(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        transformers_logging.warning_once.cache_clear()  # it prints a line once in a process
        source: Any = logging.getLogger("transformers")
        source.addHandler(caplog.handler)
        try:
            load("nemotron_h", tmp_path)
        finally:
            source.removeHandler(caplog.handler)
        assert "falling back" not in caplog.text
        assert logging.getLogger("transformers.integrations.hub_kernels").filters == []

    def test_the_extra_is_what_is_named(self) -> None:
        extras: Any = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert [f"'{package}'" for package in extras["linear"]] == [KERNELS["fla"]]
