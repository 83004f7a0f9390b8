"""uvicorn's HTTP parser with a limit on headers, which a client can send without a key."""

from __future__ import annotations

from typing import Any

MAX_HEADER_BYTES = 64 << 10
"""Limit on the request line and all headers together."""

_WHY = b"the headers are longer than 65536 bytes\n"
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-type: text/plain; charset=utf-8\r\n"
    + b"content-length: %d\r\n\r\n%b" % (len(_WHY), _WHY)
)


def http_protocol() -> Any:
    """The value for `uvicorn.Config(http=...)`. Without httptools uvicorn uses h11, which has the same limit and answers 400."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        return "auto"

    class BoundedHeaders(HttpToolsProtocol):
        """Answers 431 to headers that are too long, before it stores them."""

        _reading = False
        """within headers"""
        _size = 0
        """bytes of the current request's complete headers"""
        _unfinished = 0
        """bytes received since its headers began; 0 after their end"""

        def data_received(self, data: bytes) -> None:
            for start in range(0, len(data), MAX_HEADER_BYTES):
                if self.parser is None or self.transport.is_closing():
                    return
                piece, was_reading = data[start : start + MAX_HEADER_BYTES], self._reading
                super().data_received(piece)
                # Only the parser knows about an incomplete header, so count received bytes.
                pending = len(piece) if was_reading and self._reading else 0
                self._unfinished = self._unfinished + pending if self._reading else 0
                if max(self._size, self._unfinished) > MAX_HEADER_BYTES and not self.transport.is_closing():
                    self.transport.write(_TOO_LARGE)
                    self.transport.close()

        @property
        def _is_too_large(self) -> bool:
            return self._size > MAX_HEADER_BYTES

        def on_message_begin(self) -> None:
            self._reading, self._size = True, 0
            super().on_message_begin()

        def on_url(self, url: bytes) -> None:
            self._size += len(url)
            super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            self._size += len(name) + len(value) + 4
            if self._reading and not self._is_too_large:  # drop trailers
                super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self._reading = False
            if not self._is_too_large:
                super().on_headers_complete()
                self._size = 0

        def on_body(self, body: bytes) -> None:
            if not self._is_too_large:
                super().on_body(body)

        def on_message_complete(self) -> None:
            if not self._is_too_large:
                super().on_message_complete()

    return BoundedHeaders
