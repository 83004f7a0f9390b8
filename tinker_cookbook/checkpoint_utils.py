"""Checkpoints under the names that training scripts import: the list of a run's checkpoints, saving, and their renderer."""

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from tinker_cookbook import model_info
from tinker_cookbook.exceptions import CheckpointError, ConfigurationError
from tinker_cookbook.runs.checkpoints import (
    CHECKPOINTS_BASE_NAME,
    CheckpointRecord,
    append_checkpoint,
    get_last_checkpoint,
    load_checkpoints_file,
)

if TYPE_CHECKING:
    from tinker_cookbook.clients import ServiceClient

__all__ = [
    "CHECKPOINTS_BASE_NAME",
    "RENDERER_NAME_METADATA_KEY",
    "CheckpointRecord",
    "PendingCheckpoint",
    "add_renderer_name_to_user_metadata",
    "append_checkpoint",
    "check_renderer_name_for_checkpoint_async",
    "get_last_checkpoint",
    "get_renderer_name_from_checkpoint_async",
    "load_checkpoints_file",
    "resolve_renderer_name_from_checkpoint_or_default_async",
    "save_checkpoint",
    "save_checkpoint_async",
    "submit_checkpoint",
]

Kind: TypeAlias = Literal["state", "sampler", "both"]

RENDERER_NAME_METADATA_KEY = "renderer_name"
"""Under this key a training run's user metadata names the renderer that made its data."""


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


def add_renderer_name_to_user_metadata(
    user_metadata: Mapping[str, str] | None, renderer_name: str | None
) -> dict[str, str]:
    """The metadata of a new training run with its renderer's name, so that its checkpoints can be sampled from as trained."""
    named = {} if renderer_name is None else {RENDERER_NAME_METADATA_KEY: renderer_name}
    return {**(user_metadata or {}), **named}


async def get_renderer_name_from_checkpoint_async(service_client: "ServiceClient", path: str) -> str | None:
    """The renderer that a checkpoint (tinker://...) was trained with; None when its run did not say."""
    training_run = await service_client.create_rest_client().get_training_run_by_tinker_path_async(path)
    return (training_run.user_metadata or {}).get(RENDERER_NAME_METADATA_KEY)


async def resolve_renderer_name_from_checkpoint_or_default_async(
    service_client: "ServiceClient", model_name: str, renderer_name: str | None, load_checkpoint_path: str | None
) -> str:
    """The renderer asked for, else the checkpoint's own, else the one recommended for the model."""
    if renderer_name is not None:
        return renderer_name
    if load_checkpoint_path is not None:
        recorded = await get_renderer_name_from_checkpoint_async(service_client, load_checkpoint_path)
        if recorded is not None:
            return recorded
    return model_info.get_recommended_renderer_name(model_name)


async def check_renderer_name_for_checkpoint_async(
    service_client: "ServiceClient", path: str, renderer_name: str
) -> None:
    """Raises ConfigurationError when a checkpoint was trained with another renderer than `renderer_name`."""
    recorded = await get_renderer_name_from_checkpoint_async(service_client, path)
    if recorded not in (None, renderer_name):
        raise ConfigurationError(
            f"renderer_name={renderer_name!r}, but {path} was trained with {recorded!r}: set renderer_name={recorded}"
        )
