"""Pictures in sequences of tokens: each takes a range of ids beyond every vocabulary, which its content determines.

So whatever compares tokens (shared prefixes of a pass, the prefix cache, requests for one prompt) compares pictures too, and
two pictures are the same exactly where their bytes are.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tinker_local_backend.errors import RequestError

FIRST_ID = 1 << 62
"""Ids from here on are of pictures. They fit into int64."""
_OFFSET_BITS = 16
MAX_POSITIONS = 1 << _OFFSET_BITS
"""Positions that one picture may have."""
_CONTENTS = FIRST_ID >> _OFFSET_BITS
REMEMBERED = 1 << 20
"""Pictures whose numbers are remembered, about 200 MB: those used last, far more than any cache holds."""


@dataclass(frozen=True)
class Features:
    """What the vision tower makes of a picture of N positions."""

    embeddings_NH: torch.Tensor
    deeper_LNH: torch.Tensor | None = None
    """added to the hidden states after each of the first L layers"""

    @property
    def nbytes(self) -> int:
        """Their memory."""
        return self.embeddings_NH.nbytes + (0 if self.deeper_LNH is None else self.deeper_LNH.nbytes)


@dataclass(eq=False)
class Picture:
    """A picture as a model sees it."""

    content: int
    """determined by its bytes"""
    positions: int
    """the tokens that it takes"""
    digest: bytes
    grid: tuple[int, int, int] | None = None
    """patches in time, height and width, if the model gives patches positions of three axes"""
    data: bytes = b""
    """its file"""
    features: Features | None = None
    """while they are kept; they can be made again from the file"""

    def __getstate__(self) -> dict[str, Any]:
        """For another process, which makes its tensors itself."""
        return {**self.__dict__, "features": None}

    @property
    def ids(self) -> range:
        """Its token ids."""
        first = FIRST_ID + (self.content << _OFFSET_BITS)
        return range(first, first + self.positions)


@dataclass(frozen=True, eq=False)
class SequencePictures:
    """The pictures of one sequence, which keeps them alive, and its positions if they are not 0, 1, 2, ..."""

    pictures: tuple[Picture, ...]
    ends: tuple[int, ...]
    """the index behind the last token of each"""
    positions_3N: npt.NDArray[np.int64] | None = None
    """in time, height and width"""
    shift: int = 0
    """the position of a token behind the sequence is its index plus this"""

    def within(self, start: int, end: int) -> Iterator[Picture]:
        """Those with a token at one of these indices."""
        for picture, last in zip(self.pictures, self.ends, strict=True):
            if last > start and last - picture.positions < end:
                yield picture

    def positions(self, start: int) -> npt.NDArray[np.int64] | None:
        """Of the tokens from this one on, (3, n); None: their indices."""
        return None if self.positions_3N is None else self.positions_3N[:, start:]


@dataclass(frozen=True, eq=False)
class PassPictures:
    """Where the tokens of pictures stand in a pass."""

    rows: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int64]

    @classmethod
    def of(cls, tokens: npt.NDArray[np.int64]) -> PassPictures | None:
        """None if these tokens are all text."""
        rows = np.flatnonzero(tokens >= FIRST_ID)
        return cls(rows, tokens[rows]) if len(rows) else None

    @cached_property
    def contents(self) -> npt.NDArray[np.int64]:
        """The picture of each row."""
        return (self.ids - FIRST_ID) >> _OFFSET_BITS

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        """The index of each row in its picture."""
        return self.ids & (MAX_POSITIONS - 1)

    @cached_property
    def blocks(self) -> list[tuple[int, int]]:
        """Rows start:end of each picture, or of each part that stands by itself."""
        ends = np.flatnonzero((np.diff(self.ids) != 1) | (np.diff(self.rows) != 1))
        starts = np.concatenate([[0], ends + 1])
        return [
            (int(self.rows[a]), int(self.rows[b]) + 1) for a, b in zip(starts, [*ends, len(self.rows) - 1], strict=True)
        ]


class ContentNumbers:
    """The numbers that stand for pictures in ids. May be used on any thread.

    A number is the beginning of the picture's digest, so that runs and processes agree; where another picture has that number,
    the next free one. So nobody can make a picture that is taken for another's, which 46 bits of a digest would allow.
    """

    def __init__(self) -> None:
        self._digests: OrderedDict[int, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, data: bytes) -> tuple[int, bytes]:
        """The number of a picture with this file, and the file's SHA-256."""
        digest = hashlib.sha256(data).digest()
        number = int.from_bytes(digest[:8]) % _CONTENTS
        with self._lock:
            while self._digests.setdefault(number, digest) != digest:
                number = (number + 1) % _CONTENTS
            self._used(number)
        return number, digest

    def take_over(self, number: int, digest: bytes) -> None:
        """Remember a number that another process gave. Raises RequestError if another picture has it here."""
        with self._lock:
            if self._digests.setdefault(number, digest) != digest:
                raise RequestError("two processes gave one number to two pictures; change a pixel of one of them")
            self._used(number)

    def _used(self, number: int) -> None:
        self._digests.move_to_end(number)
        if len(self._digests) > REMEMBERED:
            self._digests.popitem(last=False)


def content_and_offset(token: int) -> tuple[int, int]:
    """The content of the picture that a token id belongs to, and the token's index in it."""
    return (token - FIRST_ID) >> _OFFSET_BITS, token & (MAX_POSITIONS - 1)


def is_picture(token: int) -> bool:
    return token >= FIRST_ID


def uncut_end(tokens: Sequence[int], start: int, end: int) -> int:
    """`end`, moved out of the picture that it cuts: before it, or behind it where nothing after `start` would be left."""
    if not 0 < end < len(tokens) or not is_picture(tokens[end]) or tokens[end] != tokens[end - 1] + 1:
        return end
    before = end - content_and_offset(tokens[end])[1]
    if before > start:
        return before
    while end < len(tokens) and tokens[end] == tokens[end - 1] + 1:
        end += 1
    return end
