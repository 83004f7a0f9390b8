"""Typed functions become tools; a call that cannot be made is answered, and a bug in a tool is raised."""

import asyncio
import json
import pickle
from typing import Annotated, Literal

import pytest

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import ToolCall, ToolSpec
from tinker_cookbook.tool_use import (
    FunctionTool,
    Tool,
    ToolError,
    ToolInput,
    ToolRegistry,
    ToolResult,
    calculate,
    error_tool_result,
    handle_tool_call,
    simple_tool_result,
    tool,
)


@tool
def repeat(word: Annotated[str, "what to say"], times: int = 2, tone: Literal["low", "high"] = "low") -> str:
    """Say a word again and again.

    It stops in the end."""
    return " ".join([word] * times) + tone[0]


@tool
async def later(number: float, tags: list[str] | None = None) -> str:
    """Answer a moment later."""
    await asyncio.sleep(0)
    return f"{number} {tags}"


@tool
def broken() -> str:
    """Fail."""
    raise ZeroDivisionError("a bug")


@tool
def picky() -> str:
    """Refuse."""
    raise ToolError("not today; try tomorrow")


def make_call(name: str, arguments: object, call_id: str | None = None) -> ToolCall:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return ToolCall(id=call_id, function=ToolCall.FunctionBody(name=name, arguments=text))


def answer(name: str, arguments: object) -> str:
    result = asyncio.run(ToolRegistry([repeat, later, broken, picky]).call(make_call(name, arguments)))
    (message,) = result.messages
    assert message["role"] == "tool" and message.get("name") == name and not result.should_stop
    assert isinstance(message["content"], str) and (result.error is not None) is message["content"].startswith(
        "Error: "
    )
    return message["content"]


def test_the_declaration_comes_from_the_function() -> None:
    assert repeat.to_spec() == {
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
    json.dumps(later.to_spec())


def test_a_parameter_may_be_called_title() -> None:
    def find(title: str) -> str:
        """Find a book."""
        return title

    assert tool(find).to_spec()["parameters"]["properties"] == {"title": {"type": "string"}}


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
    @tool
    def unset() -> str:
        """Needs a key."""
        raise ConfigurationError("SEARCH_KEY is not set: export it")

    with pytest.raises(ConfigurationError, match="SEARCH_KEY"):
        asyncio.run(ToolRegistry([unset]).call(make_call("unset", {})))


def test_a_number_is_written_out_and_anything_else_is_a_bug() -> None:
    def number() -> float:
        """Give a number."""
        return 3.5

    def nothing() -> None:
        """Give nothing."""

    assert asyncio.run(FunctionTool(number).run(ToolInput({}))).messages[0]["content"] == "3.5"
    with pytest.raises(
        TypeError, match="tool 'nothing' returned NoneType; a tool returns a string, a number or a Tool"
    ):
        asyncio.run(FunctionTool(nothing).run(ToolInput({})))


def test_tools_can_be_pickled() -> None:
    """Decorated ones by their name; of others the function is."""
    assert pickle.loads(pickle.dumps(repeat)) is repeat
    copied = pickle.loads(pickle.dumps(FunctionTool(calculate, "sum_up")))
    assert (copied.name, copied.function) == ("sum_up", calculate) and copied.to_spec()["name"] == "sum_up"


def test_a_plain_function_becomes_a_tool() -> None:
    async def double(number: int) -> int:
        """Twice the number."""
        return 2 * number

    registry = ToolRegistry([double, repeat])
    assert [spec["description"].partition("\n")[0] for spec in registry.specs] == [
        "Twice the number.",
        "Say a word again and again.",
    ]
    result = asyncio.run(registry.call(make_call("double", {"number": 4})))
    assert result.messages[0]["content"] == "8"


@pytest.mark.parametrize("execution", ["parallel", "sequential"])
def test_answers_keep_the_order_and_ids_of_the_calls(execution: Literal["parallel", "sequential"]) -> None:
    running: list[str] = []

    @tool
    async def wait(steps: int) -> str:
        """Let others go first."""
        running.append(f"{steps} begins")
        for _ in range(steps):
            await asyncio.sleep(0)
        running.append(f"{steps} ends")
        return str(steps)

    calls = [make_call("wait", {"steps": n}, f"id{n}") for n in (3, 1)]
    answers = asyncio.run(ToolRegistry([wait]).call_all(calls, execution))
    messages = [message for result in answers for message in result.messages]
    assert [message["content"] for message in messages] == ["3", "1"]
    assert [message.get("tool_call_id") for message in messages] == ["id3", "id1"]
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
        (many, "parameter words must be a keyword parameter"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            tool(function)


def test_a_registry_has_tools_of_different_names_if_any() -> None:
    assert ToolRegistry([]).specs == []
    assert "there are no tools" in str(asyncio.run(ToolRegistry([]).call(make_call("f", {}))).error)
    with pytest.raises(ConfigurationError, match="two tools named 'calculate'"):
        ToolRegistry([tool(calculate), tool(calculate)])


class Shelf:
    """Things with methods that are tools."""

    def __init__(self, *books: str) -> None:
        self.books = books

    @tool
    async def find(self, letter: Annotated[str, "how it begins"]) -> ToolResult:
        """Find books."""
        found = [book for book in self.books if book.startswith(letter)]
        return simple_tool_result(", ".join(found), metrics={"found": len(found)}, should_stop=len(found) > 1)


class TestMethodsAndResults:
    def test_a_method_is_a_tool_of_its_object(self) -> None:
        shelf, other = Shelf("Emma", "Ulysses"), Shelf("Erewhon", "Evelina")
        assert shelf.find.to_spec()["parameters"]["properties"] == {
            "letter": {"type": "string", "description": "how it begins"}
        }
        assert Shelf.find.to_spec() == shelf.find.to_spec() and shelf.find.name == "find"
        for owner, text, stop in ((shelf, "Emma", False), (other, "Erewhon, Evelina", True)):
            result = asyncio.run(ToolRegistry([owner.find]).call(make_call("find", {"letter": "E"}, "id1")))
            message = {"role": "tool", "content": text, "name": "find", "tool_call_id": "id1"}
            assert result == ToolResult([message], stop, {"found": 1 + stop})  # type: ignore[list-item]
            assert result.error is None

    def test_results_of_ones_own_keep_what_they_say(self) -> None:
        @tool
        def log() -> ToolResult:
            """Say two things."""
            first = simple_tool_result("a", name="other", call_id="mine", metadata={"seen": True})
            return ToolResult([*first.messages, {"role": "user", "content": "b"}], metadata=first.metadata)

        result = asyncio.run(ToolRegistry([log]).call(make_call("log", {}, "id1")))
        assert result.messages == [
            {"role": "tool", "content": "a", "name": "other", "tool_call_id": "mine"},
            {"role": "user", "content": "b"},
        ]
        assert result.metadata == {"seen": True}

    def test_errors_say_what_they_are(self) -> None:
        result = error_tool_result("no such page", error_type="not_found", should_stop=True)
        assert isinstance(result.error, ToolError) and result.should_stop and result.metadata == {"error": "not_found"}
        assert result.messages == [{"role": "tool", "content": "Error: no such page"}]

    def test_a_subclass_of_tool_is_declared_by_its_properties(self) -> None:
        class Search(Tool):
            name, description, parameters_schema = "search", "Find it.", {"type": "object"}  # pyright: ignore

            async def run(self, input: ToolInput) -> ToolResult:
                return simple_tool_result("found")

        tools = {"search": Search()}
        assert tools["search"].to_spec() == ToolSpec(
            name="search", description="Find it.", parameters={"type": "object"}
        )
        result = asyncio.run(handle_tool_call(tools, make_call("search", {}, "id1")))
        assert result.messages == [{"role": "tool", "content": "found", "name": "search", "tool_call_id": "id1"}]
        assert (repeat.description, repeat.parameters_schema) == tuple(repeat.to_spec().values())[1:]

    def test_a_tool_of_ones_own_class(self) -> None:
        class Echo:
            name = "echo"

            def to_spec(self) -> ToolSpec:
                return {"name": "echo", "description": "Say it again.", "parameters": {"type": "object"}}

            async def run(self, input: ToolInput) -> ToolResult:
                return simple_tool_result(f"{input.arguments} {input.call_id}")

        registry = ToolRegistry([Echo()])
        assert [spec["name"] for spec in registry.specs] == ["echo"]
        result = asyncio.run(registry.call(make_call("echo", {"a": 1}, "id1")))
        assert result.messages[0]["content"] == "{'a': 1} id1"
