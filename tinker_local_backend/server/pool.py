"""Work that would hold the event loop: a few threads, and a line of each tenant's own that is served in turns and has an end."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tinker_local_backend.server.access import Tenant
from tinker_local_backend.server.sessions import Refused

T = TypeVar("T")


class Pool:
    """Belongs to one event loop.

    Args:
        what: is done here, for refusals.
        threads: how many of it at a time.
        waiting: how many of a tenant's may wait beyond.
    """

    def __init__(self, what: str, threads: int, waiting: int):
        self._what, self._most_waiting = what, waiting
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=what)
        self._free = threads
        self._lines: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """by tenant, the one whose turn it is first"""

    async def run(self, tenant: Tenant, call: Callable[[], T]) -> T:
        """What `call` returns, when its turn has come. Raises Refused (429) while the tenant's line is full."""
        if self._free:
            self._free -= 1
        else:
            await self._wait(tenant)
        running = asyncio.get_running_loop().run_in_executor(self._executor, call)
        # A caller that goes away leaves its thread at work.
        running.add_done_callback(lambda _: self._let_next())
        return await asyncio.shield(running)

    async def _wait(self, tenant: Tenant) -> None:
        line = self._lines.setdefault(tenant.name, deque())
        if len(line) >= self._most_waiting:
            raise Refused(
                429, f"{len(line)} of your requests wait for {self._what}; send this one again when some are done"
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it had its turn in the same moment
                self._let_next()
            elif turn in line:
                line.remove(turn)
            raise

    def _let_next(self) -> None:
        while self._lines:
            name, line = self._lines.popitem(last=False)
            turn = line.popleft() if line else None
            if line:
                self._lines[name] = line  # behind all others
            if turn is not None and not turn.done():
                turn.set_result(None)
                return
        self._free += 1
