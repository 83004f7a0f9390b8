"""What clients of the OpenAI-compatible routes send and do, before any engine sees it: asked without a socket."""

import asyncio
import gc
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import zstandard
from pydantic import BaseModel

pytest.importorskip("fastapi", reason="the extra `server` is not installed")

from tests.child import preloaded
from tests.server.serving import TINY_CHAT
from tests.server.stand_in import Before, Link, before
from tests.waiting import loop_until
from tinker_local_backend.server.access import Tenant
from tinker_local_backend.server.budget import memory_of
from tinker_local_backend.server.config import MIB
from tinker_local_backend.server.gateway import SMALL_BODY
from tinker_local_backend.server.openai_schemas import ChatBody, CompletionBody
from tinker_local_backend.server.schemas import Sample
from tinker_local_backend.wire.frames import Frame

CHAT = {"model": TINY_CHAT, "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}


def test_a_client_that_leaves_a_chat_is_no_error_in_the_log(tmp_path: Path) -> None:
    async def ask(served: Before) -> list[Any]:
        told: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["message"]))
        await served.leave("/v1/chat/completions", json.dumps(CHAT).encode())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        gc.collect()
        assert served.link.frames[-1].fields["op"] == "sample"
        return told

    assert before(tmp_path, ask, link=Link(answers=False)) == []


def test_what_has_no_effect_is_not_kept() -> None:
    body = ChatBody.model_validate_json(json.dumps({**CHAT, "metadata": {"x": "y" * 100_000}, "tool_choice": "none"}))
    assert body.model_extra == {} and body.tool_choice == "none" and memory_of(body) < 5_000


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        (ChatBody, {**CHAT, "messages": [{"role": "user", "content": "x" * 100}] * 1000}),
        (ChatBody, {**CHAT, "messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 1000}]}),
        (ChatBody, {**CHAT, "tools": [{"type": "function", "function": {"a": [[], {}, 1] * 1000}}]}),
        (CompletionBody, {"model": "m", "prompt": "\U0001f600" + "x" * 100_000}),
        (CompletionBody, {"model": "m", "prompt": [[n + 1000 for n in range(1000)]] * 10}),
        (Sample, {"prompt": {"chunks": [{"tokens": list(range(10_000))}] * 2}, "sampling_params": {}}),
    ],
)
def test_the_memory_of_a_body_is_what_it_takes(body: type[BaseModel], fields: Any) -> None:
    # In a process without threads: one that frees memory while tracemalloc stops can crash Python 3.11.
    with preloaded().Pool(1) as pool:
        counted, taken = pool.apply(_memory, (body, json.dumps(fields).encode()))
    assert 0.7 < counted / taken < 1.5


def _memory(body: type[BaseModel], data: bytes) -> tuple[int, int]:
    """What is counted for a body, and what it takes."""
    body.model_validate_json(data)  # what is made once is no part of it
    gc.collect()
    tracemalloc.start()
    kept = body.model_validate_json(data)
    gc.collect()
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return memory_of(kept), taken


def test_a_chat_that_waits_counts_as_what_it_becomes(tmp_path: Path) -> None:
    """A few hundred bytes on their way, four hundred thousand until it is answered: parts of a message that say nothing."""
    headers = {"Content-Type": "application/json", "Content-Encoding": "zstd"}

    def chat_of(parts: int) -> bytes:
        messages = [{"role": "user", "content": [{"type": "text", "text": ""}] * parts}]
        return json.dumps({**CHAT, "messages": messages}).encode()

    kept = memory_of(ChatBody.model_validate_json(chat_of(750)))
    assert 400_000 < kept < 500_000

    async def ask(served: Before) -> list[int]:
        held, tenant = served.service.memory, Tenant("local", tmp_path)
        async with served.client() as web:

            async def chat(parts: int) -> int:
                content = zstandard.ZstdCompressor().compress(chat_of(parts))
                assert len(content) < 300
                return (await web.post("/v1/chat/completions", content=content, headers=headers)).status_code

            def samples() -> list[Frame]:
                return [frame for frame in served.link.frames if frame.fields["op"] == "sample"]

            asking: list[asyncio.Task[int]] = []
            for count in (1, 2):
                asking.append(asyncio.create_task(chat(750)))
                await loop_until(lambda: len(samples()) == count or asking[-1].done())  # noqa: B023
                assert not asking[-1].done()
                assert kept * count < held.total < (kept + 10_000) * count
            assert held.of(tenant) == held.total
            found = [await chat(750), await chat(2500)]
            for task in asking:
                task.cancel()
            await asyncio.wait(asking)
            assert held.total < 10_000, "what the engine has"
        return found

    link = Link(answers=False, context_length=1 << 20)
    assert before(tmp_path, ask, link=link, max_waiting_mib=1) == [429, 413]


def test_the_framework_gets_no_body_that_does_not_count(tmp_path: Path) -> None:
    large = zstandard.ZstdCompressor().compress(b"{" + b" " * (SMALL_BODY - 2) + b"}")
    headers = {"Content-Type": "application/json", "Content-Encoding": "zstd"}

    async def ask(served: Before) -> list[int]:
        tenant = served.access.tenant("tml-anything")
        assert tenant is not None
        async with served.client() as web:
            statuses = []
            for waiting in (0, MIB - SMALL_BODY):
                reservation = served.service.memory.reserve(tenant, waiting)
                reply = await web.post("/api/v1/create_session", content=large, headers=headers)
                statuses.append(reply.status_code)
                reservation.release()
            return statuses

    assert before(tmp_path, ask, max_waiting_mib=1) == [200, 429]
