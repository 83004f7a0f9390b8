"""Checkpoints under the names that training scripts import: the list of a run's checkpoints, and saving a new one."""

from collections.abc import Awaitable
from pathlib import Path
from typing import Any, Literal, Protocol

from tinker_cookbook.exceptions import CheckpointError, ConfigurationError
from tinker_cookbook.runs.checkpoints import (
    CHECKPOINTS_BASE_NAME,
    CheckpointRecord,
    append_checkpoint,
    get_last_checkpoint,
    load_checkpoints_file,
)

__all__ = [
    "CHECKPOINTS_BASE_NAME",
    "CheckpointRecord",
    "append_checkpoint",
    "get_last_checkpoint",
    "load_checkpoints_file",
    "save_checkpoint",
    "save_checkpoint_async",
]


class _Saves(Protocol):
    """What is needed here of a training client. Awaiting what a method returns gives an object with `.path`."""

    def save_state(self, name: str, ttl_seconds: int | None = None) -> Awaitable[Any]: ...

    def save_weights_for_sampler(self, name: str, ttl_seconds: int | None = None) -> Awaitable[Any]: ...


async def save_checkpoint(
    training_client: _Saves,
    name: str,
    log_path: str | Path,
    loop_state: dict[str, Any],
    kind: Literal["state", "sampler", "both"] = "state",
    ttl_seconds: int | None = None,
) -> dict[str, str]:
    """Save weights under `name` and, once they are safe, add a line to the run's `checkpoints.jsonl`.

    Args:
        training_client: the client whose weights are saved.
        name: name of the checkpoint, conventionally the zero-padded step.
        log_path: the run's folder.
        loop_state: where the loop is: `batch` (the next batch to run) and optionally `epoch`, `final` and other keys.
        kind: weights with optimizer state, weights to sample from, or both.
        ttl_seconds: time after which the saved weights may be deleted; None keeps them.

    Returns:
        `state_path` and/or `sampler_path`.

    Raises:
        ConfigurationError: unknown `kind`.
        CheckpointError: `loop_state` is not that of a checkpoint. Nothing is saved then.
    """
    if kind not in ("state", "sampler", "both"):
        raise ConfigurationError(f"kind={kind!r}: must be 'state', 'sampler' or 'both'")
    if clash := {"name", "state_path", "sampler_path"} & loop_state.keys():
        raise CheckpointError(f"loop_state must not contain {sorted(clash)}: they come from the save itself")
    CheckpointRecord.from_dict({**loop_state, "name": name})

    # Both are submitted before either is awaited, so that the two saves overlap.
    saves: dict[str, Awaitable[Any]] = {}
    if kind in ("state", "both"):
        saves["state_path"] = training_client.save_state(name, ttl_seconds=ttl_seconds)
    if kind in ("sampler", "both"):
        saves["sampler_path"] = training_client.save_weights_for_sampler(name, ttl_seconds=ttl_seconds)
    paths = {key: (await save).path for key, save in saves.items()}

    append_checkpoint(log_path, CheckpointRecord.from_dict({**loop_state, "name": name, **paths}))
    return paths


save_checkpoint_async = save_checkpoint
