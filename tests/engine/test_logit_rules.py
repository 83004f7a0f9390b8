"""Penalties, logit bias and min_tokens: what is drawn, what is reported, and that other rows notice nothing."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.reference import Reference
from tests.engine.helpers import assert_near, assert_same_tokens, params, prompt, random_tokens
from tinker_local_backend import Constraint, RequestError, SamplingClient
from tinker_local_backend.engine.sampling.logit_rules import LogitRules, LogitState, PromptLogits, changed_logits

TOKENS = random_tokens(9, 4)
LENGTH = 12
RULES: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7},
    "negative": {"frequency_penalty": -0.4, "presence_penalty": -0.3},
    "repetition": {"repetition_penalty": 1.3},
    "bias": {"logit_bias": {TOKENS[0]: 3.5, 7: 2.0, 8: -100.0}},
    "all": {
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "repetition_penalty": 0.8,
        "logit_bias": {TOKENS[1]: 1.0, 9: -2.0},
    },
}


def changed(logits: np.ndarray, drawn: list[int], rules: dict[str, Any]) -> np.ndarray:
    """The definition, one token after the other, in float64."""
    out, counts = logits.astype(np.float64).copy(), Counter(drawn)
    for token, value in rules.get("logit_bias", {}).items():
        out[token] += value
    for token in {*TOKENS, *drawn}:
        penalty = rules.get("repetition_penalty", 1.0)
        out[token] = out[token] / penalty if out[token] > 0 else out[token] * penalty
    for token, count in counts.items():
        out[token] -= count * rules.get("frequency_penalty", 0.0) + rules.get("presence_penalty", 0.0)
    return out


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_greedy_tokens_are_the_definition_s_and_logprobs_those_of_the_untouched_logits(
    base_sampler: SamplingClient, reference: Reference, rules: dict[str, Any]
) -> None:
    future = base_sampler.sample(prompt(TOKENS), 1, params(LENGTH, 0.0, stop=[], **rules))
    (sequence,) = future.result().sequences
    with torch.no_grad():
        logits = reference.logits([*TOKENS, *sequence.tokens][:-1])[len(TOKENS) - 1 :].numpy()
    expected = [int(changed(row, sequence.tokens[:i], rules).argmax()) for i, row in enumerate(logits)]
    assert_same_tokens([sequence.tokens], [expected])
    plain = base_sampler.sample(prompt(TOKENS), 1, params(LENGTH, 0.0, stop=[])).result().sequences[0]
    assert plain.tokens != sequence.tokens
    assert sequence.logprobs is not None
    assert_near(sequence.logprobs, reference.completion_logprobs(TOKENS, sequence.tokens), atol=1e-4)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_changes_are_of_the_logits_and_not_of_the_tempered_ones(temperature: float) -> None:
    logits = np.random.default_rng(1).normal(scale=3, size=(3, 40)).astype(np.float32)
    given = RULES["all"] | {"logit_bias": {3: 1.0, 9: -2.0}}
    rules = LogitRules(0.4, 0.3, 0.8, ((3, 1.0), (9, -2.0)))
    shared = PromptLogits(rules, [token % 40 for token in TOKENS], [], torch.device("cpu"))
    state, drawn = LogitState(shared), [3, 5, 5, 30]
    for token in drawn:
        state.consume(token)
    divisors = torch.full((3,), temperature)
    out = changed_logits(torch.tensor(logits / temperature), divisors, [None, state, None]).numpy()
    for i in (0, 2):
        np.testing.assert_array_equal(out[i], logits[i] / np.float32(temperature))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.TOKENS", [token % 40 for token in TOKENS])
        np.testing.assert_allclose(out[1], changed(logits[1], drawn, given) / temperature, atol=2e-6)


def test_rows_of_a_batch_keep_their_own_and_those_without_any_keep_their_tokens_and_logprobs(
    base_sampler: SamplingClient,
) -> None:
    asked = [{}, RULES["all"], {"top_p": 0.8}, RULES["repetition"]]

    def ask(fields: dict[str, Any], seed: int) -> Any:
        return base_sampler.sample(prompt(TOKENS), 2, params(LENGTH, 0.9, stop=[], seed=seed, **fields))

    alone = [ask(fields, i).result().sequences for i, fields in enumerate(asked)]
    together = [future.result().sequences for future in [ask(fields, i) for i, fields in enumerate(asked)]]
    for left, right in zip(alone, together, strict=True):
        assert_same_tokens([s.tokens for s in left], [s.tokens for s in right])
    assert [s.tokens for s in ask({}, 1).result().sequences] != [s.tokens for s in alone[1]]


def test_min_tokens_puts_off_stop_tokens(base_sampler: SamplingClient) -> None:
    greedy = base_sampler.sample(prompt(TOKENS), 1, params(LENGTH, 0.0, stop=[])).result().sequences[0].tokens
    stops = {"stop": [greedy[0]], "logit_bias": {greedy[0]: 50.0}}
    for count in (0, 1, 4):
        future = base_sampler.sample(prompt(TOKENS), 1, params(LENGTH, 0.0, min_tokens=count, **stops))
        (sequence,) = future.result().sequences
        assert len(sequence.tokens) == count + 1 and sequence.tokens.index(greedy[0]) == count
        assert sequence.stop_reason == "stop"


def test_under_a_constraint_the_allowed_tokens_are_the_same_and_logprobs_ignore_both(
    base_sampler: SamplingClient, reference: Reference
) -> None:
    pytest.importorskip("llguidance", reason="needs the extra `constrain` (llguidance)")
    free, biased = (
        base_sampler.sample(
            prompt(TOKENS), 1, params(LENGTH, 0.0, logit_bias=bias), constraint=Constraint(regex="[ab]{4}")
        )
        .result()
        .sequences[0]
        for bias in ({}, {base_sampler.get_tokenizer().encode(letter)[0]: 60.0 for letter in "a"})
    )
    text = base_sampler.get_tokenizer().decode(biased.tokens[:-1])
    assert text == "aaaa" and set(base_sampler.get_tokenizer().decode(free.tokens[:-1])) <= set("ab")
    assert biased.logprobs is not None
    assert_near(biased.logprobs, reference.completion_logprobs(TOKENS, biased.tokens), atol=1e-4)
    among = base_sampler.compute_constrained_logprobs(
        prompt(TOKENS), biased.tokens, Constraint(regex="[ab]{4}"), 0.0
    ).result()
    assert_near(biased.constrained_logprobs, among, atol=1e-4)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"presence_penalty": 2.5}, r"presence_penalty must be in \[-2, 2\], got 2.5"),
        ({"frequency_penalty": float("nan")}, r"frequency_penalty must be in \[-2, 2\], got nan"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty must be in \[0.01, 100\] \(1: none\), got 0.0"),
        ({"repetition_penalty": 1e300}, r"repetition_penalty must be in \[0.01, 100\]"),
        ({"logit_bias": {5: 101.0}}, r"logit_bias of token 5 must be in \[-100, 100\], got 101"),
        ({"logit_bias": {1536: 1.0}}, r"logit_bias\[0\] is 1536, outside the vocabulary"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias has the key 'a'; keys must be token ids"),
        ({"min_tokens": -1}, "min_tokens must be an integer of at least 0, got -1"),
        ({"min_tokens": 99}, "min_tokens 99 exceeds max_tokens 8"),
        ({"min_tokens": 2, "stop": "x"}, "min_tokens 2 cannot delay a stop string"),
    ],
    ids=str,
)
def test_what_cannot_be_carried_out_is_refused_by_name(
    base_sampler: SamplingClient, fields: dict[str, Any], message: str
) -> None:
    given = {name: value for name, value in fields.items() if name != "logit_bias"}
    asked = params(**given)
    if "logit_bias" in fields:  # pydantic would refuse some of them itself
        asked = asked.model_copy(update={"logit_bias": fields["logit_bias"]})
    with pytest.raises(RequestError, match=message):
        base_sampler.sample(prompt(TOKENS), 1, asked)
