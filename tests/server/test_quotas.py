"""What a tenant may use, by the line of his key, and who sees how much he has used."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi", reason="the extra `server` is not installed")

from tests.server.serving import TENANTS, TINY_CHAT
from tests.server.stand_in import Before, Link, before
from tests.server.test_limits import asample
from tinker_local_backend.errors import RequestError
from tinker_local_backend.server.access import Access, KeysFile, Tenant, Terms, read_keys
from tinker_local_backend.server.errors import Refused
from tinker_local_backend.server.quotas import Disk, TokenQuotas, bytes_below
from tinker_local_backend.storage.paths import CheckpointPath
from tinker_local_backend.wire.frames import Frame


def write(file: Path, text: str) -> None:
    """As a file of keys must be: nobody else's to read."""
    file.write_text(text)
    file.chmod(0o600)


def test_terms_stand_behind_a_key(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    write(file, "alice=tml-abcdefgh tokens_per_minute=600 rows=8  # hers\nops=tml-ijklmnop operator\n")
    keys = read_keys(str(file), {})
    assert keys == {"alice": "tml-abcdefgh", "ops": "tml-ijklmnop"}
    assert keys.terms == {"alice": Terms(600, 8), "ops": Terms(operator=True)}
    for wrong in ("rows=0", "rows=x", "rows", "lines=3", "operator=1", "rows=-1"):
        write(file, f"alice=tml-abcdefgh {wrong}\n")
        with pytest.raises(RequestError, match="a key may be followed by tokens_per_minute=N") as caught:
            read_keys(str(file), {})
        assert "abcdefgh" not in str(caught.value)


def test_a_minute_fills_the_bucket_again() -> None:
    quotas, tenant = TokenQuotas(), Tenant("a", Path(), Terms(tokens_per_minute=600))
    quotas.spend(tenant, 500, now=0.0)
    quotas.check(tenant, now=0.0)
    quotas.spend(tenant, 400, now=0.0)  # what ran on: 300 too many
    with pytest.raises(Refused) as refused:
        quotas.check(tenant, now=10.0)
    assert (refused.value.status, refused.value.retry_after) == (429, 21)
    quotas.check(tenant, now=31.0)
    quotas.spend(tenant, 600, now=10_000.0)  # no more than a minute's is ever saved up
    with pytest.raises(Refused):
        quotas.check(tenant, now=10_000.0)
    quotas.check(Tenant("b", Path()), now=0.0)


def test_tokens_and_rows_of_a_key_are_bounded(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    write(file, "alice=tml-alice-secret tokens_per_minute=60 rows=4\nbob=tml-bob-secret\n")

    async def ask(served: Before) -> list[Any]:
        alice, bob = served.client("tml-alice-secret"), served.client("tml-bob-secret")
        sampler, other = await served.sampler(alice), await served.sampler(bob)
        replies = [
            await asample(alice, sampler, 0, num_samples=5),
            await asample(alice, sampler, 1, num_samples=3),
            await asample(alice, sampler, 2, num_samples=2),
            await asample(bob, other, 0, num_samples=5),
        ]
        for reply in served.link.waiting:
            reply.set_result(Frame({"tokens": 100}))
        await asyncio.sleep(0)
        replies += [await asample(alice, sampler, 3), await asample(bob, other, 1)]
        body = {"model": TINY_CHAT, "prompt": "x", "max_tokens": 1}
        replies.append(await alice.post("/v1/completions", json=body))
        assert int(replies[-1].headers["Retry-After"]) > 30
        return [reply.status_code for reply in replies]

    keys = read_keys(str(file), {})
    assert before(tmp_path, ask, keys, Link(answers=False)) == [400, 200, 429, 200, 429, 200, 429]


def test_what_is_saved_has_an_end(tmp_path: Path) -> None:
    tenant = Tenant("a", tmp_path, Terms(disk_mib=1))
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "weights").write_bytes(bytes(600 << 10))

    async def main() -> None:
        disk = Disk()
        room = await disk.room(tenant, 300 << 10)
        for count in (500 << 10, 200 << 10):  # with what is on its way
            with pytest.raises(Refused, match="delete checkpoints"):
                await disk.room(tenant, count)
        room.release()
        with await disk.room(tenant, 200 << 10):
            pass
        await disk.room(tenant, 400 << 10)
        await disk.room(Tenant("b", tmp_path), 1 << 60)

    asyncio.run(main())


def on_one_mib(tmp_path: Path, ask: Callable[[Before, httpx.AsyncClient], Awaitable[Any]], link: Link) -> Any:
    """What `ask` returns of a tenant who has 1 MiB on the disk."""
    file = tmp_path / "keys"
    write(file, "alice=tml-alice-secret disk_mib=1\n")

    async def with_client(served: Before) -> Any:
        async with served.client("tml-alice-secret") as web:
            return await ask(served, web)

    return before(tmp_path, with_client, read_keys(str(file), {}), link)


def test_metadata_of_sessions_and_models_counts_on_the_disk(tmp_path: Path) -> None:
    """Sessions begin nevertheless, for whoever wants to delete checkpoints; they are only not listed."""

    async def ask(served: Before, web: httpx.AsyncClient) -> httpx.Response:
        large = {"user_metadata": {"x": "x" * 60_000}}
        for _ in range(20):
            reply = await web.post("/api/v1/create_session", json=large)
            assert reply.status_code == 200
            await web.post(f"/api/v1/sessions/{reply.json()['session_id']}/finish")
        return await create(web, 1, **large)

    refused = on_one_mib(tmp_path, ask, Link())
    assert refused.status_code == 403 and "disk_mib" in refused.json()["detail"]
    assert 1 << 19 < bytes_below(tmp_path / "tenants") < (1 << 20) + (1 << 17)


def test_saves_that_wait_and_copies_count_with_their_size(tmp_path: Path) -> None:
    """A model of 256 KiB; with the metadata that may come two fit and the third does not."""

    async def ask(served: Before, web: httpx.AsyncClient) -> list[int]:
        model = (await create(web, 16)).json()["model_id"]

        async def saves(*numbers: int) -> None:
            for number in numbers:
                body = {"model_id": model, "seq_id": number, "path": str(number)}
                assert (await web.post("/api/v1/save_weights", json=body)).status_code == 200

        await saves(1, 2, 3)
        for reply in served.link.waiting:
            reply.set_result(Frame({"json": {}}))
        for _ in range(3):
            await asyncio.sleep(0)
        await saves(4)
        ops = [frame.fields["op"] for frame in served.link.frames]
        assert ops == ["create_model", "save_weights", "save_weights", "refuse", "save_weights"]
        source = CheckpointPath.parse("tinker://run/weights/x")
        folder = source.folder(tmp_path / "tenants" / "alice")
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(bytes(300 << 10))
        return [(await web.post("/api/v1/copy_weights", json={"source_path": str(source)})).status_code]

    assert on_one_mib(tmp_path, ask, Link(answers=False)) == [403]


def test_a_save_beyond_the_disk_is_told_by_its_result_and_later_requests_go_on(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    write(file, "alice=tml-alice-secret disk_mib=1\n")
    home = tmp_path / "tenants" / "alice"

    async def ask(served: Before) -> list[str]:
        async with served.client("tml-alice-secret") as web:
            model = await served.model(web)
            (home / "old").write_bytes(bytes(1 << 20))
            for number, path in enumerate(("save_weights", "save_weights_for_sampler"), start=1):
                body = {"model_id": model, "seq_id": number, "path": "x"}
                assert (await web.post(f"/api/v1/{path}", json=body)).status_code == 200
        return [frame.fields["op"] for frame in served.link.frames]

    assert before(tmp_path, ask, read_keys(str(file), {})) == ["create_model", "refuse", "refuse"]


def test_keys_that_change_hold_at_once_and_who_has_none_is_ended(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    write(path, "alice=tml-alice-secret\nbob=tml-bob-secret\n")

    async def ask(served: Before) -> list[int]:
        alice, bob = served.client("tml-alice-secret"), served.client("tml-bob-secret")
        sessions = [(await web.post("/api/v1/create_session", json={})).json()["session_id"] for web in (alice, bob)]
        file = KeysFile(str(path))
        assert file.changed() is None
        write(path, "nonsense\n")
        with pytest.raises(RequestError):
            file.changed()
        assert file.changed() is None, "told once"
        write(path, "alice=tml-another-secret rows=7\ncarol=tml-carol-secret\n")
        os.utime(path, ns=(1, 1))
        keys = file.changed()
        assert keys is not None
        served.access.change(keys)
        served.service.end_tenants(served.access.knows)
        found = [(await web.post("/api/v1/client/config", json={})).status_code for web in (alice, bob)]
        again = served.client("tml-another-secret")
        for web, session in ((again, sessions[0]), (again, sessions[1])):
            beat = {"session_id": session}
            found.append((await web.post("/api/v1/session_heartbeat", json=beat)).status_code)
        assert served.service.live["sessions"] == 1
        return found

    assert before(tmp_path, ask, read_keys(str(path), {})) == [401, 401, 200, 410]


def test_terms_that_change_hold_for_sessions_that_were_there_before(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    write(path, "alice=tml-alice-secret\n")

    async def ask(served: Before) -> list[int]:
        web = served.client("tml-alice-secret")
        sampler = await served.sampler(web)
        statuses = [(await asample(web, sampler, 0)).status_code]
        write(path, "alice=tml-alice-secret tokens_per_minute=60 rows=4 disk_mib=1\n")
        served.access.change(read_keys(str(path), {}))
        statuses.append((await asample(web, sampler, 1, num_samples=5)).status_code)
        for reply in served.link.waiting:
            reply.set_result(Frame({"tokens": 239}))
        await asyncio.sleep(0)
        statuses.append((await asample(web, sampler, 2)).status_code)
        return statuses

    assert before(tmp_path, ask, read_keys(str(path), {}), Link(answers=False)) == [200, 400, 429]


def test_a_tenant_sees_his_own_numbers_and_an_operator_all(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    write(file, "alice=tml-alice-secret\nbob=tml-bob-secret\nops=tml-ops-secret operator\n")

    async def ask(served: Before) -> list[bytes]:
        served.service.metrics.watch_tenants(lambda: served.service.tenants)
        served.service.metrics.watch(lambda: served.service.live)
        for key in ("tml-alice-secret", "tml-bob-secret"):
            await served.model(served.client(key))
        return [
            served.service.metrics.text(t)
            for t in (served.access.tenant(f"tml-{n}-secret") for n in ("alice", "ops"))
            if t
        ]

    own, everything = before(tmp_path, ask, read_keys(str(file), {}))
    assert b'tinker_tenant_models{tenant="alice"} 1.0' in own and b"bob" not in own and b"tinker_live" not in own
    assert b'tinker_tenant_models{tenant="bob"} 1.0' in everything and b"tinker_live_sessions 2.0" in everything


def test_adapters_are_admitted_by_the_memory_that_they_take(tmp_path: Path) -> None:
    """Of the 32 models that are allowed by number, those of a large rank do not fit. Rank 1 is 4 KiB here, and 16 in training."""

    async def ask(served: Before) -> list[int]:
        statuses = []
        for name, rank in (("alice", 32), ("alice", 512), ("bob", 64), ("bob", 32), ("bob", 33)):
            web = served.client(TENANTS[name])
            session = (await web.post("/api/v1/create_session", json={})).json()["session_id"]
            asked = {"session_id": session, "model_seq_id": 0, "base_model": TINY_CHAT, "lora_config": {"rank": rank}}
            statuses.append((await web.post("/api/v1/create_model", json=asked)).status_code)
        return statuses

    bounds: dict[str, Any] = {"max_adapters_mib": 2, "max_tenant_adapters_mib": 1}
    assert before(tmp_path, ask, TENANTS, **bounds) == [200, 400, 200, 403, 403]


async def create(web: httpx.AsyncClient, rank: int, **more: Any) -> httpx.Response:
    """A model in a session of its own. Rank 1 takes 16 KiB in training."""
    session = (await web.post("/api/v1/create_session", json={})).json()["session_id"]
    asked = {"session_id": session, "model_seq_id": 0, "base_model": TINY_CHAT, "lora_config": {"rank": rank}}
    asked |= more
    reply = await web.post("/api/v1/create_model", json=asked)
    await asyncio.sleep(0)
    return reply


def test_adapters_of_others_leave_half_and_where_they_do_not_one_may_ask_again(tmp_path: Path) -> None:
    async def ask(served: Before) -> list[tuple[int, str | None]]:
        alice, bob = (served.client(TENANTS[name]) for name in ("alice", "bob"))
        asked = ((alice, 65), (alice, 33), (alice, 64), (bob, 64), (bob, 129))
        replies = [await create(web, rank) for web, rank in asked]
        return [(reply.status_code, reply.headers.get("Retry-After")) for reply in replies]

    never, refused, full, made = (400, None), (403, None), (429, "10"), (200, None)
    assert before(tmp_path, ask, TENANTS, max_adapters_mib=2) == [never, made, refused, made, never]
    found = before(tmp_path, ask, TENANTS, max_adapters_mib=2, max_tenant_adapters_mib=2)
    assert found == [made, made, refused, full, never]
    one = {"alice": TENANTS["alice"]}
    assert before(tmp_path, lambda served: create(served.client(one["alice"]), 128), one, max_adapters_mib=2).is_success


def test_snapshots_make_room_for_those_of_the_same_tenant_alone(tmp_path: Path) -> None:
    """Alice has 512 KiB for snapshots of 64, over two sessions; the model of bob takes all that is his."""

    async def ask(served: Before) -> list[str]:
        alice, bob = (served.client(TENANTS[name]) for name in ("alice", "bob"))
        first, second = [(await create(alice, 16)).json()["model_id"] for _ in range(2)]
        bobs = (await create(bob, 64)).json()["model_id"]

        async def snapshot(web: httpx.AsyncClient, model: str, number: int) -> str:
            asked = {"model_id": model, "seq_id": 1 + number, "sampling_session_seq_id": number}
            reply = await web.post("/api/v1/save_weights_for_sampler", json=asked)
            assert reply.status_code == 200, reply.text
            return f"{model.partition(':')[0]}:sample:{number}"

        made = [await snapshot(alice, model, number) for number in range(5) for model in (first, second)]
        await snapshot(bob, bobs, 0)
        assert (
            served.link.frames[-1].fields["op"] == "refuse" and "your limit is" in served.link.frames[-1].fields["why"]
        )
        tenants = [served.access.tenant(TENANTS[name]) for name in ("alice", "bob")]
        assert [served.service.adapters.room(tenant) for tenant in tenants if tenant] == [0, 0]
        return [str((await asample(alice, sampler, 0)).status_code) for sampler in made]

    assert before(tmp_path, ask, TENANTS, max_adapters_mib=2) == ["404"] * 2 + ["200"] * 8


def test_access_without_keys_is_one_operator(tmp_path: Path) -> None:
    everybody = Access({}, tmp_path).tenant(None)
    assert everybody is not None and everybody.terms.operator and Access({}, tmp_path).knows(everybody)
