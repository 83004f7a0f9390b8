"""Checks of correctness hold on the CPU, and a planted fault of each kind is caught and named."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.gpu import sampling_checks, state_checks, training_checks
from benchmarks.gpu.case import Case
from benchmarks.gpu.findings import Findings
from benchmarks.gpu.stand_ins import graphs_for
from tinker_local_backend.engine.cuda.decoder import Decoder
from tinker_local_backend.engine.cuda.execution import CudaExecution
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.sampling import decode_batch, generation
from tinker_local_backend.engine.training import micro_batch, trainer


def failed(findings: Findings) -> list[str]:
    return [check.name for check in findings.checks if not check.ok]


def test_a_wrong_logprob_is_caught(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    original = generation.next_tokens
    error = 2e-3 if case.model.dtype == torch.float32 else 0.1

    def wrong(*arguments: Any) -> Any:
        tokens, logprobs, tempered = original(*arguments)
        return tokens, logprobs + error, tempered

    monkeypatch.setattr(generation, "next_tokens", wrong)
    sampling_checks.sampled_equals_teacher_forced(case)
    names = failed(case.findings)
    assert len([name for name in names if "sampled against teacher-forced, temperature 1" in name]) >= 1
    assert {name.split(":")[0] for name in names} == {case.name}


def test_logprobs_of_the_wrong_temperature_are_caught(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    original = generation.next_tokens

    def untempered(logits: torch.Tensor, params: Any, positions: Any) -> Any:
        tokens, _, tempered = original(logits, params, positions)
        return tokens, logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0], tempered

    monkeypatch.setattr(generation, "next_tokens", untempered)
    sampling_checks.sampled_equals_teacher_forced(case)
    names = " ".join(failed(case.findings))
    assert "temperature 0.7" in names and "temperature 1.5" in names
    assert "temperature 0," not in names and "temperature 1," not in names.replace("temperature 1.", "")


def test_rows_that_use_another_rows_adapter_are_caught(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    original = decode_batch.group_rows
    monkeypatch.setattr(
        decode_batch, "group_rows", lambda adapters, device: original([*adapters[1:], adapters[0]], device)
    )
    sampling_checks.adapters_in_one_batch(case)
    assert any("mixed batch" in name for name in failed(case.findings))


def test_a_snapshot_that_training_changes_is_caught(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    from tinker_local_backend.engine.model.lora import Adapter

    monkeypatch.setattr(Adapter, "snapshot", lambda self, dtype: self)
    sampling_checks.snapshots_are_frozen(case)
    assert any("snapshot after a training step" in name for name in failed(case.findings))


def test_a_wrong_gradient_is_caught(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    original = trainer.backpropagate

    def wrong(model: Any, carry_back: Any, gradient: Any, adapter: Any, gradients: list[torch.Tensor]) -> None:
        original(model, carry_back, gradient, adapter, gradients)
        largest = max(range(len(gradients)), key=lambda i: float(gradients[i].norm()))
        gradients[largest] *= 1.2

    monkeypatch.setattr(trainer, "backpropagate", wrong)
    training_checks.losses_against_float64(case)
    names = failed(case.findings)
    assert {f"{case.name}: gradient of {loss}" for loss in training_checks.LOSSES} <= set(names)
    assert not any("loss " in name for name in names), "values are right"


def test_an_engine_that_does_not_survive_running_out_of_memory_is_caught(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(micro_batch, "out_of_memory", lambda error: False)
    with case.findings.guarded("out_of_memory_in_training"):
        state_checks.out_of_memory_in_training(case)
    (check,) = [check for check in case.findings.checks if not check.ok]
    assert check.name == "out_of_memory_in_training"
    assert "out of memory" in check.detail


def test_memory_that_never_runs_short_is_a_failed_check(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_checks, "STAND_IN_TOKENS", 10**6)
    state_checks.out_of_memory_in_training(case)
    assert any("provoked and survived" in name for name in failed(case.findings))


def test_the_memory_limit_ends_with_its_block(case: Case) -> None:
    before = BaseModel.hidden_states
    with pytest.raises(RuntimeError, match="inside"), state_checks.short_of_memory(case, 0):
        assert BaseModel.hidden_states is not before
        raise RuntimeError("inside")
    assert BaseModel.hidden_states is before


def test_the_reference_leaves_the_engine_alone(case: Case) -> None:
    """A model made from the engine's config must not share it: transformers writes the attention to use into it."""
    sampling_checks.prompt_logprobs(case)
    training_checks.losses_against_float64(case)
    sampling_checks.prompt_logprobs(case)
    assert failed(case.findings) == []


@pytest.mark.slow
def test_steps_that_are_not_of_one_size_are_noticed(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    sampling_checks.exact_rows(case)
    assert case.findings.checks == [], "it is about captured steps"
    monkeypatch.setattr(case.model, "execution", CudaExecution(case.model, graphs_for(case.model.device)))
    sampling_checks.exact_rows(case)
    assert [check.ok for check in case.findings.checks] == [True]
    original = Decoder.run

    def drifting(decoder: Any, rows: Any, *rest: Any, **named: Any) -> Any:
        burst = original(decoder, rows, *rest, **named)
        return replace(burst, logprobs=burst.logprobs + 1e-6 * len(rows))

    monkeypatch.setattr(Decoder, "run", drifting)
    sampling_checks.exact_rows(case)
    (check,) = case.findings.checks[1:]
    assert not check.ok and check.measured == len(case.prompts)
