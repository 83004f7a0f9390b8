"""Anthropic's Messages API, asked by the unmodified client: the same chats as on OpenAI's route, in the form that it reads."""

# pyright: reportMissingImports=false

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi", reason="the extra `server` is not installed")

from tests.server.serving import KEY, Serving
from tests.server.tools_model import QUESTION, TOOL, model_with_tools
from tests.waiting import HANG_SECONDS
from tinker_local_backend.server.errors import Refused
from tinker_local_backend.server.routes_messages import CountBody, _message, _prompt_fields

pytestmark = pytest.mark.server

HELLO: Any = [{"role": "user", "content": "Hello."}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}, "b": {"enum": [3, 4]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ADD: Any = {"name": "add", "description": "adds", "input_schema": SCHEMA}
OTHER: Any = {"name": "say", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return model_with_tools(tmp_path_factory.mktemp("models") / "with_tools")


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory, model: str) -> Iterator[Serving]:
    with Serving(tmp_path_factory.mktemp("messages-home"), model=model, tenants={"tester": KEY}) as serving:
        yield serving


@pytest.fixture(scope="module")
def client(serving: Serving) -> Iterator[Any]:
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=serving.url, api_key=KEY, max_retries=0, timeout=HANG_SECONDS) as client:
        yield client


@pytest.fixture(scope="module")
def web(serving: Serving) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=serving.url, headers={"x-api-key": KEY}, timeout=HANG_SECONDS) as client:
        yield client


# Later clients have no argument for what samples, and the route takes it from all of them.
SEEDED: Any = {"extra_body": {"seed": 3}}
GREEDY: Any = {"extra_body": {"temperature": 0}}


def test_a_message_is_the_chat_of_the_other_route(client: Any, web: httpx.Client, model: str) -> None:
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "seed": 3}
    chat = {"model": model, "messages": QUESTION, "max_tokens": 12, **sampling}
    expected = web.post("/v1/chat/completions", json=chat).json()
    system = [{"type": "text", "text": "Answer."}]
    reply = client.messages.create(
        model=model, system=system, messages=QUESTION[1:], max_tokens=12, extra_body=sampling
    )
    (block,) = reply.content
    assert block.text == expected["choices"][0]["message"]["content"]
    usage = reply.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == expected["usage"]["prompt_tokens"]
    assert usage.output_tokens == expected["usage"]["completion_tokens"]
    counted = client.messages.count_tokens(model=model, system="Answer.", messages=QUESTION[1:])
    assert counted.input_tokens == expected["usage"]["prompt_tokens"]
    assert client.models.list().data[0].display_name == model


def test_what_ended_it(client: Any, model: str) -> None:
    ask = {"model": model, "messages": HELLO, "max_tokens": 30, **GREEDY}
    plain = client.messages.create(**ask)
    assert (plain.stop_reason, plain.stop_sequence) == ("end_turn", None)
    text = plain.content[0].text
    stop = text[len(text) // 2 :][:3]
    stopped = client.messages.create(**ask, stop_sequences=["no such text", stop])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    assert stopped.content[0].text == text[: text.find(stop)]
    cut = client.messages.create(**{**ask, "max_tokens": 2})
    assert cut.stop_reason == "max_tokens" and cut.usage.output_tokens == 2
    streamed = list(client.messages.create(**ask, stop_sequences=[stop], stream=True))
    assert (streamed[-2].delta.stop_reason, streamed[-2].delta.stop_sequence) == ("stop_sequence", stop)


def test_a_stream_adds_up_to_the_message(client: Any, model: str) -> None:
    ask = {"model": model, "messages": HELLO, "max_tokens": 30, **GREEDY}
    whole = client.messages.create(**ask)
    with client.messages.stream(**ask) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert [(b.type, b.text) for b in streamed.content] == [(b.type, b.text) for b in whole.content]
    assert (streamed.stop_reason, streamed.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    own = [kind for kind in kinds if kind != "text"]
    assert own[:2] == ["message_start", "content_block_start"] and set(own[2:-3]) == {"content_block_delta"}
    assert own[-3:] == ["content_block_stop", "message_delta", "message_stop"]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("choice", "names"), [({"type": "any"}, ["add", "say"]), ({"type": "tool", "name": "say"}, ["say"])], ids=str
)
def test_a_tool_that_must_be_called_is_called(
    client: Any, model: str, choice: Any, names: list[str], streams: bool
) -> None:
    pytest.importorskip("llguidance", reason="needs the extra `constrain` (llguidance)")
    ask = {"model": model, "messages": HELLO, "tools": [ADD, OTHER], "tool_choice": choice, "max_tokens": 80}
    if streams:
        with client.messages.stream(**ask, **SEEDED) as stream:
            reply = stream.get_final_message()
    else:
        reply = client.messages.create(**ask, **SEEDED)
    (block,) = reply.content
    assert block.type == "tool_use" and block.name in names and reply.stop_reason == "tool_use"
    assert block.input == {} if block.name == "say" else block.input["a"] in (1, 2)


def test_an_agent_calls_twelve_tools_and_answers(client: Any, model: str) -> None:
    """Each call goes back with its result, as an agent's loop sends them."""
    pytest.importorskip("llguidance", reason="needs the extra `constrain` (llguidance)")
    messages: list[Any] = [*HELLO]
    results, read = [], []
    ask = {"model": model, "tools": [ADD], "max_tokens": 60, "system": "Add."}
    for turn in range(12):
        reply = client.messages.create(**ask, messages=messages, tool_choice={"type": "any"})
        assert reply.stop_reason == "tool_use"
        (call,) = reply.content
        results.append(call.input["a"] + call.input["b"])
        read.append(reply.usage.input_tokens + reply.usage.cache_read_input_tokens)
        messages.append({"role": "assistant", "content": reply.content})
        result = {
            "type": "tool_result",
            "tool_use_id": call.id,
            "content": [{"type": "text", "text": str(results[-1])}],
        }
        further = [{"type": "text", "text": "Go on."}] if turn % 2 else []
        messages.append({"role": "user", "content": [result, *further]})
    assert read == sorted(set(read)) and set(results) <= {4, 5, 6}
    answer = client.messages.create(**{**ask, "max_tokens": 8}, messages=messages, tool_choice={"type": "none"})
    assert answer.stop_reason in ("end_turn", "max_tokens")


def test_a_reply_under_a_schema(client: Any, model: str) -> None:
    pytest.importorskip("llguidance", reason="needs the extra `constrain` (llguidance)")
    config = {"format": {"type": "json_schema", "schema": SCHEMA}}
    reply = client.messages.create(model=model, messages=HELLO, max_tokens=40, output_config=config)
    assert json.loads(reply.content[0].text)["a"] in (1, 2)


def test_a_beginning_of_the_reply_is_gone_on_with(client: Any, web: httpx.Client, model: str) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "Hello"}]
    ask = {"model": model, "max_tokens": 20}
    reply = client.messages.create(messages=begun, **ask, **GREEDY)
    ending = {"add_generation_prompt": False, "continue_final_message": True}
    expected = web.post("/v1/chat/completions", json={"messages": begun, "temperature": 0, **ask, **ending}).json()
    assert reply.content[0].text == expected["choices"][0]["message"]["content"]


def test_errors_are_anthropic_s(client: Any, serving: Serving, model: str) -> None:
    anthropic = pytest.importorskip("anthropic")
    ask = {"model": model, "messages": HELLO, "max_tokens": 5}
    image = {"type": "image", "source": {"type": "url", "url": "https://a/b.png"}}
    for error, kind, fields in (
        (anthropic.NotFoundError, "not_found_error", {"model": "claude"}),
        (anthropic.BadRequestError, "invalid_request_error", {"max_tokens": 5000}),
        (anthropic.BadRequestError, "invalid_request_error", {"messages": [{"role": "user", "content": [image]}]}),
        (anthropic.BadRequestError, "invalid_request_error", {"thinking": {"type": "enabled", "budget_tokens": 2000}}),
    ):
        for stream in (False, True):
            with pytest.raises(error) as refused:
                client.messages.create(**{**ask, **fields}, stream=stream)
            assert refused.value.body["type"] == "error" and refused.value.body["error"]["type"] == kind
    other = anthropic.Anthropic(base_url=serving.url, api_key="tml-wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError) as refused:
        other.messages.create(**ask)
    assert refused.value.body["error"]["type"] == "authentication_error"
    by_token = anthropic.Anthropic(base_url=serving.url, auth_token=KEY, max_retries=0)
    assert by_token.messages.create(**ask).role == "assistant"
    with pytest.raises(anthropic.NotFoundError, match="no route POST /v1/messages/batches here"):
        client.messages.batches.create(requests=[])


def fields(**body: Any) -> dict[str, Any]:
    return _prompt_fields(CountBody(model="m", **body))


def test_blocks_become_messages_in_their_order() -> None:
    call = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 7}}
    blocks = [{"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "I add."}, call]
    results = [
        {"type": "tool_result", "tool_use_id": "t1", "content": "12"},
        {"type": "tool_result", "tool_use_id": "t2", "content": "no", "is_error": True},
        {"type": "text", "text": "Go "},
        {"type": "text", "text": "on."},
    ]
    asked = fields(
        system="Add.",
        messages=[*HELLO, {"role": "assistant", "content": blocks}, {"role": "user", "content": results}],
        tools=[ADD],
        tool_choice={"type": "any"},
        thinking={"type": "disabled"},
    )
    arguments = json.dumps({"a": 7})
    assert asked["messages"] == [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "Hello."},
        {
            "role": "assistant",
            "content": "I add.",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "t1", "function": {"name": "add", "arguments": arguments}}],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "12"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: no"},
        {"role": "user", "content": "Go on."},
    ]
    assert asked["tools"] == [{**TOOL, "function": {**TOOL["function"], "parameters": SCHEMA}}]
    assert asked["tool_choice"] == "required" and asked["chat_template_kwargs"] == {"enable_thinking": False}


def test_thinking_is_left_to_the_model_or_turned_off() -> None:
    told = [
        fields(messages=HELLO, thinking=thinking) for thinking in (None, {"type": "adaptive"}, {"type": "disabled"})
    ]
    assert [asked.get("chat_template_kwargs") for asked in told] == [None, None, {"enable_thinking": False}]


def test_reasoning_and_calls_become_blocks() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 7}'}}
    message = {"role": "assistant", "content": "I add.", "reasoning_content": "Hm.", "tool_calls": [call]}
    usage = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 8}}
    reply = _message({"model": "m", "choices": [{"message": message, "finish_reason": "tool_calls"}], "usage": usage})
    assert reply["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "I add."},
        {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 7}},
    ]
    assert reply["stop_reason"] == "tool_use" and reply["usage"]["input_tokens"] == 1


USE = {"type": "tool_use", "id": "t", "name": "add", "input": {}}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": [*HELLO, {"role": "assistant", "content": [USE]}]}, "messages end with a tool_use"),
        ({"messages": [{"role": "user", "content": [USE]}]}, r"messages\[0\].content\[0\] is a tool_use block"),
        ({"tools": [{**ADD, "strict": True}]}, r"tools\[0\].strict works only for a forced call"),
        ({"tools": [{**ADD, "defer_loading": True}]}, "defer_loading is unknown here"),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "disable_parallel_tool_use is not"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name is missing"),
        ({"thinking": {"type": "enabled"}}, "thinking.type='enabled' is not supported"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display is not supported"),
        ({"output_config": {"effort": "high"}}, "output_config.effort is not supported"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format must be"),
        ({"mcp_servers": []}, "mcp_servers is unknown here"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_by_name(body: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused, match=message):
        fields(**{"messages": HELLO, **body})
