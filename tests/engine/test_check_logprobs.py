"""The self-check a user runs on a new machine or model: it passes, and it notices when something is wrong."""

import pytest
import torch

from tests.engine.conftest import TINY_CHAT
from tests.engine.devices import here
from tinker_local_backend import check_logprobs
from tinker_local_backend.engine import generation, sampler

TOLERANCE = 1e-4 if here().dtype == torch.float32 else 0.1
"""as the tool's own help says"""

CONFIG = check_logprobs.Config(model=str(TINY_CHAT), max_tokens=8, num_samples=2, tolerance=TOLERANCE)


def test_it_passes_on_the_shipped_model(capsys: pytest.CaptureFixture[str]) -> None:
    check_logprobs.main(CONFIG)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "ok"
    assert [line.split()[0] for line in lines[:4]] == [f"temperature={t}" for t in ("1", "0.7", "1.5", "0")]
    assert lines[-2].startswith("max_abs_diff=")


def test_it_fails_when_the_temperature_is_left_out_of_the_logprobs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The classic mistake: samples are drawn at T, logprobs are reported at 1."""

    def broken(logits: torch.Tensor, *rest) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tokens, _, tempered = sampler.next_tokens(logits, *rest)
        return tokens, logits.log_softmax(dim=-1).gather(1, tokens[:, None])[:, 0], tempered

    monkeypatch.setattr(generation, "next_tokens", broken)
    with pytest.raises(SystemExit) as exit_info:
        check_logprobs.main(CONFIG)
    assert exit_info.value.code == 1
    captured = capsys.readouterr()
    assert "FAILED: sampler and trainer disagree" in captured.err
    assert "ok" not in captured.out.splitlines()


def test_a_difference_that_is_no_number_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_logprobs, "check", lambda config: float("nan"))
    with pytest.raises(SystemExit):
        check_logprobs.main(CONFIG)
