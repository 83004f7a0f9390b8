"""What the two processes of a server say to each other: frames of a JSON object and some bytes."""

from __future__ import annotations

import asyncio
import json
import struct
from dataclasses import dataclass, field
from typing import Any, BinaryIO

_SIZES = struct.Struct(">IQ")


@dataclass(frozen=True)
class Frame:
    """`fields` are small and checked by whoever sent them; `body` is a protobuf message or empty."""

    fields: dict[str, Any] = field(default_factory=dict)
    body: bytes = b""

    def encode(self) -> list[bytes]:
        text = json.dumps(self.fields).encode()
        return [_SIZES.pack(len(text), len(self.body)), text, self.body]


def encoded(frame: Frame) -> bytes:
    """The frame in one piece."""
    return b"".join(frame.encode())


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
