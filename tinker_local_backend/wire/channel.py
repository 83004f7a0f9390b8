"""One end of a connection between two processes, for threads."""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import BinaryIO, cast

from tinker_local_backend.wire import frames
from tinker_local_backend.wire.frames import Frame

BUFFER_BYTES = 1 << 16
"""Read at a time: small frames come several together, and each call of the kernel lets go of the interpreter, for which the
threads that compute would then have to wait."""


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
                    rest = self._begin(frames.encoded(make()))
                    if rest:
                        self._left.appendleft(lambda: rest)
                        self._more.put(True)
                    return
            finally:
                self._writing.release()
        self._left.append(lambda: frames.encoded(make()))
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
            return frames.receive(self._incoming)
        return None

    def close(self) -> None:
        """Drop what is not yet written, and let `receive` return None on both sides."""
        if os.getpid() != self._process:
            return
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._more.put(False)
