"""Recordings in messages, in the form that services accept. No renderer here has audio tokens."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from tinker_cookbook.exceptions import DataFormatError
from tinker_cookbook.renderers.types import AudioPart

_SUFFIXES = {"wav": "wav", "wave": "wav", "x-wav": "wav", "mp3": "mp3", "mpeg": "mp3", "flac": "flac", "x-flac": "flac"}
"""End of a file's name or of a MIME type -> format."""


def audio_part_to_input_audio(part: AudioPart) -> dict[str, Any]:
    """The `input_audio` of a part: `data` in base64, `format`, and `num_frames` and `sample_rate` if the part has them.

    Args:
        part: its `audio` is encoded bytes, a path, a file:// address or a data URI; wav needs no num_frames and sample_rate.

    Raises:
        DataFormatError: it is none of these, its format is unknown, or its numbers are missing or not positive.
    """
    data, detected = _read(part["audio"])
    declared = part.get("format")
    if declared and detected and declared != detected:
        raise DataFormatError(f"format={declared!r} disagrees with the recording, which is {detected}")
    audio_format = declared or detected or ("wav" if isinstance(part["audio"], bytes) else None)
    if audio_format not in _SUFFIXES.values():
        raise DataFormatError(
            f"format={audio_format!r}: must be wav, mp3 or flac; set `format` if the name does not show it"
        )
    numbers = {key: number for key in ("num_frames", "sample_rate") if (number := part.get(key)) is not None}
    if len(numbers) == 1 or (audio_format != "wav" and not numbers):
        raise DataFormatError(f"a part of format {audio_format} must provide num_frames and sample_rate together")
    if any(number <= 0 for number in numbers.values()):
        raise DataFormatError(f"num_frames and sample_rate must be positive, got {numbers}")
    return {"data": base64.b64encode(data).decode(), "format": audio_format, **numbers}


def _read(source: object) -> tuple[bytes, str | None]:
    """The bytes of a recording, and its format if the name has one."""
    if isinstance(source, bytes):
        return source, None
    if not isinstance(source, str):
        raise DataFormatError(f"audio must be bytes or a text, got {type(source).__name__}")
    if source.startswith("data:"):
        head, comma, payload = source.removeprefix("data:").partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise DataFormatError("audio: a data URI must be data:audio/FORMAT;base64,DATA")
        try:
            return base64.b64decode(payload, validate=True), _SUFFIXES.get(_mime(head).rpartition("/")[2])
        except ValueError as error:
            raise DataFormatError(f"audio: the data URI holds no base64 ({error})") from error
    url = urlparse(source)
    if url.scheme not in ("", "file") or url.netloc not in ("", "localhost"):
        raise DataFormatError(
            f"audio={source!r}: this library does not fetch remote audio URLs; give bytes, a path or a data URI"
        )
    path = Path(unquote(url.path) if url.scheme else source).expanduser()
    return path.read_bytes(), _SUFFIXES.get(path.suffix.lower().removeprefix("."))


def _mime(head: str) -> str:
    return head.partition(";")[0].lower()
