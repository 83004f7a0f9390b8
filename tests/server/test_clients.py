"""Clients that others wrote, unchanged: each gets a call of a tool with its logprobs from a trained checkpoint.

Each needs its package and is skipped without it: openai, litellm (and mcp), inspect-ai, verifiers. They want different
versions of openai, so each lives in an environment of its own.
"""

# pyright: reportMissingImports=false

import asyncio
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from transformers import AutoTokenizer

from tests.server.serving import KEY, Serving
from tests.server.tools_model import QUESTION, TOOL, model_with_tools

pytestmark = pytest.mark.server

CALL = '<tool_call>{"name": "add", "arguments": {"a": 7, "b": 5}}</tool_call>'
STEPS = 30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return model_with_tools(tmp_path_factory.mktemp("models") / "with_tools")


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory, model: str) -> Iterator[Serving]:
    pytest.importorskip("fastapi", reason="the extra `server` is not installed")
    # The caller below is trained, and the client of verifiers renders, by the template.
    with Serving(tmp_path_factory.mktemp("home"), model=model, chat="template") as serving:
        yield serving


@pytest.fixture(scope="module")
def caller(serving: Serving, model: str) -> str:
    """A checkpoint that learnt to answer the question with a call, whichever way a client words the declaration of the tool."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    end = tokenizer.encode(f"{CALL}<|im_end|>", add_special_tokens=False)
    bare = {**TOOL, "function": {"name": "add", "description": "adds", "parameters": {}}}
    data = []
    for tools in ([TOOL], [bare], None):
        prompt = tokenizer.apply_chat_template(QUESTION, tools=tools, add_generation_prompt=True, return_dict=False)
        tokens = [*prompt, *end]
        weights = np.array([0.0] * (len(prompt) - 1) + [1.0] * len(end), dtype=np.float32)
        inputs = {"target_tokens": np.array(tokens[1:]), "weights": weights}
        arrays = {name: tinker.TensorData.from_numpy(array) for name, array in inputs.items()}
        data.append(tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=arrays))
    service = tinker.ServiceClient(base_url=serving.url, api_key=KEY)
    client = service.create_lora_training_client(model, rank=16, seed=1).result()
    for _ in range(STEPS):
        client.forward_backward(data, "cross_entropy")
        client.optim_step(tinker.AdamParams(learning_rate=5e-3)).result()
    return client.save_weights_for_sampler("caller").result().path


def assert_called(name: str, arguments: str | dict[str, Any]) -> None:
    assert name == "add"
    assert (json.loads(arguments) if isinstance(arguments, str) else arguments) == {"a": 7, "b": 5}


def test_openai(serving: Serving, caller: str) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{serving.url}/v1", api_key=KEY, max_retries=0)
    asked: dict[str, Any] = {"model": caller, "messages": QUESTION, "tools": [TOOL], "max_tokens": 60, "temperature": 0}
    reply = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2, seed=1)
    (call,) = reply.choices[0].message.tool_calls
    assert_called(call.function.name, call.function.arguments)
    assert reply.choices[0].finish_reason == "tool_calls"
    scores = reply.choices[0].logprobs.content
    assert len(scores) == reply.usage.completion_tokens and all(score.logprob <= 0 for score in scores)
    chunks = list(client.chat.completions.create(**asked, stream=True))
    called = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or []]
    assert_called(called[0].function.name, called[0].function.arguments)
    assert "<tool_call>" not in "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_openai_without_tools(serving: Serving, caller: str, model: str) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{serving.url}/v1", api_key=KEY, max_retries=0)
    assert model in [listed.id for listed in client.models.list()]
    asked: dict[str, Any] = {"model": caller, "messages": QUESTION, "max_tokens": 8, "seed": 1, "stop": ["zz"]}
    reply = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2, n=2)
    assert len(reply.choices) == 2 and reply.choices[0].logprobs.content[0].top_logprobs
    stream = client.chat.completions.create(**asked, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in stream) == reply.choices[0].message.content
    completion = client.completions.create(model=model, prompt="One", max_tokens=3, logprobs=1)
    assert completion.choices[0].logprobs.token_logprobs
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        client.chat.completions.create(model="gpt-4", messages=QUESTION)


def test_litellm(serving: Serving, caller: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    reply = litellm.completion(
        model=f"openai/{caller}", api_base=f"{serving.url}/v1", api_key=KEY, messages=QUESTION, tools=[TOOL],
        max_tokens=60, temperature=0, logprobs=True, top_logprobs=2, num_retries=0,
    )  # fmt: skip
    (call,) = reply.choices[0].message.tool_calls
    assert_called(call.function.name, call.function.arguments)
    assert reply.choices[0].logprobs.content[0].top_logprobs


def test_inspect(serving: Serving, caller: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openai")
    pytest.importorskip("inspect_ai")
    monkeypatch.chdir(tmp_path)
    from inspect_ai.model import ChatMessageSystem, ChatMessageUser, GenerateConfig, get_model
    from inspect_ai.tool import ToolInfo

    async def ask() -> Any:
        config = GenerateConfig(max_tokens=60, temperature=0.0, logprobs=True, top_logprobs=2, max_retries=0)
        client = get_model(f"openai-api/local/{caller}", base_url=f"{serving.url}/v1", api_key=KEY, config=config)
        system, user = (message["content"] for message in QUESTION)
        messages = [ChatMessageSystem(content=system), ChatMessageUser(content=user)]
        async with client:
            return await client.generate(messages, tools=[ToolInfo(name="add", description="adds")])

    reply = asyncio.run(ask())
    choice = reply.choices[0]
    assert choice.logprobs is not None and choice.logprobs.content[0].top_logprobs
    (call,) = choice.message.tool_calls
    assert_called(call.function, call.arguments)


def test_the_token_client_of_verifiers(
    serving: Serving, caller: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are rendered by the client; ids, logprobs and the text come back through its own checks."""
    pytest.importorskip("verifiers.v1")
    from verifiers.v1.clients.train import TrainClient
    from verifiers.v1.configs.client import TrainClientConfig
    from verifiers.v1.dialects.chat import ChatDialect
    from verifiers.v1.types import SamplingConfig

    monkeypatch.setenv("LOCAL_KEY", KEY)
    config = TrainClientConfig(base_url=f"{serving.url}/v1", api_key_var="LOCAL_KEY", renderer_model_name=model)

    async def ask() -> Any:
        client = TrainClient(config)
        try:
            body = {"model": caller, "messages": QUESTION}
            return await client.get_response(ChatDialect(), body, SamplingConfig(temperature=1.0, max_tokens=60))
        finally:
            await client.close()

    response = asyncio.run(ask())
    tokens = response.tokens
    prompt = AutoTokenizer.from_pretrained(model).apply_chat_template(
        QUESTION, add_generation_prompt=True, return_dict=False
    )
    assert list(tokens.prompt_ids) == prompt
    assert len(tokens.completion_ids) == len(tokens.completion_logprobs) > 0
    assert all(math.isfinite(logprob) and logprob <= 0 for logprob in tokens.completion_logprobs)
