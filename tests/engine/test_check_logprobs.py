"""The self-check a user runs on a new machine or model: it passes, and it notices when something is wrong."""

import importlib.metadata
from typing import Any

import chz
import numpy as np
import pytest
import torch

from tests.engine.conftest import TINY_CHAT
from tests.engine.devices import here
from tinker_local_backend import check_logprobs
from tinker_local_backend.check_logprobs import TOLERANCES, Differences, Tolerance, violations
from tinker_local_backend.engine.cuda import step
from tinker_local_backend.engine.sampling import token_choice as sampler

CONFIG = check_logprobs.Config(model=str(TINY_CHAT), max_tokens=12, num_samples=2)


def lines_of(capsys: pytest.CaptureFixture[str], **keys: Any) -> list[str]:
    check_logprobs.main(chz.replace(CONFIG, **keys))
    return capsys.readouterr().out.splitlines()


def test_it_passes_on_the_shipped_model(capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of(capsys)
    assert lines[-1] == "ok"
    assert [line.split()[0] for line in lines[:5]] == ["model", *(f"temperature={t}" for t in ("1", "0.7", "1.5", "0"))]
    dtype = str(here().dtype).removeprefix("torch.")
    assert lines[-2].startswith("max_abs_diff=") and dtype in lines[-2]
    checked, *versions = lines[0].split(", dtype ")[0], *lines[0].split(", ")[3:]
    assert checked == f"model {TINY_CHAT}" and f", dtype {dtype}, device {here().device}" in lines[0]
    assert versions == [
        *(f"{package} {importlib.metadata.version(package)}" for package in ("torch", "transformers", "tinker")),
        f"CUDA {torch.version.cuda}",
    ]


def test_differences_are_given_by_depth(capsys: pytest.CaptureFixture[str]) -> None:
    """Every completion goes on to max_tokens, so each depth has as many tokens."""
    lines = lines_of(capsys, max_tokens=20, temperatures=[1.0])
    depths = [line.partition(": ") for line in lines if line.startswith("tokens ")]
    assert [name for name, _, _ in depths] == ["tokens 0..7", "tokens 8..15", "tokens 16..31"]
    assert [rest.split()[0] for _, _, rest in depths] == ["tokens=64", "tokens=64", "tokens=32"]


def test_a_prompt_of_ones_own_and_limits_on_sampling(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    original = check_logprobs.compare

    def compare(training: Any, sampling: Any, prompts: Any, *rest: Any) -> Differences:
        seen.append((prompts, rest[-1]))
        return original(training, sampling, prompts, *rest)

    monkeypatch.setattr(check_logprobs, "compare", compare)
    lines = lines_of(capsys, prompt="What is 7 * 8?", top_k=5, top_p=0.8, min_p=0.1, temperatures=[1.0])
    assert lines[1].startswith("temperature=1  tokens=24 ") and lines[-1] == "ok"
    ((prompts, params),) = seen
    assert len(prompts) == 1 and (params.top_k, params.top_p, params.min_p) == (5, 0.8, 0.1)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_the_tolerance_is_that_of_the_dtype_and_finds_a_forgotten_temperature(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dtype: str
) -> None:
    """The classic mistake: samples are drawn at T, logprobs are reported at 1."""
    monkeypatch.setenv("TINKER_LOCAL_DTYPE", dtype)
    assert lines_of(capsys)[-1] == "ok"

    def broken(logits: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tokens, _, tempered = choose(logits, *rest)
        return tokens, logits.log_softmax(dim=-1).gather(1, tokens[:, None])[:, 0], tempered

    choose = sampler.choose
    for module in (sampler, step):  # a captured step has its own reference to it
        monkeypatch.setattr(module, "choose", broken)
    with pytest.raises(SystemExit) as exit_info:
        check_logprobs.main(CONFIG)
    assert exit_info.value.code == 1
    captured = capsys.readouterr()
    assert "FAILED: sampler and trainer disagree (mean" in captured.err
    assert "ok" not in captured.out.splitlines()


def test_a_tolerance_that_is_given_is_that_of_the_largest_difference(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        lines_of(capsys, tolerance=1e-12)
    assert "largest" in capsys.readouterr().err


def test_means_and_percentiles_are_tighter_than_a_maximum() -> None:
    """One token far off is rounding in bfloat16, and a mistake in float32; all of them a little off is a mistake in both."""
    one_far, all_off = np.r_[np.zeros(4999), 0.5], np.full(5000, 0.05)
    assert violations(one_far, TOLERANCES[torch.bfloat16]) == []
    assert [text.split()[0] for text in violations(one_far, TOLERANCES[torch.float32])] == ["mean", "largest"]
    assert [text.split()[0] for text in violations(all_off, TOLERANCES[torch.bfloat16])] == ["mean"]


def test_a_difference_that_is_no_number_fails() -> None:
    assert len(violations(np.array([0.0, np.nan]), Tolerance(np.inf, np.inf, np.inf))) == 3
