"""Typed functions become tools; a call that cannot be made is answered, and a bug in a tool is raised."""

import asyncio
import json
from typing import Annotated, Literal

import pytest

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import ToolCall
from tinker_cookbook.tool_use import ToolError, ToolRegistry, calculate, function_tool
from tinker_cookbook.tool_use.tools import FunctionTool


@function_tool
def repeat(word: Annotated[str, "what to say"], times: int = 2, tone: Literal["low", "high"] = "low") -> str:
    """Say a word again and again.

    It stops in the end."""
    return " ".join([word] * times) + tone[0]


@function_tool
async def later(number: float, tags: list[str] | None = None) -> str:
    """Answer a moment later."""
    await asyncio.sleep(0)
    return f"{number} {tags}"


@function_tool
def broken() -> str:
    """Fail."""
    raise ZeroDivisionError("a bug")


@function_tool
def picky() -> str:
    """Refuse."""
    raise ToolError("not today; try tomorrow")


def make_call(name: str, arguments: object, call_id: str | None = None) -> ToolCall:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return ToolCall(id=call_id, function=ToolCall.FunctionBody(name=name, arguments=text))


def answer(name: str, arguments: object) -> str:
    message, error = asyncio.run(ToolRegistry([repeat, later, broken, picky]).call(make_call(name, arguments)))
    assert message["role"] == "tool" and message.get("name") == name
    assert isinstance(message["content"], str) and (error is not None) is message["content"].startswith("Error: ")
    return message["content"]


def test_the_declaration_comes_from_the_function() -> None:
    assert repeat.spec == {
        "name": "repeat",
        "description": "Say a word again and again.\n\nIt stops in the end.",
        "parameters": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "word": {"type": "string", "description": "what to say"},
                "times": {"type": "integer", "default": 2},
                "tone": {"type": "string", "enum": ["low", "high"], "default": "low"},
            },
            "required": ["word"],
        },
    }
    json.dumps(later.spec)


def test_a_parameter_may_be_called_title() -> None:
    def find(title: str) -> str:
        """Find a book."""
        return title

    assert function_tool(find).spec["parameters"]["properties"] == {"title": {"type": "string"}}


def test_calls() -> None:
    assert answer("repeat", {"word": "ho"}) == "ho hol"
    assert answer("repeat", {"word": "ho", "times": 1, "tone": "high"}) == "hoh"
    assert answer("later", {"number": 3, "tags": ["a"]}) == "3.0 ['a']"


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("repaet", {}, "there is no tool 'repaet'; the tools are broken, later, picky, repeat"),
        ("repeat", "{", "the arguments of repeat are not valid JSON"),
        ("repeat", "[" * 100_000, "the arguments of repeat are not valid JSON"),
        ("repeat", "[]", "must be a JSON object"),
        ("repeat", {}, "repeat takes word, times, tone. word: Field required"),
        ("repeat", {"word": 3}, "word: Input should be a valid string"),
        ("repeat", {"word": "a", "times": "3"}, "times: Input should be a valid integer"),
        ("repeat", {"word": "a", "loud": 1}, "loud: Extra inputs are not permitted"),
        ("repeat", {"word": "a", "tone": "shrill"}, "tone: Input should be 'low' or 'high'"),
        ("picky", {}, "not today; try tomorrow"),
    ],
)
def test_a_call_that_cannot_be_made_is_answered(name: str, arguments: object, message: str) -> None:
    assert message in answer(name, arguments)


def test_a_bug_in_a_tool_is_told_to_the_model_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert answer("broken", {}) == "Error: broken failed: ZeroDivisionError: a bug"
    (record,) = caplog.records
    assert record.getMessage() == "tool broken failed on {}" and record.exc_info is not None


def test_a_mistake_in_the_configuration_of_a_tool_is_raised() -> None:
    @function_tool
    def unset() -> str:
        """Needs a key."""
        raise ConfigurationError("SEARCH_KEY is not set: export it")

    with pytest.raises(ConfigurationError, match="SEARCH_KEY"):
        asyncio.run(ToolRegistry([unset]).call(make_call("unset", {})))


def test_a_tool_that_returns_no_string_is_a_bug() -> None:
    def number() -> int:
        """Give a number."""
        return 3

    with pytest.raises(TypeError, match="tool 'number' returned int"):
        asyncio.run(FunctionTool(number)({}))


@pytest.mark.parametrize("execution", ["parallel", "sequential"])
def test_answers_keep_the_order_and_ids_of_the_calls(execution: Literal["parallel", "sequential"]) -> None:
    running: list[str] = []

    @function_tool
    async def wait(steps: int) -> str:
        """Let others go first."""
        running.append(f"{steps} begins")
        for _ in range(steps):
            await asyncio.sleep(0)
        running.append(f"{steps} ends")
        return str(steps)

    calls = [make_call("wait", {"steps": n}, f"id{n}") for n in (3, 1)]
    answers = asyncio.run(ToolRegistry([wait]).call_all(calls, execution))
    assert [message["content"] for message, _ in answers] == ["3", "1"]
    assert [message.get("tool_call_id") for message, _ in answers] == ["id3", "id1"]
    sequential = ["3 begins", "3 ends", "1 begins", "1 ends"]
    assert (running == sequential) is (execution == "sequential")


def test_functions_that_cannot_be_declared_are_refused() -> None:
    def silent(a: int) -> str:
        return str(a)

    def untyped(a) -> str:
        """Do it."""
        return str(a)

    def many(*words: str) -> str:
        """Do it."""
        return str(words)

    for function, message in (
        (silent, "tool 'silent' has no docstring"),
        (untyped, "parameter a has no type annotation"),
        (many, "parameter words must be one that is given by name"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            function_tool(function)


def test_a_registry_needs_tools_of_different_names() -> None:
    with pytest.raises(ConfigurationError, match="tools is empty"):
        ToolRegistry([])
    with pytest.raises(ConfigurationError, match="two tools named 'calculate'"):
        ToolRegistry([function_tool(calculate), function_tool(calculate)])
