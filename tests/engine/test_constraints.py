"""Samples under a constraint: that they obey it, what they report, and that nothing else of sampling changes."""

import json
import random
import re
import sys
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import tinker
import torch

from tests.engine.direct import Direct, alone, assert_same_samples, request
from tests.engine.helpers import assert_near, assert_same_tokens, datum, params, prompt, random_tokens
from tests.engine.schemas import random_schema, rooted
from tinker_local_backend import Constraint, LocalSequence, RequestError, SamplingClient, TrainingClient
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.sampling import constraints
from tinker_local_backend.engine.sampling.requests import SamplingRequest, StopRule
from tinker_local_backend.engine.sampling.token_choice import RowParams, next_allowed_tokens, next_tokens

pytest.importorskip("llguidance", reason="needs the extra `constrain` (llguidance)")
jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema, which the extra `dev` has")

TOKENS = random_tokens(9, 0)
END = 1513
WORDS = Constraint(regex="(abc|def){2,4}")
OBJECT = Constraint(
    json_schema={
        "type": "object",
        "properties": {"a": {"type": "string", "maxLength": 6}, "b": {"enum": ["x", "yy", 3]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
)


def constrained(
    client: SamplingClient, constraint: Constraint, samples: int = 1, max_tokens: int = 60, **fields
) -> list[LocalSequence]:
    future = client.sample(prompt(TOKENS), samples, params(max_tokens, **fields), constraint=constraint)
    found = list(future.result().sequences)
    assert all(isinstance(sequence, LocalSequence) for sequence in found)
    return found  # pyright: ignore[reportReturnType]


def text_of(client: SamplingClient, sequence: tinker.SampledSequence) -> str:
    """Without the stop token, which must be there."""
    assert sequence.stop_reason == "stop"
    return str(client.get_tokenizer().decode(sequence.tokens[:-1]))


@pytest.mark.parametrize("count", [80, pytest.param(1000, marks=pytest.mark.slow)])
def test_json_is_valid_under_its_schema(sampler: SamplingClient, count: int) -> None:
    rng = random.Random(count)
    schemas = [rooted(random_schema(rng)) for _ in range(count)]
    futures = [
        sampler.sample(prompt(random_tokens(3, i)), 1, params(200, seed=i), constraint=Constraint(json_schema=schema))
        for i, schema in enumerate(schemas)
    ]
    for schema, future in zip(schemas, futures, strict=True):
        jsonschema.validate(json.loads(text_of(sampler, future.result().sequences[0])), schema)


def test_each_choice_is_drawn_and_nothing_else(base_sampler: SamplingClient) -> None:
    choices = ["A", "AB", 'quo"te', "back\\slash", "new\nline", "größe 😀", "\x01", "<|im_end|>"]
    found = constrained(base_sampler, Constraint(choices=choices), 64, temperature=3.0, seed=1)
    assert {text_of(base_sampler, sequence) for sequence in found} == set(choices)
    special = set(base_sampler.get_tokenizer().added_tokens_decoder)
    assert all(special.isdisjoint(sequence.tokens[:-1]) for sequence in found)


def test_a_regex_and_a_grammar(base_sampler: SamplingClient) -> None:
    for sequence in constrained(base_sampler, WORDS, 8, seed=2):
        assert re.fullmatch("(abc|def){2,4}", text_of(base_sampler, sequence))
    nested = Constraint(grammar='start: "x" | "(" start ")"')
    for sequence in constrained(base_sampler, nested, 8, seed=2):
        assert re.fullmatch(r"(\(*)x(\)*)", text := text_of(base_sampler, sequence))
        assert text.count("(") == text.count(")")


@pytest.mark.parametrize(
    "fields", [{}, {"temperature": 0.6}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}], ids=str
)
def test_logprobs_are_those_of_the_whole_distribution_and_those_under_the_constraint_stand_next_to_them(
    training: TrainingClient, sampler: SamplingClient, fields: dict
) -> None:
    """The first against the trainer, which knows no constraint; the second against a pass over given tokens."""
    temperature = fields.get("temperature", 1.0)
    for constraint in (OBJECT, WORDS):
        for sequence in constrained(sampler, constraint, 3, seed=4, **fields):
            assert sequence.logprobs is not None and sequence.constrained_logprobs is not None
            forced = sampler.compute_constrained_logprobs(prompt(TOKENS), sequence.tokens, constraint, temperature)
            assert_near(sequence.constrained_logprobs, forced.result(), atol=1e-4)
            whole = [*TOKENS, *sequence.tokens]
            scored = datum(whole[:-1], target_tokens=whole[1:], weights=np.zeros(len(whole) - 1, dtype=np.float32))
            output = training.forward([scored], "cross_entropy", {"temperature": temperature or 1.0}).result()
            expected = output.loss_fn_outputs[0]["logprobs"].to_numpy()[len(TOKENS) - 1 :]
            assert_near(sequence.logprobs, expected, atol=1e-4)
            assert (
                min(np.subtract(sequence.constrained_logprobs, sequence.logprobs)) > 0.1
            )  # the constraint forbids a lot


def test_a_completion_that_the_constraint_forbids_has_logprob_minus_infinity_from_there_on(
    base_sampler: SamplingClient,
) -> None:
    encode = base_sampler.get_tokenizer().encode
    tokens = [*encode("abc"), *encode("x"), *encode("def"), END]
    found = base_sampler.compute_constrained_logprobs(prompt(TOKENS), tokens, WORDS).result()
    allowed = len(encode("abc"))
    assert np.isfinite(found[:allowed]).all() and np.isneginf(found[allowed:]).all()
    early = base_sampler.compute_constrained_logprobs(prompt(TOKENS), [*encode("abc"), END], WORDS).result()
    assert np.isneginf(early[-1])


def test_a_stop_token_comes_exactly_where_the_text_is_complete(base_sampler: SamplingClient) -> None:
    (letter,) = base_sampler.get_tokenizer().encode("b")
    for sequence in constrained(base_sampler, Constraint(regex="abb*"), 8, seed=3, stop=[letter]):
        assert re.fullmatch("abb+", str(base_sampler.get_tokenizer().decode(sequence.tokens)))
        assert sequence.tokens[-1] == letter and letter not in sequence.tokens[:-1]
    for stop in ([], ["zzz"], None):  # nothing else could end them
        for sequence in constrained(base_sampler, Constraint(regex="ab"), 4, seed=3, stop=stop):
            assert sequence.tokens[-1] == END and text_of(base_sampler, sequence) == "ab"
    lengths = {len(s.tokens) for s in constrained(base_sampler, Constraint(regex="(abc)*"), 32, seed=3)}
    assert len(lengths) > 1  # complete from the start on, and the model chooses


def test_max_tokens_cuts_a_text_short(base_sampler: SamplingClient) -> None:
    (sequence,) = constrained(base_sampler, WORDS, max_tokens=1, seed=0)
    assert sequence.stop_reason == "length" and len(sequence.tokens) == len(sequence.constrained_logprobs or ()) == 1


def test_a_text_that_cannot_go_on_fails_alone(base_sampler: SamplingClient) -> None:
    """The only token that continues it is one that would end it."""
    (letter,) = base_sampler.get_tokenizer().encode("b")
    other = base_sampler.sample(prompt(TOKENS), 2, params(20, seed=1))
    stuck = base_sampler.sample(prompt(TOKENS), 1, params(20, stop=[letter]), constraint=Constraint(regex="bc"))
    while_stuck = constrained(base_sampler, WORDS, 2, seed=1)
    with pytest.raises(RequestError, match="constraint regex cannot continue here"):
        stuck.result()
    assert len(other.result().sequences) == len(while_stuck) == 2


def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch(
    sampler: SamplingClient, base_sampler: SamplingClient
) -> None:
    alone = [s.tokens for s in constrained(sampler, OBJECT, 3, seed=11)]
    free = [s.tokens for s in sampler.sample(prompt(TOKENS), 3, params(20, seed=12)).result().sequences]
    others = [sampler.sample(prompt(random_tokens(5 + i, i)), 2, params(20, seed=i)) for i in range(6)]
    others += [base_sampler.sample(prompt(TOKENS), 2, params(30, seed=i), constraint=WORDS) for i in range(4)]
    crowded = sampler.sample(prompt(TOKENS), 3, params(60, seed=11), constraint=OBJECT)
    free_crowded = sampler.sample(prompt(TOKENS), 3, params(20, seed=12))
    assert_same_tokens((s.tokens for s in crowded.result().sequences), alone)
    found = free_crowded.result().sequences
    assert_same_tokens((s.tokens for s in found), free)
    assert all(isinstance(sequence, LocalSequence) and sequence.constrained_logprobs is None for sequence in found)
    assert all(future.result().sequences for future in others)
    assert len({tuple(tokens) for tokens in alone}) == 3


@pytest.fixture
def model(base_sampler: SamplingClient) -> BaseModel:
    return base_sampler._model


def crowd() -> list[SamplingRequest]:
    """Some with a constraint, some without, of several lengths."""
    stop = StopRule(frozenset({END}))
    return [
        request(random_tokens(20 + i, i), None, 2, 40, seed=i, stop=stop, constraint=(OBJECT, None, WORDS)[i % 3])
        for i in range(9)
    ]


def test_preempted_samples_draw_the_same_tokens_again(model: BaseModel) -> None:
    tight = Direct(model, budget=256)
    found = tight.run(*crowd())
    assert tight.generator.stats.restarts > 0
    for result, one in zip(found, crowd(), strict=True):
        assert_same_samples(result, alone(model, one))
        for sequence in result.sequences:
            assert len(sequence.constrained_logprobs) == (len(sequence.tokens) if one.constraint else 0)


def test_cancelled_samples_leave_the_others_as_they_are(model: BaseModel) -> None:
    direct = Direct(model)
    requests = crowd()
    submitted = direct.submit(*requests)
    direct.generator.step()
    for one in submitted[::2]:
        one.cancelled = True
    direct.finish()
    for slip, one in list(zip(submitted, requests, strict=True))[1::2]:
        assert_same_samples(slip.result, alone(model, one))


def test_a_constraint_is_compiled_once_and_few_are_kept(
    base_sampler: SamplingClient, model: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    original = constraints.Grammar.__init__

    def counted(self: constraints.Grammar, constraint: Constraint, vocabulary: object) -> None:
        made.append(constraint.key)
        original(self, constraint, vocabulary)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(constraints.Grammar, "__init__", counted)
    monkeypatch.setattr(constraints, "MAX_GRAMMARS", 2)
    first, second, third = (Constraint(regex=f"once{i}") for i in range(3))
    for constraint in (first, first, second, first, third, first, second):
        assert constrained(base_sampler, constraint, 2, seed=0)
    assert made == [first.key, second.key, third.key, second.key]


def test_a_row_without_a_constraint_gets_the_same_bits_and_one_of_no_probability_can_be_drawn() -> None:
    generator = torch.Generator().manual_seed(0)
    for vocabulary in (100, 5000):
        logits = torch.randn(4, vocabulary, generator=generator) * 3
        logits[2] -= 200.0 * (torch.arange(vocabulary) > 0)  # all but token 0 have probability 0 in float32
        columns = [1.0, 0.7, 1.0, 0.0], [-1, 5, -1, -1], [1.0, 0.9, 1.0, 1.0], [0.0] * 4, [1, 2, 3, 4]
        rules, positions = RowParams(*columns, device=torch.device("cpu")), np.arange(4, dtype=np.uint64)
        allowed = np.full((4, (vocabulary + 31) // 32), -1, dtype=np.int32)
        allowed[2:] = 0
        allowed[2, 1], allowed[3, 2] = 1 << 3, -(1 << 31)  # tokens 35 and 95
        tokens, logprobs, tempered, among = next_allowed_tokens(logits, rules, positions, allowed)
        plain_tokens, plain_logprobs, plain_tempered = next_tokens(logits, rules, positions)
        assert tokens.tolist() == [*plain_tokens[:2].tolist(), 35, 95]
        assert torch.equal(logprobs[:2], plain_logprobs[:2]) and torch.equal(tempered, plain_tempered)
        assert among[2:].tolist() == [0, 0]
        expected = torch.log_softmax(tempered.double(), dim=-1)[[2, 3], [35, 95]]
        torch.testing.assert_close(logprobs[2:].double(), expected, atol=1e-4, rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "has nothing; give exactly one"),
        ({"regex": "a", "choices": ["a"]}, "has regex and choices; give exactly one"),
        ({"json_schema": [1]}, "json_schema is .*must be a dict"),
        ({"json_schema": {"const": float("nan")}}, "json_schema is not JSON"),
        ({"choices": "AB"}, "choices is 'AB'; it must be a list"),
        ({"choices": []}, "at least one text"),
        ({"choices": ["a", ""]}, "none empty"),
        ({"regex": ""}, "regex is ''"),
        ({"grammar": 3}, "grammar is 3"),
    ],
    ids=str,
)
def test_a_wrong_constraint_is_refused_when_it_is_made(fields: dict, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Constraint(**fields)


def test_one_that_is_too_long_is_refused_when_it_is_made() -> None:
    with pytest.raises(RequestError, match="has 1000013 characters as JSON; at most 1000000"):
        Constraint(regex="a" * 1_000_000)


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (Constraint(json_schema={"type": "strin"}), "json_schema cannot be compiled: .*strin"),
        (Constraint(json_schema={"not": {"type": "null"}}), "json_schema cannot be compiled: .*not"),
        (Constraint(json_schema={"oneOf": [{"type": "integer"}, {"type": "number"}]}), "cannot be compiled: .*oneOf"),
        (Constraint(json_schema={"type": "string", "format": "postcode"}), "cannot be compiled: .*postcode"),
        (Constraint(json_schema={"minimum": 3, "maximum": 2, "type": "integer"}), "cannot be compiled: .*minimum"),
        (Constraint(regex="(a"), "regex cannot be compiled"),
        (Constraint(grammar="start: missing"), "grammar cannot be compiled: .*missing"),
        ({"regex": "a"}, "must be a tinker_local_backend.Constraint"),
    ],
    ids=str,
)
def test_what_cannot_be_compiled_is_refused_at_the_call(
    base_sampler: SamplingClient, constraint: Constraint, message: str
) -> None:
    with pytest.raises(RequestError, match=f"(?s){message}"):
        base_sampler.sample(prompt(TOKENS), 1, params(4), constraint=constraint)
    with pytest.raises(RequestError, match=f"(?s){message}"):
        base_sampler.compute_constrained_logprobs(prompt(TOKENS), [1], constraint)


def test_a_constraint_is_a_value_of_its_own() -> None:
    schema = {"properties": {"b": {}, "a": {}}}
    one = Constraint(json_schema=schema)
    schema["properties"] = {}
    assert one == Constraint(json_schema={"properties": {"b": {}, "a": {}}}) and one != Constraint(json_schema=schema)
    assert one.key != Constraint(json_schema={"properties": {"a": {}, "b": {}}}).key  # samples have this order
    assert len({one, Constraint(**one.as_json())}) == 1
    assert Constraint(choices=["a"]).as_json() == {"choices": ["a"]}


def test_without_the_package_the_error_names_the_extra(
    base_sampler: SamplingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setattr(constraints, "_vocabularies", WeakKeyDictionary())
    with pytest.raises(RequestError, match=r"pip install 'llguidance>=1\.9'"):
        base_sampler.sample(prompt(TOKENS), 1, params(4), constraint=WORDS)
    assert base_sampler.sample(prompt(TOKENS), 1, params(4)).result().sequences
