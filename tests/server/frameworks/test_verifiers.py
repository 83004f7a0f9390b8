"""The clients of verifiers over the server: the one that trains, on token ids, and the one that evaluates."""
# pyright: reportMissingImports=false

import asyncio
import math
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.server.frameworks.calls import Call, Served, assert_called, rows, table
from tests.server.tools_model import QUESTION, TOOL


def asked(served: Served, client: Any, body: dict[str, Any], **sampling: Any) -> Any:
    """The response of a client to one request."""
    from verifiers.v1.dialects.chat import ChatDialect
    from verifiers.v1.types import SamplingConfig

    async def main() -> Any:
        try:
            config = SamplingConfig(**{"temperature": 1.0, "max_tokens": 60, **sampling})
            return await client.get_response(ChatDialect(), {"messages": QUESTION, **body}, config)
        finally:
            await client.close()

    return asyncio.run(main())


def trainer(served: Served) -> Any:
    from verifiers.v1.clients.train import TrainClient
    from verifiers.v1.configs.client import TrainClientConfig

    return TrainClient(
        TrainClientConfig(base_url=served.openai_url, api_key_var="LOCAL_KEY", renderer_model_name=served.model)
    )


def evaluator(served: Served) -> Any:
    from verifiers.v1.clients.eval import EvalClient
    from verifiers.v1.configs.client import EvalClientConfig

    return EvalClient(EvalClientConfig(base_url=served.openai_url, api_key_var="LOCAL_KEY"))


def token_ids(served: Served) -> None:
    """Prompts are rendered by the client; ids, logprobs and the text come back through its own checks."""
    tokens = asked(served, trainer(served), {"model": served.caller}).tokens
    template = AutoTokenizer.from_pretrained(served.model).apply_chat_template
    assert list(tokens.prompt_ids) == template(QUESTION, add_generation_prompt=True, return_dict=False)
    assert len(tokens.completion_ids) == len(tokens.completion_logprobs) > 0
    assert all(math.isfinite(logprob) and logprob <= 0 for logprob in tokens.completion_logprobs)


def chat(served: Served) -> None:
    body = {"model": served.caller, "tools": [TOOL], "temperature": 0, "max_tokens": 60}
    (call,) = asked(served, evaluator(served), body).raw["choices"][0]["message"]["tool_calls"]
    assert_called(call["function"]["name"], call["function"]["arguments"])


CALLS = {
    "TrainClient(...).get_response(...)": Call(token_ids),
    "EvalClient(...).get_response(...)": Call(chat),
    'TrainClient(...).get_response(ChatDialect(), {"model": "gpt-4", ...})': Call(
        lambda served: asked(served, trainer(served), {"model": "gpt-4"}), "is not served here"
    ),
    'EvalClient(...).get_response(ChatDialect(), {"model": "gpt-4", ...})': Call(
        lambda served: asked(served, evaluator(served), {"model": "gpt-4"}), "is not served here"
    ),
}


def test_the_page_lists_them() -> None:
    assert rows("verifiers") == table(CALLS)


@pytest.mark.verifiers
@pytest.mark.parametrize("name", CALLS)
def test_call(served: Served, name: str) -> None:
    pytest.importorskip("verifiers.v1")
    CALLS[name].check(served)
