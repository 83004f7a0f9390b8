"""A sampling pass that runs out of memory is begun again with fewer sequences; any other failure is each request's own error."""

import logging

import pytest
import torch

from tests.engine.direct import Direct, request
from tests.engine.helpers import assert_same_tokens, random_tokens
from tinker_local_backend.engine.engine import Engine
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.models import load_model
from tinker_local_backend.engine.sampling.requests import PromptScoring
from tinker_local_backend.errors import SamplingError

PROMPTS = [random_tokens(5 + 3 * i, i) for i in range(6)]


@pytest.fixture(scope="module")
def model(tied_model: str) -> BaseModel:
    return load_model(tied_model)


def run(model: BaseModel) -> list[list[int]]:
    direct = Direct(model)
    results = direct.run(*(request(tokens, samples=3, seed=i) for i, tokens in enumerate(PROMPTS)))
    return [sequence.tokens for result in results for sequence in result.sequences]


@pytest.mark.parametrize("limit", [20, 10, 4])
def test_out_of_memory_begins_again_with_fewer_at_a_time(
    model: BaseModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, limit: int
) -> None:
    """More than `limit` rows in a decode step do not fit; the tokens are those of enough memory."""
    expected = run(model)
    forward = model.hidden_states

    def limited(tokens_T: torch.Tensor, *rest) -> torch.Tensor:
        if len(tokens_T) > max(limit, max(map(len, PROMPTS))):
            raise torch.OutOfMemoryError("CUDA out of memory (a test)")
        return forward(tokens_T, *rest)

    monkeypatch.setattr(model, "hidden_states", limited)
    with caplog.at_level(logging.WARNING):
        assert_same_tokens(run(model), expected)
    assert "out of memory with" in caplog.text


def test_out_of_memory_for_a_single_sequence_names_the_mend(model: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*inputs) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory (a test)")

    monkeypatch.setattr(model, "hidden_states", never)
    direct = Direct(model)
    submitted = direct.submit(*(request(tokens) for tokens in PROMPTS))
    direct.finish()
    for one in submitted:
        with pytest.raises(SamplingError, match="use a smaller model or max_tokens"):
            _ = one.result


def test_another_failure_gives_every_request_an_error_of_its_own(
    model: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*inputs) -> torch.Tensor:
        raise RuntimeError("a defect")

    with monkeypatch.context() as patch:
        patch.setattr(model, "hidden_states", broken)
        direct = Direct(model)
        submitted = direct.submit(*(request(tokens) for tokens in PROMPTS[:2]))
        direct.finish()
    errors = [one.outcomes[0] for one in submitted]
    assert [str(error) for error in errors] == ["a sampling pass failed: RuntimeError: a defect"] * 2
    assert errors[0] is not errors[1] and all(
        isinstance(error, SamplingError) and error.__traceback__ is None for error in errors
    )


@pytest.mark.cpu_promise
def test_the_default_budget_is_bytes_whatever_the_context(model: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinker_local_backend.engine.engine.DEFAULT_KV_BYTES_CPU", 10 * model.kv_bytes_per_token())
    assert model.context_length > 10
    assert Engine.default_kv_tokens(model) == 10


def test_prompts_that_do_not_fit_together_leave_the_number_of_sequences_alone(
    model: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scoring-only prompts hold no rows: shorter passes are the fix."""
    forward = model.hidden_states

    def limited(tokens_T: torch.Tensor, *rest) -> torch.Tensor:
        if len(tokens_T) > 30:
            raise torch.OutOfMemoryError("CUDA out of memory (a test)")
        return forward(tokens_T, *rest)

    monkeypatch.setattr(model, "hidden_states", limited)
    direct = Direct(model)
    most = direct.generator._backoff.running
    scored = direct.run(*(request(t, samples=0, scoring=PromptScoring(logprobs=True)) for t in PROMPTS))
    assert all(result.prompt.logprobs is not None for result in scored)
    assert direct.generator._backoff.running == most
