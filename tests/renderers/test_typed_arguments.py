"""Types of arguments by the schema of the tool, where a format writes a value as bare text and where it does not."""

import json
from typing import Any

import pytest

from tests.renderers.reasoning_families import glm_tokenizer
from tests.renderers.synthetic import make_tokenizer
from tinker_cookbook.renderers import ToolSpec, get_renderer
from tinker_cookbook.renderers.typed_arguments import argument_problem, as_declared, declared_types

STRING: dict[str, Any] = {"type": "string"}


@pytest.mark.parametrize(
    ("text", "value", "schema", "read"),
    [
        ("12", 12, None, 12),
        ("12", 12, {}, 12),
        ("12", 12, {"type": "integer"}, 12),
        ("12", 12, STRING, "12"),
        ("01.50", 1.5, STRING, "01.50"),
        ("True", True, STRING, "True"),
        ('"x"', "x", STRING, '"x"'),
        ("null", None, {"type": ["string", "null"]}, None),
        ("12", 12, {"type": ["string", "null"]}, "12"),
        ("12", 12, {"anyOf": [STRING, {"type": "integer"}]}, 12),
        ("1.5", 1.5, {"anyOf": [STRING, {"type": "integer"}]}, "1.5"),
        ("1.0", 1.0, {"type": ["string", "integer"]}, 1.0),
        ("[1]", [1], {"oneOf": [STRING, {"$ref": "#/x"}]}, [1]),
        ("7", 7, {"enum": ["7", "8"]}, "7"),
        ("word", "word", {"type": "integer"}, "word"),
        ("{}", {}, {"type": "made up"}, {}),
    ],
    ids=str,
)
def test_a_text_is_what_the_schema_wants(text: str, value: object, schema: object, read: object) -> None:
    assert as_declared(text, value, schema) == read


@pytest.mark.parametrize(
    ("arguments", "parameters", "problem"),
    [
        ({"a": 1}, {}, None),
        ({"a": 1}, [], None),
        ({"a": 1, "b": "x"}, {"properties": {"a": {"type": "number"}, "b": STRING}, "required": ["a"]}, None),
        ({}, {"required": ["a", ["b"]]}, "'a' is missing"),
        ({"a": True}, {"properties": {"a": {"type": "integer"}}}, "'a' is true, not of type integer"),
        ({"a": 2.5}, {"properties": {"a": {"type": ["integer", "null"]}}}, "'a' is 2.5, not of type integer or null"),
        ({"a": {"b": 1}}, {"properties": {"a": {"type": "array"}}}, "'a' is no scalar, not of type array"),
        ({"a": "x" * 200}, {"properties": {"a": {"type": "null"}}}, f''''a' is "{"x" * 99}, not of type null'''),
    ],
)
def test_what_is_wrong_with_arguments(arguments: dict[str, Any], parameters: object, problem: str | None) -> None:
    assert argument_problem(json.dumps(arguments), parameters) == problem


def test_types_that_are_not_known_are_not_guessed() -> None:
    assert declared_types({"type": ["string", "date"]}) == declared_types({"anyOf": [STRING, {}]}) == frozenset()
    assert declared_types({"enum": [1, None]}) == {"integer", "number", "null"}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "qwen3_5_disable_thinking",
            "<tool_call>\n<function=add>\n<parameter=a>\n12\n</parameter>\n</function>\n</tool_call>",
        ),
        (
            "nemotron3_disable_thinking",
            "<tool_call>\n<function=add>\n<parameter=a>\n12\n</parameter>\n</function>\n</tool_call>",
        ),
        ("glm5_3_low_reasoning", "</think><tool_call>add<arg_key>a</arg_key><arg_value>12</arg_value></tool_call>"),
    ],
)
def test_a_renderer_reads_bare_texts_by_the_schema_that_it_is_given(name: str, said: str) -> None:
    renderer = get_renderer(name, glm_tokenizer() if name.startswith("glm") else make_tokenizer())
    text = [ToolSpec(name="add", description="", parameters={"properties": {"a": STRING}})]
    other = [ToolSpec(name="sub", description="", parameters={"properties": {"a": STRING}})]
    reply = renderer.encode_text(said)
    for tools, expected in ((text, '{"a": "12"}'), (other, '{"a": 12}'), ([], '{"a": 12}')):
        (call,) = renderer.reading_calls_of(tools).parse_response(reply)[0].get("tool_calls", [])
        assert call.function.arguments == expected
    assert renderer.declared == {}, "the renderer itself is as it was"
