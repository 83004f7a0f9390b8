"""The list of a run's checkpoints, `checkpoints.jsonl`: one line per checkpoint, oldest first.

A line says where the loop was (`batch` is the next batch to run, so nothing is trained twice) and under which paths the
weights were saved. It is appended after the weights are safe. Saving and loading weights is left to the clients.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tinker_cookbook.exceptions import CheckpointError, ConfigurationError
from tinker_cookbook.utils.files import append_jsonl, iterate_jsonl

CHECKPOINTS_BASE_NAME = "checkpoints.jsonl"


@dataclass(frozen=True)
class CheckpointRecord:
    """One line of `checkpoints.jsonl`.

    Raises:
        CheckpointError: a field has the wrong type, or `extra` has the name of a field.
    """

    name: str
    batch: int
    """The next batch to run."""
    epoch: int | None = None
    state_path: str | None = None
    """Weights and optimizer state, to go on training from."""
    sampler_path: str | None = None
    """Weights to sample from."""
    final: bool = False
    """The run was complete when this was saved."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Whatever else the loop needs to go on, for example random states or the path of the reference policy."""

    def __post_init__(self) -> None:
        for key, types, expected in (
            ("name", str, "a string"),
            ("batch", int, "an integer"),
            ("epoch", int | None, "an integer or null"),
            ("state_path", str | None, "a string or null"),
            ("sampler_path", str | None, "a string or null"),
            ("final", bool, "true or false"),
            ("extra", dict, "an object"),
        ):
            value = getattr(self, key)
            if not isinstance(value, types) or (isinstance(value, bool) and types is not bool):
                raise CheckpointError(f"checkpoint {self.name!r}: {key} must be {expected}, got {value!r}")
        if self.batch < 0:
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
        """The JSON object of the line: `extra` is spread out; what is None or false is left out."""
        line: dict[str, Any] = {"name": self.name, "batch": self.batch}
        for key in ("epoch", "final", "state_path", "sampler_path"):
            value = getattr(self, key)
            if value is not None and value is not False:
                line[key] = value
        return {**line, **self.extra}

    @classmethod
    def from_dict(cls, line: Mapping[str, Any]) -> Self:
        """The record of a line; keys that are no fields go to `extra`.

        Raises:
            CheckpointError: `name` or `batch` is missing, or a field has the wrong type.
        """
        for key in ("name", "batch"):
            if key not in line:
                raise CheckpointError(f"checkpoint line without {key!r}: {dict(line)!r}")
        known = {key: value for key, value in line.items() if key in _FIELDS}
        return cls(**known, extra={key: value for key, value in line.items() if key not in _FIELDS})


_FIELDS = {"name", "batch", "epoch", "state_path", "sampler_path", "final"}


def load_checkpoints_file(log_dir: str | Path) -> list[CheckpointRecord]:
    """All checkpoints of a run, oldest first; none if there is no file. The torn line of a killed writer is ignored.

    Raises:
        DataFormatError: a line is not JSON.
        CheckpointError: a line is not a checkpoint. The message begins with `path:line:`.
    """
    path = Path(log_dir).expanduser() / CHECKPOINTS_BASE_NAME
    if not path.exists():
        return []
    records = []
    for line in iterate_jsonl(path, tolerate_torn_tail=True):
        try:
            records.append(CheckpointRecord.from_dict(line.row))
        except CheckpointError as error:
            raise CheckpointError(f"{path}:{line.number}: {error}") from error
    return records


def get_last_checkpoint(log_dir: str | Path, required_key: str = "state_path") -> CheckpointRecord | None:
    """The newest checkpoint that has `required_key`, or None. Whether its path still exists is for the caller to see.

    Raises:
        DataFormatError, CheckpointError: as `load_checkpoints_file`.
    """
    for record in reversed(load_checkpoints_file(log_dir)):
        if record.has(required_key):
            return record
    return None


def last_sampler_path(log_path: str | Path) -> str:
    """The newest weights of a run that can be sampled from. Raises ConfigurationError when there are none."""
    if not Path(log_path).expanduser().is_dir():
        raise ConfigurationError(f"log_path={str(log_path)!r}: no such folder")
    record = get_last_checkpoint(log_path, required_key="sampler_path")
    if record is None or record.sampler_path is None:
        raise ConfigurationError(
            f"log_path={str(log_path)!r}: the run has no checkpoint to sample from; runs save one at the end, and "
            "every save_every steps"
        )
    return record.sampler_path


def append_checkpoint(log_dir: str | Path, record: CheckpointRecord) -> None:
    """Add a checkpoint to the list. Call it when its weights are saved, not before.

    Raises:
        DataValidationError: `extra` has a NaN or infinite number.
    """
    append_jsonl(Path(log_dir).expanduser() / CHECKPOINTS_BASE_NAME, record.to_dict())
