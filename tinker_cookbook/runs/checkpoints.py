"""The list of a run's checkpoints, `checkpoints.jsonl`: one line per checkpoint, oldest first.

A line records where the loop was (`batch` is the next batch to run, so nothing is trained twice) and the paths of the
saved weights. Saves are submitted to the client immediately, and the line is added once the weights are stored.
"""

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, Self, TypeAlias

from tinker_cookbook.exceptions import CheckpointError, ConfigurationError, DataFormatError
from tinker_cookbook.utils.files import append_jsonl, parse_jsonl
from tinker_cookbook.utils.run_store import RunStore

CHECKPOINTS_BASE_NAME = "checkpoints.jsonl"

Kind: TypeAlias = Literal["state", "sampler", "both"]


@dataclass(frozen=True)
class CheckpointRecord:
    """One line of `checkpoints.jsonl`.

    Raises:
        CheckpointError: a field has the wrong type, or `extra` contains the name of a field.
    """

    name: str
    batch: int | None = None
    """The next batch to run; None in records of older or other programs, from which a loop here cannot go on."""
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


def load_checkpoints_file(log_dir: str | Path) -> list[CheckpointRecord]:
    """All checkpoints of a run, oldest first; empty without a file. The torn line of a killed writer is ignored.

    Raises:
        DataFormatError: a line is not JSON.
        CheckpointError: a line is not a checkpoint. The message begins with `path:line:` and names the fix.
    """
    path = Path(log_dir).expanduser() / CHECKPOINTS_BASE_NAME
    return parse_checkpoints(path.read_bytes(), path) if path.exists() else []


def parse_checkpoints(content: bytes, path: str | Path) -> list[CheckpointRecord]:
    """`load_checkpoints_file` for bytes in memory; `path` names them in errors."""
    records = []
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


def get_last_checkpoint(log_dir: str | Path, required_key: str = "state_path") -> CheckpointRecord | None:
    """The newest checkpoint that has `required_key`, or None. The caller checks whether its path still exists.

    Raises:
        DataFormatError, CheckpointError: as in `load_checkpoints_file`.
    """
    for record in reversed(load_checkpoints_file(log_dir)):
        if record.has(required_key):
            return record
    return None


def last_sampler_path(log_path: str | Path) -> str:
    """The newest weights of a run for sampling. Raises ConfigurationError when there are none."""
    if not Path(log_path).expanduser().is_dir():
        raise ConfigurationError(f"log_path={str(log_path)!r}: no such folder")
    record = get_last_checkpoint(log_path, required_key="sampler_path")
    if record is None or record.sampler_path is None:
        raise ConfigurationError(
            f"log_path={str(log_path)!r}: the run has no checkpoint to sample from; runs save one at the end, and "
            "every save_every steps"
        )
    return record.sampler_path


def newest_of_run(path: str | None, kind: Literal["state_path", "sampler_path"]) -> str | None:
    """Resolve the weights in a setting: a checkpoint's path is returned as is, a run's folder gives its newest
    checkpoint of this kind.

    Raises ConfigurationError for the folder of a run without any.
    """
    if path is None or not (Path(path).expanduser() / CHECKPOINTS_BASE_NAME).is_file():
        return path
    record = get_last_checkpoint(path, required_key=kind)
    if record is None:
        raise ConfigurationError(f"{path!r}: the run in this folder has no checkpoint with a {kind} yet")
    return record.state_path if kind == "state_path" else record.sampler_path


def append_checkpoint(log_dir: str | Path, record: CheckpointRecord) -> None:
    """Append a checkpoint to the list. Call it when its weights are saved, not before.

    Raises:
        DataValidationError: `extra` contains a NaN or infinite number.
    """
    append_jsonl(Path(log_dir).expanduser() / CHECKPOINTS_BASE_NAME, record.to_dict())


class _Saves(Protocol):
    """The methods of a training client that are used here. They return objects whose `.path` is available when
    awaited, or through `.result()`.
    """

    def save_state(self, name: str, ttl_seconds: int | None = None) -> Awaitable[Any]: ...

    def save_weights_for_sampler(self, name: str, ttl_seconds: int | None = None) -> Awaitable[Any]: ...


@dataclass(frozen=True)
class PendingCheckpoint:
    """Saves in progress. `finish`, or `wait` without an event loop, lists the checkpoint when they are done."""

    name: str
    log_path: str | Path
    loop_state: Mapping[str, Any]
    saves: Mapping[str, Any]
    store: RunStore | None = None
    """lists the checkpoint too"""

    async def finish(self) -> dict[str, str]:
        """Wait until the weights are stored, then add the line to the run's `checkpoints.jsonl`. Returns the paths."""
        return self._list({key: (await save).path for key, save in self.saves.items()})

    def wait(self) -> dict[str, str]:
        """`finish` for synchronous programs: blocks until the weights are stored."""
        return self._list({key: save.result().path for key, save in self.saves.items()})

    def _list(self, paths: dict[str, str]) -> dict[str, str]:
        record = CheckpointRecord.from_dict({**self.loop_state, "name": self.name, **paths})
        append_checkpoint(self.log_path, record)
        own = (Path(self.log_path).expanduser() / CHECKPOINTS_BASE_NAME).resolve().as_uri()
        # A store in this very folder already has the line.
        if self.store is not None and self.store.url(CHECKPOINTS_BASE_NAME) != own:
            self.store.write_checkpoint(record.to_dict())
        return paths


def submit_checkpoint(
    training_client: _Saves,
    name: str,
    log_path: str | Path,
    loop_state: Mapping[str, Any],
    kind: Kind = "state",
    ttl_seconds: int | None = None,
    store: RunStore | None = None,
) -> PendingCheckpoint:
    """Start saving. The saves are queued when this returns, so later calls do not change their contents.

    Args:
        training_client: the client whose weights are saved.
        name: name of the checkpoint, conventionally the zero-padded step.
        log_path: the run's folder.
        loop_state: position of the loop: `batch` (the next batch to run) and optionally `epoch`, `final` and other
            keys.
        kind: weights with optimizer state, weights for sampling, or both.
        ttl_seconds: time after which the saved weights may be deleted; None keeps them.
        store: also lists the checkpoint; the run resumes from its folder. A store in the same folder adds nothing.

    Raises:
        ConfigurationError: unknown `kind`.
        CheckpointError: `loop_state` is invalid. Nothing is saved then.
    """
    if kind not in ("state", "sampler", "both"):
        raise ConfigurationError(f"kind={kind!r}: must be 'state', 'sampler' or 'both'")
    if clash := {"name", "state_path", "sampler_path"} & loop_state.keys():
        raise CheckpointError(f"loop_state must not contain {sorted(clash)}: they come from the save itself")
    CheckpointRecord.from_dict({**loop_state, "name": name})
    saves: dict[str, Awaitable[Any]] = {}
    if kind in ("state", "both"):
        saves["state_path"] = training_client.save_state(name, ttl_seconds=ttl_seconds)
    if kind in ("sampler", "both"):
        saves["sampler_path"] = training_client.save_weights_for_sampler(name, ttl_seconds=ttl_seconds)
    return PendingCheckpoint(name, log_path, dict(loop_state), saves, store)


async def save_checkpoint_async(
    training_client: _Saves,
    name: str,
    log_path: str | Path,
    loop_state: dict[str, Any],
    kind: Kind = "state",
    ttl_seconds: int | None = None,
    store: RunStore | None = None,
) -> dict[str, str]:
    """Save weights and list the checkpoint once they are stored. Arguments and errors as in `submit_checkpoint`.

    Returns:
        `state_path` and/or `sampler_path`.
    """
    return await submit_checkpoint(training_client, name, log_path, loop_state, kind, ttl_seconds, store).finish()


def save_checkpoint(
    training_client: _Saves,
    name: str,
    log_path: str | Path,
    loop_state: dict[str, Any],
    kind: Kind = "state",
    ttl_seconds: int | None = None,
    store: RunStore | None = None,
) -> dict[str, str]:
    """`save_checkpoint_async` for synchronous programs: the checkpoint is stored and listed when this returns."""
    return submit_checkpoint(training_client, name, log_path, loop_state, kind, ttl_seconds, store).wait()
