"""Threads for work that would block the event loop, with a bounded queue per tenant; tenants take turns."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tinker_local_backend.server.access import Tenant
from tinker_local_backend.server.errors import Refused

T = TypeVar("T")


class Pool:
    """Belongs to one event loop.

    Args:
        what: name of the work, for error messages and threads.
        threads: number of threads.
        waiting: queue limit per tenant.
    """

    def __init__(self, what: str, threads: int, waiting: int):
        self._what, self._max_waiting = what, waiting
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=what)
        self._free = threads
        self._queues: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """by tenant; the first tenant is next"""

    async def run(self, tenant: Tenant, call: Callable[[], T]) -> T:
        """Run `call` when a thread is free. Raises Refused (429) while the tenant's queue is full."""
        if self._free:
            self._free -= 1
        else:
            await self._wait(tenant)
        running = asyncio.get_running_loop().run_in_executor(self._executor, call)
        # If the caller is cancelled, its thread runs on.
        running.add_done_callback(lambda _: self._let_next())
        return await asyncio.shield(running)

    async def _wait(self, tenant: Tenant) -> None:
        queue = self._queues.setdefault(tenant.name, deque())
        if len(queue) >= self._max_waiting:
            why = f"{len(queue)} of your requests wait for {self._what}; send this one again when some are done"
            raise Refused(429, why)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # its turn came at the same moment
                self._let_next()
            elif turn in queue:
                queue.remove(turn)
            raise

    def _let_next(self) -> None:
        while self._queues:
            name, queue = self._queues.popitem(last=False)
            turn = queue.popleft() if queue else None
            if queue:
                self._queues[name] = queue  # round robin
            if turn is not None and not turn.done():
                turn.set_result(None)
                return
        self._free += 1
