"""What is said of layers with a state: the arithmetic of their cost, and that a difference would show."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.config import CommonConfig, environment
from benchmarks.states import RELEASED, SMALL, cost_table, logprobs_of_samples, write_model


def test_the_cost_of_released_models() -> None:
    rows = {row[0]: row[1:] for row in cost_table()[1:]}
    assert rows.keys() == RELEASED.keys()
    assert rows["Qwen/Qwen3.5-4B"] == ["49.5 MiB", "32 KiB", "1,584", "20", "330"]
    # 20 layers of 32 heads of 128 x 128 in float32, and three convolutions of 4,096 channels and width 4 in bfloat16
    assert (
        rows["moonshotai/Kimi-Linear-48B-A3B-Instruct"][0]
        == f"{20 * (32 * 128 * 128 * 4 + 3 * 4096 * 4 * 2) / 2**20:.1f} MiB"
    )
    assert rows["LiquidAI/LFM2-1.2B"] == ["120 KiB", "12 KiB", "10", "512", "512"]


@pytest.mark.parametrize("model_type", [name for name in SMALL if name != "qwen3"])
def test_logprobs_are_exact_in_float32(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.states.PROMPTS", (70,))
    monkeypatch.setattr("benchmarks.states.SAMPLES", 2)
    plain = write_model(model_type, tmp_path / "model", SMALL[model_type])
    with environment(CommonConfig(threads=1)):
        sampled, trained, exact = logprobs_of_samples(tmp_path / "model", tmp_path / "home", plain)
    assert len(sampled) > 100 and -10 < sampled.mean() < -1
    assert np.abs(sampled - trained).max() < 1e-4 and np.abs(sampled - exact).max() < 1e-4
