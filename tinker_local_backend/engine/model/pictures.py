"""Pictures in sequences of tokens: each takes a range of ids beyond every vocabulary, which its content determines.

So whatever compares tokens (shared prefixes of a pass, the prefix cache, requests for one prompt) compares pictures too, and
two pictures are the same exactly where their bytes are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

FIRST_ID = 1 << 62
"""Ids from here on are of pictures. They fit into int64."""
_OFFSET_BITS = 16
MAX_POSITIONS = 1 << _OFFSET_BITS
"""Positions that one picture may have."""
_CONTENTS = FIRST_ID >> _OFFSET_BITS


@dataclass(frozen=True)
class Features:
    """What the vision tower makes of a picture of N positions."""

    embeddings_NH: torch.Tensor
    deeper_LNH: torch.Tensor | None = None
    """added to the hidden states after each of the first L layers"""

    def to(self, device: torch.device) -> Features:
        """On this device."""
        deeper = None if self.deeper_LNH is None else self.deeper_LNH.to(device)
        return Features(self.embeddings_NH.to(device), deeper)


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
    inputs: Mapping[str, torch.Tensor] | None = None
    """of the vision tower, until it has run"""
    features: Features | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For another process, whose device is another one: tensors go through the CPU."""
        return {**self.__dict__, "features": None if self.features is None else self.features.to(torch.device("cpu"))}

    @property
    def ids(self) -> range:
        """Its token ids."""
        first = FIRST_ID + (self.content << _OFFSET_BITS)
        return range(first, first + self.positions)


@dataclass(frozen=True, eq=False)
class SequencePictures:
    """The pictures of one sequence, which keeps them alive, and its positions if they are not 0, 1, 2, ..."""

    pictures: tuple[Picture, ...]
    positions_3N: npt.NDArray[np.int64] | None = None
    """in time, height and width"""
    shift: int = 0
    """the position of a token behind the sequence is its index plus this"""

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
    def blocks(self) -> list[tuple[int, int]]:
        """Rows start:end of each picture, or of each part that stands by itself."""
        ends = np.flatnonzero((np.diff(self.ids) != 1) | (np.diff(self.rows) != 1))
        starts = np.concatenate([[0], ends + 1])
        return [
            (int(self.rows[a]), int(self.rows[b]) + 1) for a, b in zip(starts, [*ends, len(self.rows) - 1], strict=True)
        ]


def content_of(data: bytes) -> tuple[int, bytes]:
    """The number that stands for these bytes in ids, and their SHA-256."""
    digest = hashlib.sha256(data).digest()
    return int.from_bytes(digest[:8]) % _CONTENTS, digest


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
