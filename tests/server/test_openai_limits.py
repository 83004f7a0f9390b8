"""What clients of the OpenAI-compatible routes send and do, before any engine sees it: asked without a socket."""

import asyncio
import gc
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `server` is not installed")

from tests.server.serving import TINY_CHAT
from tests.server.stand_in import Before, Link, before

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
