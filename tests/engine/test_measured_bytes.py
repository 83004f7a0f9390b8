"""What a token of a training pass takes of a GPU: the slope of two measured passes, with torch's counters pretended."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tinker_local_backend.engine.model import measured_bytes
from tinker_local_backend.engine.model.attention import PackedPlan
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.model.footprint import TokenBytes
from tinker_local_backend.engine.model.measured_bytes import measured_token_bytes
from tinker_local_backend.errors import ModelLoadError

FIXED, KEPT, RECOMPUTED = 1_000_000, 700, 90


@pytest.fixture
def model(tied_model: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[BaseModel]:
    """A model on a CPU whose passes take FIXED bytes and, for each token, KEPT or RECOMPUTED, as the counters of a GPU tell."""
    model = BaseModel(tied_model, torch.device("cpu"), torch.float32)
    original, most = model.training_pass, [0]

    def training_pass(tokens_T: torch.Tensor, *rest: Any, **options: Any) -> Any:
        most[0] = FIXED + len(tokens_T) * (RECOMPUTED if model._recomputation.on else KEPT)
        return original(tokens_T, *rest, **options)

    monkeypatch.setattr(model, "training_pass", training_pass)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5 + most[0])
    monkeypatch.setattr(measured_bytes, "TOKENS", (16, 48))
    yield model


def test_what_does_not_grow_with_the_tokens_is_not_counted(model: BaseModel) -> None:
    assert measured_bytes._measured(model) == TokenBytes(kept=KEPT, recomputed=RECOMPUTED, transient=0)


def test_no_position_is_beyond_the_context(model: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with learned positions has no others: on a GPU one that it lacks breaks the whole process."""
    seen: list[tuple[list[int], list[int]]] = []
    original = model.training_pass

    def training_pass(tokens_T: torch.Tensor, positions_T: torch.Tensor, plan: PackedPlan, *rest: Any) -> Any:
        seen.append((positions_T.tolist(), [segment.end - segment.start for segment in plan.segments]))
        return original(tokens_T, positions_T, plan, *rest)

    monkeypatch.setattr(model, "training_pass", training_pass)
    monkeypatch.setattr(model, "context_length", 20)
    assert measured_bytes._measured(model) == TokenBytes(kept=KEPT, recomputed=RECOMPUTED, transient=0)
    assert {tuple(lengths) for _, lengths in seen} == {(16,), (20, 20, 8)}
    assert all(positions == [n for length in lengths for n in range(length)] for positions, lengths in seen)


def test_on_a_cpu_it_is_the_estimate(model: BaseModel) -> None:
    assert measured_token_bytes(model) == model.token_bytes()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("no"), "could not be measured (out of memory)"),
        (RuntimeError("a kernel failed"), "could not be measured (RuntimeError: a kernel failed)"),
        (ModelLoadError("no adapter covers it"), None),
    ],
    ids=["out of memory", "another error", "a model that is sampled from only"],
)
def test_where_it_cannot_be_measured_it_is_estimated(
    model: BaseModel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    said: str | None,
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(model, "new_adapter", fails)
    with caplog.at_level(logging.WARNING):
        assert measured_bytes._measured(model) == model.token_bytes()
    assert (said in caplog.text) if said else not caplog.records
