"""The response that streams a TarStream at the client's speed and stops when the client disconnects."""

from __future__ import annotations

import asyncio
import logging

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tinker_local_backend.storage.tar_stream import TarStream

logger = logging.getLogger(__name__)


class ArchiveResponse(Response):
    """Sends the archive and closes it, also if the client disconnects. If a file fails midway, fewer bytes than the
    Content-Length are sent, so a client never mistakes a part for the whole."""

    media_type = "application/x-tar"

    def __init__(self, archive: TarStream, filename: str):
        super().__init__(
            headers={
                "Content-Length": str(archive.size),
                "Content-Disposition": f'attachment; filename="{filename}"',
            },
        )
        self._archive = archive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        disconnect = asyncio.create_task(_disconnected(receive))
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            chunks = self._archive.chunks()
            while chunk := await asyncio.to_thread(next, chunks, b""):
                if disconnect.done():
                    logger.debug("a client disconnected before its archive was complete")
                    return
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            disconnect.cancel()
            self._archive.close()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
