"""Constraints through what stands over a sampling client: completers, the LM judge, a client in another process."""

import asyncio
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tinker

from tests.debate.test_judges import VIEW, judge
from tinker_cookbook.completers import TinkerMessageCompleter, TinkerTokenCompleter
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.debate.judges import JudgeConfig, make_judge
from tinker_cookbook.debate.lm_judge import LMJudge
from tinker_cookbook.debate.views import Winner
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import get_renderer, get_text_content
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.weights_config import WeightsConfig
from tinker_local_backend import Constraint, LocalSequence, RequestError, SamplingClient, ServiceClient
from tinker_local_backend.remote_sampling_client import RemoteSamplingClient
from tinker_local_backend.sampler_host import SamplerHandle

TINY = str(EXAMPLE_DATA / "tiny_chat")
PROMPT = tinker.ModelInput.from_ints([5, 6, 7, 8])
ANSWER = Constraint(choices=["A", "B"])


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SamplingClient]:
    pytest.importorskip("llguidance", reason="needs the extra `constrain` (llguidance)")
    with ServiceClient(home=tmp_path_factory.mktemp("home")) as service:
        yield service.create_sampling_client(base_model=TINY).result()


def test_completers_answer_within_their_constraint(client: SamplingClient) -> None:
    renderer = get_renderer("qwen3_instruct", get_tokenizer(TINY))

    async def replies() -> set[str]:
        completer = TinkerMessageCompleter(client, renderer, 16, seed=1, constraint=ANSWER)
        return {get_text_content(await completer([{"role": "user", "content": "Hello"}])) for _ in range(12)}

    assert asyncio.run(replies()) <= {"A", "B"}
    policy = TinkerTokenCompleter(client, 16, seed=1, constraint=ANSWER)
    found = asyncio.run(policy.fork("x")(PROMPT, renderer.get_stop_sequences()))
    assert found.stop_reason == "stop" and client.get_tokenizer().decode(found.tokens[:-1]) in ("A", "B")
    # What is trained on: the logprobs of the whole distribution, which the trainer computes too.
    scored = client.compute_logprobs(tinker.ModelInput.from_ints([*PROMPT.to_ints(), *found.tokens])).result()
    np.testing.assert_allclose(found.logprobs, np.array(scored[4:], dtype=float), atol=1e-4)


def test_a_judge_can_only_answer_with_a_verdict_of_its_protocol(client: SamplingClient) -> None:
    renderer = get_renderer("qwen3_instruct", get_tokenizer(TINY))
    by = LMJudge(TinkerTokenCompleter(client, 32, temperature=2.0, seed=3), renderer, constrained=True)
    labels = {f"<VERDICT>{label}</VERDICT>" for label in VIEW.labels}
    for debate in range(6):
        verdict = judge(by, dataclasses.replace(VIEW, key=(debate, 0, 0)))
        assert verdict.raw_response in labels and verdict.retries == 0 and verdict.winner is not Winner.INVALID
    config = JudgeConfig(
        name="lm", constrained=True, weights=WeightsConfig(base_model=TINY, renderer_name="qwen3_instruct")
    )
    assert judge(asyncio.run(make_judge(config))).raw_response in labels


@pytest.mark.parametrize("changes", [{"name": "live"}, {"name": "endpoint"}, {"name": "mock"}, {"soft": True}], ids=str)
def test_only_an_lm_judge_that_writes_its_verdict_is_constrained(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"judge\.constrained=true: only a reply that an lm judge writes"):
        JudgeConfig(**{"name": "lm", "constrained": True, **changes})


def test_a_missing_package_is_found_when_the_config_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinker_cookbook.local_sampling.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"judge\.constrained=true needs the package llguidance: pip install"):
        JudgeConfig(name="lm", constrained=True)
    JudgeConfig(name="lm")


def test_a_hosted_client_takes_none() -> None:
    hosted = tinker.SamplingClient.__new__(tinker.SamplingClient)
    with pytest.raises(ConfigurationError, match="constraint: the hosted service does not offer it"):
        asyncio.run(TinkerTokenCompleter(hosted, 4, constraint=ANSWER)(PROMPT, []))


def test_another_process_gets_the_same_samples_scores_and_errors(client: SamplingClient) -> None:
    remote = RemoteSamplingClient(SamplerHandle.decode(client.get_sampler_handle()))
    params = tinker.SamplingParams(max_tokens=20, seed=3, temperature=0.8)
    schema = Constraint(json_schema={"type": "object", "properties": {"z": {}, "a": {"type": "null"}}})
    for constraint in (ANSWER, Constraint(regex="[ab]{3}"), Constraint(grammar='start: "x" "y"'), schema):
        found, expected = (
            who.sample(PROMPT, 2, params, constraint=constraint).result().sequences for who in (remote, client)
        )
        for left, right in zip(found, expected, strict=True):
            assert isinstance(left, LocalSequence) and isinstance(right, LocalSequence)
            assert left.tokens == right.tokens
            np.testing.assert_allclose(left.constrained_logprobs or [], right.constrained_logprobs or [], atol=1e-5)
            scored = remote.compute_constrained_logprobs(PROMPT, left.tokens, constraint, 0.8).result()
            np.testing.assert_allclose(scored, right.constrained_logprobs or [], atol=1e-4)
    free = remote.sample(PROMPT, 1, params).result().sequences[0]
    assert isinstance(free, LocalSequence) and free.constrained_logprobs is None
    with pytest.raises(RequestError, match="regex cannot be compiled"):
        remote.sample(PROMPT, 1, params, constraint=Constraint(regex="(")).result()
