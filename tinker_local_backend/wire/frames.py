"""What two processes say to each other: frames of a JSON object and some bytes, over a Channel or to an event loop."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, BinaryIO, cast

_SIZES = struct.Struct(">IQ")

BUFFER_BYTES = 1 << 16
"""Read at a time: small frames come several together, and each call of the kernel lets go of the interpreter, for which the
threads that compute would then have to wait."""


@dataclass(frozen=True)
class Frame:
    """`fields` are small and checked by whoever sent them; `body` is a protobuf message or empty."""

    fields: dict[str, Any] = field(default_factory=dict)
    body: bytes = b""

    def encode(self) -> list[bytes]:
        """In pieces, because the last may be large."""
        text = json.dumps(self.fields).encode()
        return [_SIZES.pack(len(text), len(self.body)), text, self.body]


def receive(stream: BinaryIO) -> Frame | None:
    """The next frame of a socket's stream; None when the other side has closed."""
    sizes = stream.read(_SIZES.size)
    if len(sizes) < _SIZES.size:
        return None
    text_size, body_size = _SIZES.unpack(sizes)
    text, body = stream.read(text_size), stream.read(body_size)
    return Frame(json.loads(text), body) if len(text) + len(body) == text_size + body_size else None


async def receive_async(reader: asyncio.StreamReader) -> Frame | None:
    """As `receive`, on an event loop."""
    try:
        text_size, body_size = _SIZES.unpack(await reader.readexactly(_SIZES.size))
        text = await reader.readexactly(text_size)
        return Frame(json.loads(text), await reader.readexactly(body_size))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


class Channel:
    """Frames over a socket, in the order in which they are sent. Whoever sends never waits for the other side.

    A frame that the kernel takes at once is written by the thread that sends it: to wake another one takes longer than to
    write, and both would wait for the interpreter. What the kernel does not take is left to a thread.

    Args:
        name: of that thread.
    """

    def __init__(self, sock: socket.socket, name: str):
        self._socket, self._process = sock, os.getpid()
        self._incoming = cast(BinaryIO, sock.makefile("rb", BUFFER_BYTES))
        self._writing = threading.Lock()
        self._left: deque[Callable[[], bytes | memoryview]] = deque()
        """what the thread writes; the first stays here until it is written"""
        self._more: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """True for everything that was put there; False: the end"""
        threading.Thread(target=self._write_left, name=name, daemon=True).start()

    def send(self, make: Callable[[], Frame]) -> None:
        """Also from a finalizer, which may interrupt another call. A frame that the other side no longer reads is dropped.

        So are those of a forked child, whose copy of the socket is its parent's connection.
        """
        if os.getpid() != self._process:
            return
        if not self._left and self._writing.acquire(blocking=False):
            try:
                if not self._left:
                    rest = self._begin(b"".join(make().encode()))
                    if rest:
                        self._left.appendleft(lambda: rest)
                        self._more.put(True)
                    return
            finally:
                self._writing.release()
        self._left.append(lambda: b"".join(make().encode()))
        self._more.put(True)

    def _begin(self, data: bytes) -> memoryview:
        """Write as much as the kernel takes at once. Returns the rest."""
        rest = memoryview(data)
        try:
            return rest[self._socket.send(data, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            return rest
        except OSError:  # nobody is there any more; the reading side ends too
            return rest[:0]

    def _write_left(self) -> None:
        with self._socket, suppress(OSError):
            while self._more.get():
                with self._writing:
                    self._socket.sendall(self._left[0]())
                    self._left.popleft()

    def receive(self) -> Frame | None:
        """Block until the next frame; None when either side has closed. On one thread."""
        with suppress(OSError):
            return receive(self._incoming)
        return None

    def close(self) -> None:
        """Drop what is not yet written, and let `receive` return None on both sides."""
        if os.getpid() != self._process:
            return
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._more.put(False)
