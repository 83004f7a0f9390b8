"""inspect-ai over the server, as the model `openai-api/local/<model>`."""
# pyright: reportMissingImports=false

import asyncio
import json
import math
from typing import Any

import pytest

from tests.server.frameworks.calls import Call, Served, assert_called, rows, table
from tests.server.serving import KEY
from tests.server.tools_model import QUESTION


def model_of(served: Served, name: str | None = None, **config: Any) -> Any:
    from inspect_ai.model import GenerateConfig, get_model

    config = {"max_tokens": 60, "temperature": 0.0, "max_retries": 0, **config}
    address = f"openai-api/local/{name or served.caller}"
    return get_model(address, base_url=served.openai_url, api_key=KEY, config=GenerateConfig(**config), memoize=False)


def generated(served: Served, name: str | None = None, tool: bool = False, **config: Any) -> Any:
    from inspect_ai.model import ChatMessageSystem, ChatMessageUser
    from inspect_ai.tool import ToolInfo

    async def main() -> Any:
        system, user = (message["content"] for message in QUESTION)
        messages = [ChatMessageSystem(content=system), ChatMessageUser(content=user)]
        async with model_of(served, name, **config) as model:
            return await model.generate(messages, tools=[ToolInfo(name="add", description="adds")] if tool else [])

    return asyncio.run(main())


def one(served: Served) -> None:
    reply = generated(served, max_tokens=8)
    assert reply.choices[0].message.role == "assistant" and 0 < reply.usage.output_tokens <= 8


def tools(served: Served) -> None:
    choice = generated(served, tool=True, logprobs=True, top_logprobs=2).choices[0]
    (call,) = choice.message.tool_calls
    assert_called(call.function, call.arguments)
    assert choice.logprobs is not None and len(choice.logprobs.content[0].top_logprobs) == 2


def several(served: Served) -> None:
    texts = [
        [
            choice.message.text
            for choice in generated(served, num_choices=3, seed=2, temperature=1.0, max_tokens=8).choices
        ]
        for _ in range(2)
    ]
    assert len(texts[0]) == 3 and texts[0] == texts[1]


def stops(served: Served) -> None:
    assert "arguments" not in generated(served, stop_seqs=["arguments"]).choices[0].message.text


def schema(served: Served) -> None:
    from inspect_ai.model import ResponseSchema
    from inspect_ai.util import JSONSchema

    properties = {"sum": JSONSchema(type="integer", enum=[11, 12])}
    form = JSONSchema(type="object", properties=properties, required=["sum"], additionalProperties=False)
    asked = ResponseSchema(name="sum", json_schema=form, strict=True)
    reply = generated(served, served.model, response_schema=asked)
    assert json.loads(reply.choices[0].message.text)["sum"] in (11, 12)


def evaluated(served: Served) -> None:
    """A task with two samples, whose replies are read by a scorer."""
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.scorer import includes

    samples = [Sample(input=str(QUESTION[1]["content"]), target=target) for target in ("add", "nothing of the kind")]
    (log,) = eval(
        Task(dataset=samples, scorer=includes()), model=model_of(served), log_dir=str(served.folder), display="none"
    )
    assert log.status == "success" and len(log.samples) == 2
    (score,) = log.results.scores
    assert math.isfinite(score.metrics["accuracy"].value) and score.metrics["accuracy"].value < 1


CALLS = {
    "get_model(...).generate(messages)": Call(one),
    "generate(messages, tools), logprobs=True, top_logprobs=2": Call(tools),
    "generate(messages), num_choices=3, seed=2": Call(several),
    "generate(messages), stop_seqs=[...]": Call(stops),
    "generate(messages), response_schema=ResponseSchema(...)": Call(schema),
    "eval(Task(dataset, scorer))": Call(evaluated),
    'get_model("openai-api/local/gpt-4").generate(messages)': Call(
        lambda served: generated(served, "gpt-4"), "is not served here"
    ),
}


def test_the_page_lists_them() -> None:
    assert rows("inspect-ai") == table(CALLS)


@pytest.mark.server
@pytest.mark.parametrize("name", CALLS)
def test_call(served: Served, name: str) -> None:
    pytest.importorskip("openai")
    pytest.importorskip("inspect_ai")
    CALLS[name].check(served)
