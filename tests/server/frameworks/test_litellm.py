"""litellm over the server, as `openai/<model>` with an api_base."""
# pyright: reportMissingImports=false

import asyncio
import json
from typing import Any

import pytest

from tests.server.frameworks.calls import Call, Served, assert_called, rows, table
from tests.server.serving import KEY
from tests.server.tools_model import QUESTION, TOOL

SCHEMA = {
    "type": "object",
    "properties": {"sum": {"enum": [11, 12]}},
    "required": ["sum"],
    "additionalProperties": False,
}
IMAGE = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]


def ask(served: Served, function: str = "completion", **options: Any) -> Any:
    import litellm

    options = {"model": f"openai/{served.caller}", "messages": QUESTION, "max_tokens": 60, "temperature": 0, **options}
    options = {name: value for name, value in options.items() if value is not None}
    return getattr(litellm, function)(api_base=served.openai_url, api_key=KEY, num_retries=0, **options)


def one(served: Served) -> None:
    reply = ask(served, max_tokens=8)
    assert reply.choices[0].message.role == "assistant" and reply.usage.completion_tokens <= 8


def tools(served: Served) -> None:
    (call,) = ask(served, tools=[TOOL]).choices[0].message.tool_calls
    assert_called(call.function.name, call.function.arguments)


def stream(served: Served) -> None:
    options: dict[str, Any] = {"model": f"openai/{served.model}", "max_tokens": 8, "seed": 1, "temperature": 1}
    whole = ask(served, **options).choices[0].message.content
    pieces = [chunk.choices[0].delta.content or "" for chunk in ask(served, stream=True, **options)]
    assert "".join(pieces) == whole


def streamed_tools(served: Served) -> None:
    chunks = list(ask(served, tools=[TOOL], stream=True))
    called = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert_called(called[0].function.name, "".join(call.function.arguments or "" for call in called))


def logprobs(served: Served) -> None:
    reply = ask(served, tools=[TOOL], logprobs=True, top_logprobs=2)
    scores = reply.choices[0].logprobs.content
    assert len(scores) == reply.usage.completion_tokens and len(scores[0].top_logprobs) == 2
    assert all(score.logprob <= 0 for score in scores)


def several(served: Served) -> None:
    texts = [
        [choice.message.content for choice in ask(served, n=3, seed=4, temperature=1, max_tokens=8).choices]
        for _ in range(2)
    ]
    assert len(texts[0]) == 3 and texts[0] == texts[1]


def stop(served: Served) -> None:
    reply = ask(served, stop=["arguments"])
    assert "arguments" not in (reply.choices[0].message.content or "") and reply.choices[0].finish_reason == "stop"


def schema(served: Served) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA, "strict": True}}
    reply = ask(served, model=f"openai/{served.model}", response_format=form)
    assert json.loads(reply.choices[0].message.content)["sum"] in (11, 12)


def asynchronous(served: Served) -> None:
    async def main() -> Any:
        return await asyncio.gather(*(ask(served, "acompletion", max_tokens=4, seed=seed) for seed in range(3)))

    assert len(asyncio.run(main())) == 3


def text(served: Served) -> None:
    reply = ask(
        served,
        "text_completion",
        model=f"text-completion-openai/{served.model}",
        prompt="One",
        messages=None,
        max_tokens=3,
    )
    assert reply.choices[0].text is not None and reply.usage.completion_tokens <= 3


CALLS = {
    "completion(messages)": Call(one),
    "completion(tools=[...])": Call(tools),
    "completion(stream=True)": Call(stream),
    "completion(tools=[...], stream=True)": Call(streamed_tools),
    "completion(logprobs=True, top_logprobs=2)": Call(logprobs),
    "completion(n=3, seed=4)": Call(several),
    "completion(stop=[...])": Call(stop),
    "completion(response_format={json_schema})": Call(schema),
    "acompletion(messages)": Call(asynchronous),
    "text_completion(prompt)": Call(text),
    'completion(model="openai/gpt-4")': Call(lambda served: ask(served, model="openai/gpt-4"), "is not served here"),
    "completion(messages=[an image])": Call(
        lambda served: ask(served, messages=[{"role": "user", "content": IMAGE}]), "Input should be 'text'"
    ),
    "embedding(input)": Call(
        lambda served: ask(served, "embedding", input=["One"], messages=None, max_tokens=None, temperature=None),
        "there is no route POST /v1/embeddings here",
    ),
}


def test_the_page_lists_them() -> None:
    assert rows("litellm") == table(CALLS)


@pytest.mark.server
@pytest.mark.parametrize("name", CALLS)
def test_call(served: Served, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    pytest.importorskip("litellm")
    CALLS[name].check(served)
