"""What the two processes of a server say to each other: frames of a JSON object and some bytes."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from dataclasses import dataclass, field
from typing import Any

_SIZES = struct.Struct(">IQ")


@dataclass(frozen=True)
class Frame:
    """`fields` are small and checked by whoever sent them; `body` is a protobuf message or empty."""

    fields: dict[str, Any] = field(default_factory=dict)
    body: bytes = b""

    def encode(self) -> list[bytes]:
        text = json.dumps(self.fields).encode()
        return [_SIZES.pack(len(text), len(self.body)), text, self.body]


def send(sock: socket.socket, frame: Frame) -> None:
    """Blocks until the whole frame is with the kernel."""
    sock.sendall(b"".join(frame.encode()))


def receive(sock: socket.socket) -> Frame | None:
    """The next frame; None when the other side has closed."""
    sizes = _read(sock, _SIZES.size)
    if sizes is None:
        return None
    text_size, body_size = _SIZES.unpack(sizes)
    text, body = _read(sock, text_size), _read(sock, body_size)
    return None if text is None or body is None else Frame(json.loads(text), bytes(body))


def _read(sock: socket.socket, size: int) -> bytearray | None:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = sock.recv_into(view)
        if count == 0:
            return None
        view = view[count:]
    return data


async def receive_async(reader: asyncio.StreamReader) -> Frame | None:
    """As `receive`, on an event loop."""
    try:
        text_size, body_size = _SIZES.unpack(await reader.readexactly(_SIZES.size))
        text = await reader.readexactly(text_size)
        return Frame(json.loads(text), await reader.readexactly(body_size))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
