"""Message completers over a real snapshot, and tasks of one's own by name."""

import asyncio

import pytest

from tinker_cookbook import backends
from tinker_cookbook.completers import TinkerMessageCompleter
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import get_renderer, get_text_content
from tinker_cookbook.tasks import registry
from tinker_cookbook.tasks.prompts import QA_SYSTEM
from tinker_cookbook.tasks.qa import QATask
from tinker_cookbook.tasks.types import parse_solution
from tinker_cookbook.tokenizer_utils import get_tokenizer

TINY = str(EXAMPLE_DATA / "tiny_chat")


def test_a_message_completer_answers_with_the_text_and_without_the_stop() -> None:
    async def ask() -> str:
        client = await backends.create_service_client("local").create_sampling_client(base_model=TINY)
        renderer = get_renderer("qwen3_instruct", get_tokenizer(TINY))
        completer = TinkerMessageCompleter(client, renderer, max_tokens=32, temperature=0.1)
        reply = await completer(
            [{"role": "system", "content": QA_SYSTEM}, {"role": "user", "content": "What is 2 + 2?"}]
        )
        assert reply["role"] == "assistant"
        return get_text_content(reply)

    text = asyncio.run(ask())
    assert parse_solution(text) is not None and "<|im_end|>" not in text


def test_a_task_of_ones_own_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Riddles(QATask):
        name = "riddles"

    monkeypatch.setattr(registry, "_TASKS", dict(registry._TASKS))
    with pytest.raises(ConfigurationError, match="task='riddles' is unknown"):
        registry.get_task("riddles")
    registry.register_task(Riddles)
    assert isinstance(registry.get_task("riddles"), Riddles)
