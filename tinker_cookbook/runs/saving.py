"""Saving a run's weights: submitted at once, and listed in `checkpoints.jsonl` when they are safe."""

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from tinker_cookbook.exceptions import CheckpointError, ConfigurationError
from tinker_cookbook.runs.checkpoints import CheckpointRecord, append_checkpoint

Kind: TypeAlias = Literal["state", "sampler", "both"]


class _Saves(Protocol):
    """What is needed here of a training client. Awaiting what a method returns gives an object with `.path`."""

    def save_state(self, name: str, ttl_seconds: int | None = None) -> Awaitable[Any]: ...

    def save_weights_for_sampler(self, name: str, ttl_seconds: int | None = None) -> Awaitable[Any]: ...


@dataclass(frozen=True)
class PendingCheckpoint:
    """Saves that are on their way; `finish` waits for them and lists the checkpoint."""

    name: str
    log_path: str | Path
    loop_state: Mapping[str, Any]
    saves: Mapping[str, Awaitable[Any]]

    async def finish(self) -> dict[str, str]:
        """Wait until the weights are safe, then add the line to the run's `checkpoints.jsonl`. Returns the paths."""
        paths = {key: (await save).path for key, save in self.saves.items()}
        append_checkpoint(self.log_path, CheckpointRecord.from_dict({**self.loop_state, "name": self.name, **paths}))
        return paths


def submit_checkpoint(
    training_client: _Saves,
    name: str,
    log_path: str | Path,
    loop_state: Mapping[str, Any],
    kind: Kind = "state",
    ttl_seconds: int | None = None,
) -> PendingCheckpoint:
    """Start saving: the saves are queued when this returns, so what is submitted later does not change what they hold.

    Arguments and errors are those of `save_checkpoint`.
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
    return PendingCheckpoint(name, log_path, dict(loop_state), saves)


async def save_checkpoint(
    training_client: _Saves,
    name: str,
    log_path: str | Path,
    loop_state: dict[str, Any],
    kind: Kind = "state",
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
    return await submit_checkpoint(training_client, name, log_path, loop_state, kind, ttl_seconds).finish()


save_checkpoint_async = save_checkpoint
