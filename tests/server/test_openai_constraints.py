"""What bodies of the OpenAI-compatible routes ask to be constrained, and what a model writes under it."""

import json
import re
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import tinker

pytest.importorskip("fastapi", reason="the extra `server` is not installed")

from tests.renderers.test_all_families import ENTRIES
from tests.server.serving import TINY_CHAT
from tests.server.tools_model import QUESTION, TOOL, model_with_tools
from tinker_cookbook.serving.chat_format import RendererFormat
from tinker_local_backend import Constraint, SamplingClient, ServiceClient
from tinker_local_backend.server.chat_text import ChatText
from tinker_local_backend.server.errors import Refused
from tinker_local_backend.server.openai_constraints import constraint_of
from tinker_local_backend.server.openai_schemas import ChatBody, CompletionBody, GenerateBody
from tinker_local_backend.server.template_format import TemplateFormat

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
OTHER = {
    "type": "function",
    "function": {
        "name": 'say "hi"',
        "parameters": {
            "type": "object",
            "properties": {"word": {"$ref": "#/$defs/word"}},
            "required": ["word"],
            "additionalProperties": False,
            "$defs": {"word": {"enum": ["x", "y"]}},
        },
    },
}
NAMED = {"type": "function", "function": {"name": 'say "hi"'}}


@pytest.fixture(scope="module")
def tools_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return model_with_tools(tmp_path_factory.mktemp("models") / "with_tools")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, tools_model: str) -> Iterator[SamplingClient]:
    pytest.importorskip("llguidance", reason="needs the extra `constrain` (llguidance)")
    with ServiceClient(home=tmp_path_factory.mktemp("home")) as service:
        yield service.create_sampling_client(base_model=tools_model).result()


def chat(**fields: Any) -> ChatBody:
    return ChatBody(model="m", messages=QUESTION, **fields)  # pyright: ignore[reportArgumentType]


def asked(body: Any, model: str = TINY_CHAT) -> dict[str, Any] | None:
    return constraint_of(body, TemplateFormat(ChatText.of(model)))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}, "structured_outputs": {"json": None}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_schema": {"type": "object"}}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
                }
            },
            {"json_schema": SCHEMA},
        ),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, {"json_schema": SCHEMA}),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, {"json_schema": SCHEMA}),
        ({"structured_outputs": {"json_object": True}}, {"json_schema": {"type": "object"}}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["A", "B"]}}, {"choices": ["A", "B"]}),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, {"grammar": 'start: "a"'}),
        ({"tool_choice": "auto", "tools": [TOOL]}, None),
        ({"tool_choice": "none", "tools": [TOOL]}, None),
    ],
    ids=str,
)
def test_fields_become_a_constraint(fields: dict[str, Any], expected: dict[str, Any] | None) -> None:
    assert asked(chat(**fields)) == expected
    if "tool_choice" not in fields:
        assert asked(CompletionBody(model="m", prompt="x", **fields)) == expected
    if "structured_outputs" in fields and "response_format" not in fields:
        GenerateBody.model_validate({"token_ids": [1], "sampling_params": fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_format": {"type": "structural_tag"}}, "response_format.type='structural_tag' is not supported"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema is missing"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag is not supported"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": "b"}}, "whitespace_pattern is not supported"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "has regex and choice; give exactly one"),
        ({"structured_outputs": {"json": "{"}}, "a text that is not JSON"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "response_format and structured_outputs each constrain the reply",
        ),
        ({"guided_regex": "a"}, r'guided_regex is an older name .* structured_outputs={"regex": ...}'),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tool_choice": NAMED, "tools": [TOOL]}, "no tool has the name 'say \"hi\"'"),
        ({"tool_choice": "always", "tools": [TOOL]}, "tool_choice must be none, auto, required or"),
        ({"tool_choice": {"type": "function"}, "tools": [TOOL]}, "tool_choice must be none, auto, required or"),
        ({"tool_choice": "required", "tools": [TOOL]}, "only for models that write calls as JSON between <tool_call>"),
    ],
    ids=str,
)
def test_what_is_wrong_or_not_supported_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused) as refused:
        asked(chat(**fields))
    assert refused.value.status == 400 and re.search(message, refused.value.detail)


@pytest.mark.parametrize(
    ("choice", "names"), [("required", {"add", 'say "hi"'}), (NAMED, {'say "hi"'})], ids=["required", "named"]
)
def test_a_tool_that_must_be_called_is_called(
    client: SamplingClient, tools_model: str, choice: Any, names: set[str]
) -> None:
    bounded = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
    fields = asked(chat(tool_choice=choice, tools=[bounded, OTHER]), tools_model)
    assert fields is not None
    words = ChatText.of(tools_model)
    params = tinker.SamplingParams(max_tokens=100, seed=2, temperature=3.0)
    future = client.sample(tinker.ModelInput.from_ints([1, 2]), 16, params, constraint=Constraint(**fields))
    called = set()
    for sequence in future.result().sequences:
        assert sequence.stop_reason == "stop"
        rest, [(name, arguments)] = words.split_tool_calls(words.text(sequence.tokens))
        assert rest == "" and name in names
        called.add(name)
        assert json.loads(arguments) in ([{"word": "x"}, {"word": "y"}] if name != "add" else [{"a": 1}, {"a": 2}])
    assert called == names


FORCED = [
    *("qwen3", "qwen3_disable_thinking", "qwen3_instruct", "qwen2_5", "llama3_tools", "mistral", "mistral_v3"),
    *("deepseekv3", "deepseekv3_thinking", "kimi_k2", "kimi_k25", "kimi_k26_disable_thinking"),
]
"""Renderers that write the arguments of calls as JSON between fixed texts, or their like."""


@pytest.mark.parametrize("name", FORCED)
def test_whatever_a_renderer_s_model_may_write_calls_the_tool(name: str) -> None:
    """Tokens are drawn evenly among those that the constraint allows."""
    llguidance = pytest.importorskip("llguidance", reason="needs the extra `constrain` (llguidance)")
    served = RendererFormat.of(name, ENTRIES[name].tokenizer(), "m", (name,))
    bounded = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
    other = {"type": "function", "function": {**OTHER["function"], "name": "say"}}
    body = chat(tool_choice="required", tools=[bounded, other])
    served = served.for_request([bounded, other], None, {})
    fields = constraint_of(body, served)
    assert fields is not None
    stop = int(served.stops[0])
    backend = ENTRIES[name].tokenizer().backend_tokenizer
    tokenizer = llguidance.LLTokenizer(backend.to_str(), eos_token=[stop])
    grammar = llguidance.LLMatcher.grammar_from_lark(fields["grammar"])
    called, random = set(), Random(7)
    for _ in range(12):
        matcher, reply = llguidance.LLMatcher(tokenizer, grammar, log_level=0), list[int]()
        while not matcher.is_accepting():
            assert not matcher.is_error() and len(reply) < 300, matcher.get_error()
            bits = matcher.compute_bitmask()
            allowed = [i for i in range(len(served.tokenizer)) if bits[i // 8] >> i % 8 & 1 and i != stop]
            reply.append(random.choice(allowed))
            matcher.consume_token(reply[-1])
        said = served.read([*reply, stop])
        ((_, function),) = [(call.get("id"), call["function"]) for call in said["tool_calls"]]
        assert said["content"] == "" and "tool_argument_errors" not in said and "unparsed_tool_calls" not in said
        called.add(function["name"])
        expected = [{"word": "x"}, {"word": "y"}] if function["name"] == "say" else [{"a": 1}, {"a": 2}]
        assert json.loads(function["arguments"]) in expected
    assert called == {"add", "say"}


@pytest.mark.parametrize(
    "name", ["qwen3_5", "nemotron3", "glm5_3_low_reasoning", "deepseekv4_1", "kimi_k31_pro_max_reasoning"]
)
def test_formats_with_a_tag_per_argument_cannot_be_forced(name: str) -> None:
    served = RendererFormat.of(name, ENTRIES[name].tokenizer(), "m")
    with pytest.raises(Refused, match=f"tool_choice: .*renderer '{name}'.*; use tool_choice=auto"):
        constraint_of(chat(tool_choice="required", tools=[TOOL]), served)
