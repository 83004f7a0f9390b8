"""The list of a run's checkpoints, `checkpoints.jsonl`: one line per checkpoint, oldest first.

A line records where the loop was (`batch` is the next batch to run, so nothing is trained twice) and the paths of the
saved weights. Saves are submitted to the client immediately, and the line is added once the weights are stored.
"""

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from tinker_cookbook.exceptions import CheckpointError, ConfigurationError
from tinker_cookbook.stores.checkpoint_record import CheckpointRecord
from tinker_cookbook.stores.training_store import CHECKPOINTS_BASE_NAME, TrainingRunStore

Kind: TypeAlias = Literal["state", "sampler", "both"]


def load_checkpoints_file(log_dir: str | Path) -> list[CheckpointRecord]:
    """All checkpoints of a run, oldest first; empty without a file. The torn line of a killed writer is ignored.

    Raises:
        DataFormatError: a line is not JSON.
        CheckpointError: a line is not a checkpoint. The message begins with `path:line:` and names the fix.
    """
    return TrainingRunStore.in_folder(log_dir).read_checkpoint_records()


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


def sampler_of(state_path: str | None) -> str | None:
    """The sampler weights that were saved with a training state, as a run's last checkpoint has both; None: the base model."""
    return None if state_path is None else state_path.replace("/weights/", "/sampler_weights/")


def append_checkpoint(log_dir: str | Path, record: CheckpointRecord) -> None:
    """Append a checkpoint to the list. Call it when its weights are saved, not before.

    Raises:
        DataValidationError: `extra` contains a NaN or infinite number.
    """
    TrainingRunStore.in_folder(log_dir).write_checkpoint(record.to_dict())


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
    store: TrainingRunStore | None = None
    """lists the checkpoint too"""

    async def finish(self) -> dict[str, str]:
        """Wait until the weights are stored, then add the line to the run's `checkpoints.jsonl`. Returns the paths."""
        return self._list({key: (await save).path for key, save in self.saves.items()})

    def wait(self) -> dict[str, str]:
        """`finish` for synchronous programs: blocks until the weights are stored."""
        return self._list({key: save.result().path for key, save in self.saves.items()})

    def _list(self, paths: dict[str, str]) -> dict[str, str]:
        record = CheckpointRecord.from_dict({**self.loop_state, "name": self.name, **paths})
        folder = TrainingRunStore.in_folder(self.log_path)
        folder.write_checkpoint(record.to_dict())
        # A store in this very folder already has the line.
        if self.store is not None and self.store.url() != folder.url():
            self.store.write_checkpoint(record.to_dict())
        return paths


def submit_checkpoint(
    training_client: _Saves,
    name: str,
    log_path: str | Path,
    loop_state: Mapping[str, Any],
    kind: Kind = "state",
    ttl_seconds: int | None = None,
    store: TrainingRunStore | None = None,
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
    store: TrainingRunStore | None = None,
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
    store: TrainingRunStore | None = None,
) -> dict[str, str]:
    """`save_checkpoint_async` for synchronous programs: the checkpoint is stored and listed when this returns."""
    return submit_checkpoint(training_client, name, log_path, loop_state, kind, ttl_seconds, store).wait()
