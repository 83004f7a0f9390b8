"""Samplers of sessions and of checkpoints: made, found again, evicted, loaded again, and whose they are."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi", reason="the extra `server` is not installed")

from tests.server.serving import TENANTS, TINY_CHAT
from tests.server.stand_in import Before, Link, before
from tests.server.test_limits import asample
from tests.server.test_quotas import create
from tests.waiting import loop_until
from tinker_local_backend.engine.model.lora_spec import LoraSpec
from tinker_local_backend.server import samplers
from tinker_local_backend.storage.info import INFO_FILE, CheckpointInfo
from tinker_local_backend.storage.paths import CheckpointPath

NEVER = "0" * 32
"""a session that never was"""


def checkpoint(home: Path, name: str, rank: int = 32, created: float = 1.0) -> str:
    """The path of one for sampling, of which there is nothing but its description."""
    path = CheckpointPath.parse(f"tinker://run/sampler_weights/{name}")
    path.folder(home).mkdir(parents=True, exist_ok=True)
    info = CheckpointInfo(TINY_CHAT, LoraSpec(rank), created, None, {}, None)
    (path.folder(home) / INFO_FILE).write_text(json.dumps(info.to_json()))
    return str(path)


class TestSamplers:
    """Rank 32 takes 128 KiB, and 512 in training."""

    def ask(self, tmp_path: Path, ask: Callable[[Before, httpx.AsyncClient], Awaitable[Any]], **config: Any) -> Any:
        async def with_client(served: Before) -> Any:
            async with served.client() as web:
                return await ask(served, web)

        return before(tmp_path, with_client, link=Link(), **config)

    async def open(self, web: httpx.AsyncClient, model: str, number: int, **of: Any) -> str:
        asked = {"session_id": model.partition(":")[0], "sampling_session_seq_id": number, **of}
        reply = await web.post("/api/v1/create_sampling_session", json=asked)
        assert reply.status_code == 200, reply.text
        return reply.json()["sampling_session_id"]

    async def snapshot(self, web: httpx.AsyncClient, model: str, seq_id: int, number: int) -> str:
        asked = {"model_id": model, "seq_id": seq_id, "sampling_session_seq_id": number}
        reply = await web.post("/api/v1/save_weights_for_sampler", json=asked)
        assert reply.status_code == 200, reply.text
        return f"{model.partition(':')[0]}:sample:{number}"

    def dropped(self, served: Before) -> list[str]:
        """Samplers that the engine was told to let go, since this was last asked."""
        frames, served.link.frames = served.link.frames, []
        return [name for frame in frames if frame.fields["op"] == "drop" for name in frame.fields["sampler_ids"]]

    def test_those_of_base_models_count_for_nothing_and_stay(self, tmp_path: Path) -> None:
        async def ask(served: Before, web: httpx.AsyncClient) -> None:
            model, other = [(await create(web, 1)).json()["model_id"] for _ in range(2)]
            await self.snapshot(web, other, 1, 0)
            base = await self.open(web, model, 0, base_model=TINY_CHAT)
            first, second = [await self.snapshot(web, model, number, number) for number in (1, 2)]
            await self.open(web, model, 3, base_model=TINY_CHAT)
            assert self.dropped(served) == [], "two of a session are kept, and those of another are no part of these"
            third = await self.snapshot(web, model, 3, 4)
            assert self.dropped(served) == [first]
            fourth = await self.snapshot(web, model, 4, 5)
            assert self.dropped(served) == [second]
            asked = [(await asample(web, name, 0)).status_code for name in (base, first, second, third, fourth)]
            assert asked == [200, 404, 404, 200, 200]

        self.ask(tmp_path, ask, max_snapshots=2)

    def test_a_model_takes_the_room_of_checkpoints_alone_and_of_no_more_than_it_needs(self, tmp_path: Path) -> None:
        async def ask(served: Before, web: httpx.AsyncClient) -> None:
            model = (await create(web, 32)).json()["model_id"]
            snapshot = await self.snapshot(web, model, 1, 0)
            first, second = [
                await self.open(web, model, number, model_path=checkpoint(tmp_path, str(number))) for number in (1, 2)
            ]
            for name in (snapshot, first, second):
                assert (await asample(web, name, 0)).status_code == 200
            assert self.dropped(served) == []
            assert (await create(web, 16)).status_code == 200
            assert self.dropped(served) == [first], "half was free"
            assert (await create(web, 32)).status_code == 403
            assert self.dropped(served) == [], "the other one would not have been enough"
            assert [(await asample(web, name, 1)).status_code for name in (second, snapshot)] == [200, 200]
            # Asked for again, it is loaded again, in the place of what was used least recently.
            assert (await asample(web, first, 1)).status_code == 200
            ops = [(frame.fields["op"], frame.fields.get("sampler_id")) for frame in served.link.frames[-2:]]
            assert ops == [("open_sampler", first), ("sample", first)]
            assert self.dropped(served) == [second]
            assert (await asample(web, first, 2)).status_code == 200
            assert [frame.fields["op"] for frame in served.link.frames] == ["sample"]

        self.ask(tmp_path, ask, max_adapters_mib=1)

    def test_what_finds_no_room_is_refused_and_holds_nothing(self, tmp_path: Path) -> None:
        async def ask(served: Before, web: httpx.AsyncClient) -> None:
            one, two = [checkpoint(tmp_path, str(number), rank) for number, rank in enumerate((128, 256))]
            session = (await create(web, 1)).json()["model_id"]
            sampler = await self.open(web, session, 0, model_path=one)
            await self.open(web, session, 1, model_path=one)
            assert self.dropped(served) == [sampler]
            refused = await web.post(
                "/api/v1/create_sampling_session",
                json={"session_id": session.partition(":")[0], "sampling_session_seq_id": 2, "model_path": two},
            )
            assert refused.status_code == 403 and self.dropped(served) == []
            assert (await create(web, 64)).status_code == 403 and self.dropped(served) == []
            assert (await create(web, 48)).status_code == 200, "for which it goes, and the first finds no room again"
            assert (await asample(web, sampler, 0)).status_code == 403
            assert served.service.memory.total == 0 and served.service.samplers.running("requests") == 0

        self.ask(tmp_path, ask, max_adapters_mib=1)

    def test_a_number_is_used_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(samplers, "MAX_SAMPLERS", 3)

        async def ask(served: Before, web: httpx.AsyncClient) -> list[int]:
            model = (await create(web, 1)).json()["model_id"]
            session, saved = model.partition(":")[0], checkpoint(tmp_path, "x")

            async def status(number: int, **of: Any) -> int:
                asked = {"session_id": session, "sampling_session_seq_id": number, **of}
                return (await web.post("/api/v1/create_sampling_session", json=asked)).status_code

            statuses = [await status(0, base_model=TINY_CHAT) for _ in range(2)]
            statuses += [await status(0, model_path=saved), await status(0, base_model="another")]
            statuses += [await status(1, model_path=saved, base_model="another"), await status(1, model_path=saved)]
            statuses += [await status(1, model_path=saved, base_model=TINY_CHAT), await status(2)]
            assert sum(frame.fields["op"] == "open_sampler" for frame in served.link.frames) == 2
            asked = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 1}
            taken = await web.post("/api/v1/save_weights_for_sampler", json=asked)
            assert taken.status_code == 400 and "was used before in this session" in taken.text
            statuses += [await status(3, base_model=TINY_CHAT), await status(4, base_model=TINY_CHAT)]
            return statuses

        assert self.ask(tmp_path, ask) == [200, 200, 400, 400, 400, 200, 200, 400, 200, 403]

    def test_a_checkpoint_that_is_replaced_under_its_name_is_another(self, tmp_path: Path) -> None:
        """For requests without a session, which name it by its path."""

        async def ask(served: Before, web: httpx.AsyncClient) -> list[str]:
            for created in (1.0, 1.0, 2.0):
                body = {"model": checkpoint(tmp_path, "x", created=created), "prompt": [1], "max_tokens": 1}
                asking = asyncio.create_task(web.post("/v1/completions", json=body))
                asked = len([frame for frame in served.link.frames if frame.fields["op"] == "sample"])
                await loop_until(
                    lambda asked=asked: sum(f.fields["op"] == "sample" for f in served.link.frames) > asked
                )
                asking.cancel()
                await asyncio.wait([asking])
            missing = await web.get("/v1/models/another")
            assert missing.status_code == 404
            return [frame.fields["op"] for frame in served.link.frames]

        assert self.ask(tmp_path, ask) == ["open_sampler", "sample", "sample", "open_sampler", "sample"]

    def test_each_is_its_tenants_alone(self, tmp_path: Path) -> None:
        """To another it is as one that never was, whichever route names it."""
        saved = checkpoint(tmp_path / "tenants" / "alice", "x")

        async def ask(served: Before) -> None:
            alice, bob = (served.client(TENANTS[name]) for name in ("alice", "bob"))
            sampler = await served.sampler(alice)
            request = (await asample(alice, sampler, 0)).json()["request_id"]
            asking = asyncio.create_task(alice.post("/v1/completions", json={"model": saved, "prompt": [1]}))
            await loop_until(lambda: len(served.link.waiting) == 4)
            standing = served.link.frames[-1].fields["sampler_id"]
            drawn = served.service.samplers.running("tokens")

            async def answers(web: httpx.AsyncClient, name: str, request_id: str, path: str) -> list[tuple[int, str]]:
                session = {"session_id": name.partition(":")[0], "sampling_session_seq_id": 9}
                asked: list[tuple[str, str, Any]] = [
                    ("GET", f"/api/v1/samplers/{name}", None),
                    ("POST", "/api/v1/join_sampling_session", {"sampling_session_id": name}),
                    ("POST", "/api/v1/create_sampling_session", {**session, "base_model": TINY_CHAT}),
                    ("POST", "/api/v1/retrieve_future", {"request_id": request_id}),
                    ("POST", "/api/v1/cancel_future", {"request_id": request_id}),
                    ("GET", f"/v1/models/{path}", None),
                ]
                for model in (name, path):
                    asked += [
                        ("POST", "/v1/completions", {"model": model, "prompt": "x"}),
                        (
                            "POST",
                            "/v1/chat/completions",
                            {"model": model, "messages": [{"role": "user", "content": ""}]},
                        ),
                        ("POST", "/inference/v1/generate", {"model": model, "token_ids": [1]}),
                    ]
                replies = [await asample(web, name, 1)]
                replies += [await web.request(method, route, json=body) for method, route, body in asked]
                hidden = (
                    (name, "SAMPLER"),
                    (request_id, "REQUEST"),
                    (path, "PATH"),
                    (session["session_id"], "SESSION"),
                )
                texts = [reply.text for reply in replies]
                for value, shown in hidden:
                    texts = [text.replace(value, shown) for text in texts]
                return list(zip([reply.status_code for reply in replies], texts, strict=True))

            real = await answers(bob, sampler, request, saved)
            assert real == await answers(bob, f"{NEVER}:sample:0", "1" * 32, saved.replace("/x", "/never"))
            assert [status for status, _ in real] == [404, 404, 404, 404, 200, 204, *[404] * 7]
            assert (await asample(bob, standing, 0)).status_code == 404
            assert served.service.samplers.running("tokens") == drawn and not any(
                reply.done() for reply in served.link.waiting
            )
            assert [status for status, _ in (await answers(alice, sampler, "1" * 32, "never"))[:4]] == [200] * 4
            asking.cancel()
            await asyncio.wait([asking])

        before(tmp_path, ask, TENANTS, Link(answers=False))
