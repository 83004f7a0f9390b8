"""The pictures of a run.

They are files `images/<sha256>.jpeg` in its folder, each once, however often it was shown. Records name a picture by this
path, relative to the run's folder, and never hold its bytes.
"""

import hashlib
from functools import lru_cache
from typing import NotRequired, TypedDict

FOLDER = "images"


class ShownImage(TypedDict):
    """A picture, or other media, in a prompt."""

    at: int
    """its first position, from 0"""
    tokens: int
    """how many positions it has"""
    file: str | None
    """relative to the run's folder; None: the prompt held no bytes, but an address"""
    width: NotRequired[int]
    height: NotRequired[int]
    """in pixels"""


@lru_cache(maxsize=1024)
def image_name(data: bytes, image_format: str) -> str:
    """Where a run keeps these bytes, relative to its folder."""
    return f"{FOLDER}/{hashlib.sha256(data).hexdigest()}.{image_format}"


def is_whole(name: str, data: bytes) -> bool:
    """Whether a file of this name has the bytes that it is named after."""
    return image_name(data, name.rpartition(".")[2]) == name
