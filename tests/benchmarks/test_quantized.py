"""What is said of weights in fewer bits: the arithmetic of their memory, and an estimate of KL."""

import numpy as np
import pytest

from benchmarks import quantized
from benchmarks.quantized import cell, footprint_of, kl_of, memory_table
from tinker_local_backend.engine.model.memory_plan import of_card


def test_what_fits_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "MODELS", ("Qwen/Qwen3-8B", "Qwen/Qwen3-32B"))
    rows = {(row[0], row[1]): row[2:] for row in memory_table()[1:]}
    assert rows["Qwen/Qwen3-8B", "nf4"] == ["5.7", "15k / 19k", "49k / 51k", "49k / 104k", "272k / 155k"]
    assert rows["Qwen/Qwen3-32B", "bfloat16"][1:3] == ["-", "-"] and rows["Qwen/Qwen3-32B", "nf4"][2] == "8k / 13k"


def test_what_does_not_fit_is_not_a_number() -> None:
    found = footprint_of("Qwen/Qwen3-8B", None)
    assert of_card(16, found).missing > 0 and cell(found, 16) == "-"


def test_kl_is_nothing_for_equal_logprobs_and_grows_with_a_shift() -> None:
    logprobs = np.log(np.full(8, 0.25))
    assert kl_of(logprobs, logprobs) == (0.0, 0.0)
    mean, estimate = kl_of(logprobs, logprobs - 0.1)
    assert mean == pytest.approx(0.1) and 0 < estimate < 0.1
