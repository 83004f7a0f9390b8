"""A line of `checkpoints.jsonl`: where a loop was, and the paths of the weights that it saved."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tinker_cookbook.exceptions import CheckpointError, DataFormatError
from tinker_cookbook.utils.files import parse_jsonl


@dataclass(frozen=True)
class CheckpointRecord:
    """One line of `checkpoints.jsonl`.

    Raises:
        CheckpointError: a field has the wrong type, or `extra` contains the name of a field.
    """

    name: str
    batch: int | None = None
    """The next batch to run; None in records of older or other programs, from which a loop here cannot resume."""
    epoch: int | None = None
    state_path: str | None = None
    """Weights and optimizer state, to resume training from."""
    sampler_path: str | None = None
    """Weights to sample from."""
    final: bool = False
    """The run was complete when this was saved."""
    extra: dict[str, Any] = field(default_factory=dict[str, Any])
    """Other state for a resume, for example random states or the path of the reference policy."""

    def __post_init__(self) -> None:
        for key, types, expected in (
            ("name", str, "a string"),
            ("batch", int | None, "an integer or null"),
            ("epoch", int | None, "an integer or null"),
            ("state_path", str | None, "a string or null"),
            ("sampler_path", str | None, "a string or null"),
            ("final", bool, "true or false"),
            ("extra", dict, "an object"),
        ):
            value = getattr(self, key)
            if not isinstance(value, types) or (isinstance(value, bool) and types is not bool):
                raise CheckpointError(f"checkpoint {self.name!r}: {key} must be {expected}, got {value!r}")
        if self.batch is not None and self.batch < 0:
            raise CheckpointError(f"checkpoint {self.name!r}: batch must not be negative, got {self.batch}")
        if clash := _FIELDS & self.extra.keys():
            raise CheckpointError(f"checkpoint {self.name!r}: extra must not contain {sorted(clash)}; use the fields")

    def has(self, key: str) -> bool:
        """Whether a field or an extra entry of this name is present and not None."""
        return self.get(key) is not None

    def get(self, key: str, default: Any = None) -> Any:
        """The field or the extra entry of this name."""
        value = getattr(self, key) if key in _FIELDS else self.extra.get(key)
        return default if value is None else value

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of the line: `extra` is flattened into it; None and False are omitted."""
        line: dict[str, Any] = {"name": self.name}
        for key in ("batch", "epoch", "final", "state_path", "sampler_path"):
            value = getattr(self, key)
            if value is not None and value is not False:
                line[key] = value
        return {**line, **self.extra}

    @classmethod
    def from_dict(cls, line: Mapping[str, Any]) -> Self:
        """Parse a line's object; unknown keys go to `extra`.

        Raises:
            CheckpointError: `name` is missing, or a field has the wrong type.
        """
        if "name" not in line:
            raise CheckpointError(f"checkpoint line without 'name': {dict(line)!r}")
        known = {key: value for key, value in line.items() if key in _FIELDS and value is not None}
        return cls(**known, extra={key: value for key, value in line.items() if key not in _FIELDS})


_FIELDS = {"name", "batch", "epoch", "state_path", "sampler_path", "final"}


def parse_checkpoints(content: bytes, path: str | Path) -> list[CheckpointRecord]:
    """The checkpoints in the content of a file, oldest first. The torn line of a killed writer is ignored.

    Raises:
        DataFormatError: a line is not JSON.
        CheckpointError: a line is not a checkpoint. The message begins with `path:line:` and names the fix.
    """
    records: list[CheckpointRecord] = []
    try:
        for line in parse_jsonl(content, path, tolerate_torn_tail=True):
            try:
                records.append(CheckpointRecord.from_dict(line.row))
            except CheckpointError as error:
                raise CheckpointError(f"{path}:{line.number}: {error}") from error
    except (DataFormatError, CheckpointError) as error:
        raise type(error)(
            f"{error}. Remove that line: the run then resumes from the newest checkpoint that is left, or start over with "
            "behavior_if_log_dir_exists=delete"
        ) from error
    return records
