"""A server whose chats have the tokens of training, by the renderer of the model or of the checkpoint."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import tinker
from transformers import AutoTokenizer

from tests.server.serving import KEY, TINY_CHAT, Serving
from tests.server.tools_model import QUESTION, TOOL
from tests.waiting import HANG_SECONDS
from tinker_cookbook.renderers import Message, ToolCall, ToolSpec, get_renderer

pytestmark = pytest.mark.server
SYSTEM, USER = (Message(role=message["role"], content=message["content"]) for message in QUESTION)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    pytest.importorskip("fastapi", reason="the extra `server` is not installed")
    with Serving(tmp_path_factory.mktemp("renderers-home")) as serving:
        yield serving


@pytest.fixture(scope="module")
def web(serving: Serving) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=serving.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=HANG_SECONDS) as client:
        yield client


def ask(web: httpx.Client, **body: Any) -> dict[str, Any]:
    asked = {"model": TINY_CHAT, "max_tokens": 2, "return_token_ids": True, **body}
    response = web.post("/v1/chat/completions", json=asked)
    assert response.status_code == 200, response.text
    return response.json()


def test_the_server_says_which_renderer_it_has(serving: Serving, web: httpx.Client) -> None:
    assert any("chat format: qwen3_instruct" in line for line in serving.lines)
    assert [model["chat_format"] for model in web.get("/v1/models").json()["data"]] == ["qwen3_instruct"]


def test_a_chat_with_tools_is_a_sample_of_the_prompt_of_training(web: httpx.Client) -> None:
    """The renderer declares the tools, which this model's template refuses."""
    call = ToolCall(id="1", function=ToolCall.FunctionBody(name="add", arguments='{"a": 7}'))
    history = [*QUESTION, {"role": "assistant", "tool_calls": [call.model_dump()]}]
    history += [{"role": "tool", "tool_call_id": "1", "content": "12"}]
    renderer = get_renderer("qwen3_instruct", AutoTokenizer.from_pretrained(TINY_CHAT))
    spec = ToolSpec(name="add", description="adds", parameters={"type": "object"})
    opening = renderer.create_conversation_prefix_with_tools([spec], QUESTION[0]["content"])
    answer, result = Message(role="assistant", content="", tool_calls=[call]), Message(role="tool", content="12")
    expected = renderer.build_generation_prompt([*opening, USER, answer, result]).to_ints()
    assert ask(web, messages=history, tools=[TOOL])["prompt_token_ids"] == expected
    undeclared = ask(web, messages=QUESTION, tools=[TOOL], tool_choice="none")
    assert undeclared["prompt_token_ids"] == renderer.build_generation_prompt([SYSTEM, USER]).to_ints()


def test_a_forced_call_is_one(web: httpx.Client) -> None:
    pytest.importorskip("llguidance", reason="needs the extra `constrain` (llguidance)")
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    bounded = {"type": "function", "function": {"name": "add", "parameters": schema}}
    reply = ask(
        web, messages=QUESTION, tools=[bounded], tool_choice="required", max_tokens=60, n=4, temperature=2, seed=1
    )
    for choice in reply["choices"]:
        (call,) = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
        assert call["function"]["name"] == "add" and call["function"]["arguments"] in (
            '{"a": 1}',
            '{"a":1}',
            '{"a": 2}',
            '{"a":2}',
        )


def test_a_checkpoint_s_chats_have_the_renderer_of_its_training(web: httpx.Client, serving: Serving) -> None:
    service = tinker.ServiceClient(base_url=serving.url, api_key=KEY)
    trained = service.create_lora_training_client(
        TINY_CHAT, rank=2, seed=1, user_metadata={"renderer_name": "qwen3_disable_thinking"}
    ).result()
    path = trained.save_weights_for_sampler("quiet").result().path
    assert web.get(f"/v1/models/{path}").json()["chat_format"] == "qwen3_disable_thinking"
    renderer = get_renderer("qwen3_disable_thinking", AutoTokenizer.from_pretrained(TINY_CHAT))
    expected = renderer.build_generation_prompt([SYSTEM, USER])
    reply = ask(web, model=path, messages=QUESTION)
    assert reply["prompt_token_ids"] == expected.to_ints()
    refused = web.post("/v1/chat/completions", json={"model": path, "messages": QUESTION, "reasoning_effort": "high"})
    assert (
        refused.status_code == 400 and "'qwen3_disable_thinking' has no variant" in refused.json()["error"]["message"]
    )
