"""The table of architectures says what is so, and would say what is wrong."""

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import architectures
from benchmarks.architecture_configs import ARCHITECTURES, NOT_LISTED, unlisted
from benchmarks.architectures import IN_PART, MARK, PAGE, REFUSED, SAMPLES, TRAINS, WRONG, check, table

pytestmark = pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*:UserWarning")

QUICK = {
    "granite": TRAINS,
    "cohere2": TRAINS,
    "gemma2": TRAINS,
    "smollm3": TRAINS,
    "starcoder2": TRAINS,
    "gemma3n_text": TRAINS,
    "minicpm3": TRAINS,
    "dbrx": SAMPLES,
    "falcon": TRAINS,
    "bloom": TRAINS,
    "llama4_text": IN_PART,
    "deepseek_v32": TRAINS,
    "minimax": TRAINS,
    "qwen3_vl": TRAINS,
    "deepseek_v4": REFUSED,
}
"""Scaled logits, shared norms with windows, soft caps, layers without positions, linears of other names, layers that share
keys, latent attention, experts in matrices of their own; and through transformers' own forward: attention without its interface,
ALiBi, chunks and temperatures, chosen tokens, linear attention."""


def verdicts_on_the_page() -> dict[str, str]:
    text = PAGE.read_text(encoding="utf-8")
    return dict(re.findall(r"^\| `([\w-]+)` \| ([\w ]+) \|", text[text.index(MARK) :], re.MULTILINE))


@pytest.mark.parametrize("model_type", QUICK)
def test_what_the_page_says_of_these_is_so(model_type: str, tmp_path: Path) -> None:
    finding = check(model_type, tmp_path)
    assert finding.verdict == QUICK[model_type] == verdicts_on_the_page()[model_type]
    compared = [finding.sampled, finding.trained, finding.gradient]
    assert [d is not None for d in compared] == [
        finding.verdict in (TRAINS, IN_PART, SAMPLES),
        finding.verdict in (TRAINS, IN_PART),
        finding.verdict in (TRAINS, IN_PART),
    ]
    assert bool(finding.reason) == (finding.verdict != TRAINS)


@pytest.mark.parametrize("model_type", ["phi3", "glm"])
def test_fused_projections_train_as_in_peft(model_type: str, tmp_path: Path) -> None:
    """One linear for queries, keys and values, or for gate and up, has one adapter."""
    finding = check(model_type, tmp_path)
    assert finding.verdict == TRAINS == verdicts_on_the_page()[model_type]
    assert finding.trained is not None and finding.gradient is not None
    assert max(finding.trained, finding.gradient) <= 1e-5


MIXTURES = ("qwen3_moe", "gpt_oss", "deepseek_v3", "nemotron_h", "mixtral")
"""Experts in one tensor, transposed with biases, behind latent attention, without a gate, and with nothing beside them."""


@pytest.mark.parametrize("model_type", MIXTURES)
def test_routed_experts_train_as_in_peft_in_both_layouts(model_type: str, tmp_path: Path) -> None:
    """Sampled logprobs near the trained ones, and gradients as in PEFT's target_parameters; `check` trains both layouts."""
    finding = check(model_type, tmp_path)
    assert finding.verdict == TRAINS == verdicts_on_the_page()[model_type] and not finding.reason
    assert finding.sampled is not None and finding.trained is not None and finding.gradient is not None
    assert finding.sampled + finding.trained <= 1e-4 and finding.gradient <= 1e-5


def test_a_check_of_experts_trains_both_layouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layouts, differences = [], architectures._training_differences

    def seen(client: Any, folder: Path) -> tuple[float, float, list[str]]:
        layouts.append(client._run.state.adapter.spec.experts)
        return differences(client, folder)

    monkeypatch.setattr(architectures, "_training_differences", seen)
    check("qwen3_moe", tmp_path)
    assert layouts == ["shared_outer", "per_expert"]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [name for name in ARCHITECTURES if name not in QUICK and name not in MIXTURES])
def test_what_the_page_says_of_the_others_is_so(model_type: str, tmp_path: Path) -> None:
    assert check(model_type, tmp_path).verdict == verdicts_on_the_page()[model_type]


def test_the_page_lists_them_all() -> None:
    page = verdicts_on_the_page()
    assert list(page) == list(ARCHITECTURES)
    assert set(page.values()) == {TRAINS, IN_PART, SAMPLES, REFUSED}


def test_every_causal_language_model_is_listed_or_left_out_for_a_reason() -> None:
    assert unlisted() == set()
    assert not ARCHITECTURES.keys() & NOT_LISTED.keys()


def test_a_wrong_result_is_called_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = architectures._plain_logprobs
    monkeypatch.setattr(architectures, "_plain_logprobs", lambda model, tokens: plain(model, tokens) + 0.002)
    finding = check("llama", tmp_path)
    assert finding.verdict == WRONG and finding.sampled == pytest.approx(0.002, rel=0.1)
    assert "1 WRONG" in table([finding])
