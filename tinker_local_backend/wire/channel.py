"""One end of a connection between two processes, for threads."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import BinaryIO, cast

from tinker_local_backend.wire import frames
from tinker_local_backend.wire.frames import Frame

BUFFER_BYTES = 1 << 16
"""Read at a time: small frames come several together, and each call of the kernel lets go of the interpreter, for which the
threads that compute would then have to wait."""

_Outgoing = queue.SimpleQueue[Callable[[], Frame] | None]


class Channel:
    """Frames over a socket. Whoever sends never waits: a thread makes the frames and writes them, in their order.

    Args:
        name: of that thread.
    """

    def __init__(self, sock: socket.socket, name: str):
        self._socket = sock
        self._incoming = cast(BinaryIO, sock.makefile("rb", BUFFER_BYTES))
        self._outgoing: _Outgoing = queue.SimpleQueue()
        threading.Thread(target=_write, args=(sock, self._outgoing), name=name, daemon=True).start()

    def send(self, make: Callable[[], Frame]) -> None:
        """Also from a finalizer. A frame that the other side no longer reads is dropped."""
        self._outgoing.put(make)

    def receive(self) -> Frame | None:
        """Block until the next frame; None when either side has closed. On one thread."""
        with suppress(OSError):
            return frames.receive(self._incoming)
        return None

    def close(self) -> None:
        """Drop what is not yet written, and let `receive` return None on both sides."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._outgoing.put(None)


def _write(sock: socket.socket, outgoing: _Outgoing) -> None:
    with sock, suppress(OSError):  # nobody is there any more; the reading side ends too
        while (make := outgoing.get()) is not None:
            frames.send(sock, make())
