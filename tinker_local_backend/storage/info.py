"""checkpoint.json: the fixed description of a checkpoint, written once. State that changes later is in catalog.py."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tinker_local_backend.engine.model.lora_spec import LoraSpec
from tinker_local_backend.errors import CheckpointError, RequestError
from tinker_local_backend.storage.paths import CheckpointPath

INFO_FILE = "checkpoint.json"
ADAPTER_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"

LONGEST_TTL = 1000 * 365 * 24 * 3600
"""Later times cannot be converted to a date, and such a checkpoint would break every listing."""


@dataclass(frozen=True)
class CheckpointInfo:
    """Enough to make a client from the checkpoint alone. Times in seconds since the epoch."""

    base_model: str
    spec: LoraSpec
    created: float
    expires_at: float | None
    user_metadata: dict[str, str]
    optimizer_steps: int | None
    sha256: dict[str, str] = field(default_factory=dict)
    """checksum of each tensor file, to detect damage on loading"""

    def to_json(self) -> dict[str, object]:
        return {**vars(self), "spec": vars(self.spec)}

    @classmethod
    def from_json(cls, value: dict) -> CheckpointInfo:
        """Raises ValueError, TypeError or KeyError for anything that `to_json` does not write."""
        info = cls(**{**value, "spec": LoraSpec(**value["spec"])})
        if not (isinstance(info.base_model, str) and isinstance(info.created, int | float)):
            raise ValueError("base_model must be a string and created a number")
        if not 0 <= info.created < LONGEST_TTL:
            raise ValueError(f"created must be in seconds since the epoch, not {info.created!r}")
        if not isinstance(info.expires_at, int | float | None):
            raise ValueError(f"expires_at must be a number or null, not {info.expires_at!r}")
        check_user_metadata(info.user_metadata)
        return info


def check_user_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    """A copy. Raises RequestError unless it maps strings to strings."""
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        raise RequestError(f"user_metadata must map strings to strings, got {metadata!r}")
    for key, value in metadata.items():
        if not (isinstance(key, str) and isinstance(value, str)):
            raise RequestError(f"user_metadata must map strings to strings, got {key!r}: {value!r}")
    return dict(metadata)


def expiry(ttl_seconds: float | None, now: float) -> float | None:
    """The expiry of a checkpoint saved now. Raises RequestError unless the ttl is None or positive and at most LONGEST_TTL."""
    if ttl_seconds is None:
        return None
    if isinstance(ttl_seconds, bool) or not isinstance(ttl_seconds, int | float) or not 0 < ttl_seconds <= LONGEST_TTL:
        raise RequestError(
            f"ttl_seconds must be positive and at most {LONGEST_TTL} (1,000 years), or None, got {ttl_seconds}"
        )
    return now + ttl_seconds


def info_in(folder: Path, path: CheckpointPath) -> CheckpointInfo:
    """The description in a checkpoint's folder, expired or not. Raises CheckpointError if it is missing or damaged."""
    try:
        return CheckpointInfo.from_json(read_object(folder / INFO_FILE))
    except (FileNotFoundError, NotADirectoryError):
        raise missing(folder, path) from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"checkpoint {path}: {INFO_FILE} is damaged ({error})") from error


def missing(folder: Path, path: CheckpointPath) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {path} does not exist under {folder.parents[3]} (set TINKER_LOCAL_HOME?)",
        remote=f"checkpoint {path} does not exist; list_user_checkpoints lists the existing ones",
    )


def read_object(file: Path) -> dict:
    """A JSON object. Raises OSError, or ValueError for a symbolic link or anything else."""
    if file.is_symlink():
        raise ValueError(f"{file.name} is a symbolic link")
    value = json.loads(file.read_text())
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, got {type(value).__name__}")
    return value
