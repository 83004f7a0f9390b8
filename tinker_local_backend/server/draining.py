"""The end of a server: nothing new is taken, what was accepted ends, and its results are fetched, each for a bounded time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from tinker_local_backend.server.service import Service

logger = logging.getLogger(__name__)


async def drain(service: Service) -> None:
    """Let what was accepted end and fail the rest; then wait for clients that are alive to fetch what they have not.

    The first takes at most `shutdown_seconds`, the second `fetch_seconds`; neither goes on once `service.hurry` is set.
    """
    config = service.config
    service.closing = True
    waiting = service.requests.waiting()
    if waiting:
        logger.info(
            "finishing %d requests, for at most %g s; stop again to fail them", len(waiting), config.shutdown_seconds
        )
        await _until([request.done for request in waiting], config.shutdown_seconds, service.hurry)
    for request in waiting:
        request.fail("the server was shut down before this request was carried out", "server")
    # A session whose client is gone fetches nothing any more; one without a client (seen: for ever) holds no result.
    now = time.monotonic()
    unfetched = [
        request
        for request in service.requests.unfetched()
        if service.is_live(request.session) and 0 <= now - request.session.seen <= config.silent_seconds
    ]
    if unfetched:
        logger.info(
            "keeping %d results for at most %g s until they are fetched; stop again to drop them",
            len(unfetched),
            config.fetch_seconds,
        )
        await _until([request.taken for request in unfetched], config.fetch_seconds, service.hurry)


async def _until(events: Sequence[asyncio.Event], seconds: float, hurry: asyncio.Event) -> None:
    """Return when all events are set, or `hurry` is, or after so many seconds."""

    async def all_set() -> None:
        for event in events:
            await event.wait()

    tasks = [asyncio.create_task(all_set()), asyncio.create_task(hurry.wait())]
    await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
