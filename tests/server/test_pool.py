"""The threads that work for tenants in turns."""

import asyncio
import threading
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra `server` is not installed")

from tinker_local_backend.server.access import Tenant
from tinker_local_backend.server.errors import Refused
from tinker_local_backend.server.pool import Pool


def test_a_pool_takes_turns_between_tenants_and_its_lines_end() -> None:
    alice, bob = Tenant("alice", Path()), Tenant("bob", Path())

    async def main() -> list[str]:
        pool, order, gate = Pool("work", threads=1, waiting=3), list[str](), threading.Event()
        first = asyncio.create_task(pool.run(alice, gate.wait))
        await asyncio.sleep(0)
        tasks = [asyncio.create_task(pool.run(alice, lambda n=n: order.append(f"alice {n}"))) for n in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(Refused) as refused:
            await pool.run(alice, lambda: None)
        assert refused.value.status == 429
        tasks.append(asyncio.create_task(pool.run(bob, lambda: order.append("bob"))))
        await asyncio.sleep(0)
        tasks.pop(1).cancel()
        gate.set()
        await asyncio.gather(first, *tasks)
        await pool.run(bob, lambda: order.append("free again"))
        return order

    assert asyncio.run(main()) == ["alice 0", "bob", "alice 2", "free again"]
