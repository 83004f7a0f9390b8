"""OpenAI's Responses API, asked by the unmodified client: the same chats as on the older route, in the form that it reads."""

# pyright: reportMissingImports=false

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

pytest.importorskip("fastapi", reason="the extra `server` is not installed")

from tests.server.serving import KEY, Serving
from tests.server.tools_model import QUESTION, model_with_tools
from tests.waiting import HANG_SECONDS
from tinker_local_backend.server.errors import Refused
from tinker_local_backend.server.routes_responses import ResponsesBody, _prompt_fields, _ResponseBuilder

pytestmark = pytest.mark.server

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}
ADD: Any = {"type": "function", "name": "add", "description": "adds", "parameters": SCHEMA, "strict": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return model_with_tools(tmp_path_factory.mktemp("models") / "with_tools")


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory, model: str) -> Iterator[Serving]:
    with Serving(tmp_path_factory.mktemp("responses-home"), model=model) as serving:
        yield serving


@pytest.fixture(scope="module")
def client(serving: Serving) -> Iterator[Any]:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{serving.url}/v1", api_key=KEY, max_retries=0, timeout=HANG_SECONDS) as client:
        yield client


def test_a_response_is_the_chat_of_the_other_route(client: Any, serving: Serving, model: str) -> None:
    asked = {"temperature": 0.7, "top_p": 0.9}
    chat = {
        "model": model,
        "messages": QUESTION,
        "seed": 3,
        "max_tokens": 6,
        "logprobs": True,
        "top_logprobs": 2,
        **asked,
    }
    headers = {"Authorization": f"Bearer {KEY}"}
    expected = httpx.post(f"{serving.url}/v1/chat/completions", json=chat, headers=headers, timeout=HANG_SECONDS).json()
    reply = client.responses.create(
        model=model,
        instructions="Answer.",
        input=QUESTION[1]["content"],
        max_output_tokens=6,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        extra_body={"seed": 3},
        **asked,
    )
    choice = expected["choices"][0]
    assert reply.output_text == choice["message"]["content"]
    (scores,) = [part.logprobs for item in reply.output for part in item.content]
    assert [score.token for score in scores] == [entry["token"] for entry in choice["logprobs"]["content"]]
    assert [len(score.top_logprobs) for score in scores] == [2] * len(scores)
    usage, old = reply.usage, expected["usage"]
    assert (usage.input_tokens, usage.output_tokens) == (old["prompt_tokens"], old["completion_tokens"])
    is_cut = choice["finish_reason"] == "length"
    assert reply.status == ("incomplete" if is_cut else "completed") and reply.store is False
    counted = client.responses.input_tokens.count(model=model, instructions="Answer.", input=QUESTION[1]["content"])
    assert counted.input_tokens == usage.input_tokens


@pytest.mark.parametrize("limit", [4, 60])
def test_a_stream_adds_up_to_the_response(client: Any, model: str, limit: int) -> None:
    ask = {"model": model, "input": "Hello.", "max_output_tokens": limit, "temperature": 0}
    whole = client.responses.create(**ask)
    events = list(client.responses.create(**ask, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert kinds[-4:-1] == ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
    assert kinds[-1] == f"response.{whole.status}"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "add"}], ids=str)
def test_a_tool_is_called_and_its_output_goes_back(client: Any, model: str, choice: Any, streams: bool) -> None:
    pytest.importorskip("llguidance", reason="needs the extra `constrain` (llguidance)")
    ask: dict[str, Any] = {"model": model, "tools": [ADD], "max_output_tokens": 60}
    items: list[Any] = [{"role": "user", "content": "Add."}]
    for _ in range(3):
        if streams:
            with client.responses.stream(**ask, input=items, tool_choice=choice) as stream:
                kinds = [event.type for event in stream]
                reply = stream.get_final_response()
            assert "response.function_call_arguments.delta" in kinds
        else:
            reply = client.responses.create(**ask, input=items, tool_choice=choice)
        (call,) = reply.output
        assert (call.type, call.name) == ("function_call", "add") and json.loads(call.arguments)["a"] in (1, 2)
        items += [{key: getattr(call, key) for key in ("type", "call_id", "name", "arguments")}]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "3"})
    answer = client.responses.create(**{**ask, "max_output_tokens": 4}, input=items, tool_choice="none")
    assert answer.usage.input_tokens > 100 and answer.output[0].type == "message"


def test_a_reply_under_a_schema(client: Any, model: str) -> None:
    pytest.importorskip("llguidance", reason="needs the extra `constrain` (llguidance)")

    class Verdict(BaseModel):
        yes: bool

    reply = client.responses.parse(model=model, input="Is it?", text_format=Verdict, max_output_tokens=30)
    assert isinstance(reply.output_parsed, Verdict)


def fields(**body: Any) -> dict[str, Any]:
    return _prompt_fields(ResponsesBody(model="m", **body))


def test_items_that_follow_each_other_are_one_turn() -> None:
    def call(name: str) -> dict[str, Any]:
        return {"type": "function_call", "call_id": name, "name": name, "arguments": "{}"}

    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Add."}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I add."}]},
        call("f"),
        call("g"),
        {"type": "function_call_output", "call_id": "f", "output": "12"},
        {"type": "function_call_output", "call_id": "g", "output": [{"type": "input_text", "text": "13"}]},
        call("h"),
        {"role": "assistant", "content": "Done."},
    ]
    calls = {name: {"id": name, "function": {"name": name, "arguments": "{}"}} for name in "fgh"}
    assert fields(input=items, instructions="Be brief.")["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "Add."},
        {
            "role": "assistant",
            "content": "I add.",
            "reasoning_content": "Hm.",
            "tool_calls": [calls["f"], calls["g"]],
        },
        {"role": "tool", "tool_call_id": "f", "content": "12"},
        {"role": "tool", "tool_call_id": "g", "content": "13"},
        {"role": "assistant", "content": "", "tool_calls": [calls["h"]]},
        {"role": "assistant", "content": "Done."},
    ]


def test_reasoning_text_and_calls_become_items() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    message = {
        "role": "assistant",
        "content": "I add.",
        "reasoning_content": "Hm.",
        "tool_calls": [call, {**call, "id": "d"}],
    }
    details = {"prompt_tokens_details": {"cached_tokens": 8}}
    usage = {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13, **details}
    reply = {"model": "m", "choices": [{"message": message, "finish_reason": "tool_calls"}], "usage": usage}
    written = _ResponseBuilder(ResponsesBody(model="m", input="x")).whole(reply)
    reasoning, text, first, second = written["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}] and reasoning["summary"] == []
    assert text["content"][0]["text"] == "I add." and text["role"] == "assistant"
    assert (first["call_id"], second["call_id"]) == ("c", "d") and first["arguments"] == "{}"
    assert written["status"] == "completed"


IMAGE = [{"role": "user", "content": [{"type": "input_image", "image_url": "https://a/b.png"}]}]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"store": True}, "store is not supported: nothing is stored or truncated here"),
        ({"previous_response_id": "r"}, "previous_response_id is not supported: nothing is stored or truncated here"),
        ({"conversation": "c"}, "conversation is not supported"),
        ({"background": True}, "background is not supported"),
        ({"truncation": "auto"}, "truncation is not supported: nothing is stored or truncated here"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary is not supported"),
        ({"text": {"verbosity": "low"}}, "text.verbosity is not supported"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type='web_search' is not supported"),
        ({"max_tool_calls": 3}, "max_tool_calls is unknown here"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_by_name(body: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused, match=message):
        fields(**{"input": "x", **body})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input": IMAGE}, "content.*'input_text'"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "'item_reference'"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"include": ["file_search_call.results"]}, "include.0"),
        ({"max_output_tokens": 5000}, "exceeds the context length 1024"),
    ],
    ids=str,
)
def test_the_client_gets_refusals_with_the_field(client: Any, model: str, body: dict[str, Any], message: str) -> None:
    openai = pytest.importorskip("openai")
    with pytest.raises(openai.BadRequestError, match=message):
        client.responses.create(**{"model": model, "input": "x", **body})
