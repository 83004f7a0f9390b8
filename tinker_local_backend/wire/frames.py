"""Frames between two processes: a JSON object and bytes, sent over a Channel or an event loop's stream."""

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
"""Read size. One system call reads several small frames: each call releases the GIL, and the reader must then wait for computing
threads to get it back."""


@dataclass(frozen=True)
class Frame:
    """`fields` are small and already checked by the sender; `body` is a protobuf message or empty."""

    fields: dict[str, Any] = field(default_factory=dict[str, Any])
    body: bytes = b""

    def encode(self) -> list[bytes]:
        """Pieces to write in order; not joined, because the last may be large."""
        text = json.dumps(self.fields).encode()
        return [_SIZES.pack(len(text), len(self.body)), text, self.body]


def receive(stream: BinaryIO) -> Frame | None:
    """The next frame of a socket's stream; None if the other side has closed."""
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
    """Frames over a socket, in order. Sending never waits for the other side.

    The sending thread writes a frame itself if the kernel accepts it at once: waking another thread takes longer than writing,
    and both would contend for the GIL. A background thread writes the rest.

    Args:
        name: name of that thread.
    """

    def __init__(self, sock: socket.socket, name: str):
        self._socket, self._process = sock, os.getpid()
        self._incoming = cast(BinaryIO, sock.makefile("rb", BUFFER_BYTES))
        self._writing = threading.Lock()
        self._unsent: deque[Callable[[], bytes | memoryview]] = deque()
        """frames for the background thread; the first stays here until it is written"""
        self._more: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """True per unsent frame; False: the end"""
        threading.Thread(target=self._write_unsent, name=name, daemon=True).start()

    def send(self, make: Callable[[], Frame]) -> None:
        """Send a frame; also callable from a finalizer, which may interrupt another call.
        Drops it if the other side has closed, or in a forked child, whose copy of the socket is its parent's connection."""
        if os.getpid() != self._process:
            return
        if not self._unsent and self._writing.acquire(blocking=False):
            try:
                if not self._unsent:
                    rest = self._begin(b"".join(make().encode()))
                    if rest:
                        self._unsent.appendleft(lambda: rest)
                        self._more.put(True)
                    return
            finally:
                self._writing.release()
        self._unsent.append(lambda: b"".join(make().encode()))
        self._more.put(True)

    def _begin(self, data: bytes) -> memoryview:
        """Write as much as the kernel accepts at once. Returns the rest."""
        rest = memoryview(data)
        try:
            return rest[self._socket.send(data, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            return rest
        except OSError:  # the other side has closed, which also ends `receive`
            return rest[:0]

    def _write_unsent(self) -> None:
        with self._socket, suppress(OSError):
            while self._more.get():
                with self._writing:
                    self._socket.sendall(self._unsent[0]())
                    self._unsent.popleft()

    def receive(self) -> Frame | None:
        """Block until the next frame; None if either side has closed. Call it on one thread only."""
        with suppress(OSError):
            return receive(self._incoming)
        return None

    def close(self) -> None:
        """Drop unsent frames, and let `receive` return None on both sides."""
        if os.getpid() != self._process:
            return
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._more.put(False)
