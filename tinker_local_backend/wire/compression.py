"""Bodies that come compressed."""

from __future__ import annotations

import io

import zstandard

from tinker_local_backend.errors import RequestError

_PIECE = 1 << 20


class TooLongError(RequestError):
    """There is more in it than may be taken out."""


def decompress(body: bytes, most: int) -> bytes:
    """What zstd has made smaller. At most `most` bytes are ever made.

    Raises TooLongError for more, and RequestError for what is not in zstd's format.
    """
    found = bytearray()
    try:
        with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(io.BytesIO(body)) as reader:
            while piece := reader.read(min(_PIECE, most + 1)):
                found += piece
                if len(found) > most:
                    raise TooLongError(f"the body is longer than {most} bytes when decompressed")
    except zstandard.ZstdError:
        raise RequestError("the body is not in zstd's format, as its content-encoding says") from None
    return bytes(found)
