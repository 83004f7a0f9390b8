"""Where a run starts: at its last checkpoint, at given weights, or at a new adapter. The same for every loop."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from tinker_cookbook import backends
from tinker_cookbook.clients import ServiceClient, TrainingClient
from tinker_cookbook.exceptions import CheckpointError, ConfigurationError
from tinker_cookbook.runs.bootstrap import Run
from tinker_cookbook.runs.checkpoints import CheckpointRecord, load_checkpoints_file
from tinker_cookbook.runs.renderer_metadata import RENDERER_NAME_METADATA_KEY

logger = logging.getLogger(__name__)


async def open_training_client(
    run: Run,
    service: ServiceClient,
    model_name: str,
    lora_rank: int,
    seed: int,
    load_checkpoint_path: str | None,
    user_metadata: Mapping[str, str] | None = None,
) -> tuple[TrainingClient, CheckpointRecord | None]:
    """The client to train with, and the checkpoint it goes on from (None: from the first batch).

    A resumed run takes weights and optimizer state of its newest checkpoint that still exists (rolling and periodic ones
    expire); `load_checkpoint_path` counts at the first start only.

    Raises:
        CheckpointError: the run has checkpoints, and none can be loaded.
        ConfigurationError: `load_checkpoint_path` is of another base model.
    """
    metadata = dict(user_metadata) if user_metadata else None
    if run.resumed:
        resumed = await _from_last_checkpoint(run, service, metadata)
        if resumed is not None:
            return resumed
        logger.warning("%s holds no checkpoint to go on from: starting at the first batch", run.log_path)
    if load_checkpoint_path is not None:
        await _check_source(service, load_checkpoint_path, model_name, (metadata or {}).get(RENDERER_NAME_METADATA_KEY))
        client = await service.create_training_client_from_state(load_checkpoint_path, user_metadata=metadata)
    else:
        client = await service.create_lora_training_client(
            model_name, rank=lora_rank, seed=seed, user_metadata=metadata
        )
    return client, None


async def _check_source(service: ServiceClient, path: str, model_name: str, renderer_name: str | None) -> None:
    """The weights to start from are an adapter of this base model; another renderer than theirs is said.

    Raises ConfigurationError for another base model, whose name data and renderer were made for.
    """
    try:
        source = await service.create_rest_client().get_training_run_by_tinker_path_async(path)
    except Exception as error:
        if not backends.is_engine_error(error):
            raise
        # Weights that somebody else has published: they can be loaded, their run cannot be looked at.
        logger.warning("cannot see which base model %s belongs to (%s)", path, error)
        return
    if not _same_model(source.base_model, model_name):
        raise ConfigurationError(
            f"load_checkpoint_path={path!r} is an adapter of {source.base_model}, and model_name={model_name!r} is another "
            "model; set model_name to that one"
        )
    recorded = (source.user_metadata or {}).get(RENDERER_NAME_METADATA_KEY)
    if renderer_name is not None and recorded not in (None, renderer_name):
        logger.warning(
            "%s was trained with the renderer %s and goes on with %s; set renderer_name=%s if that is not meant",
            path,
            recorded,
            renderer_name,
            recorded,
        )


def _same_model(one: str, other: str) -> bool:
    """Hub ids are compared as they are, folders by where they are."""
    return one == other or Path(one).expanduser().resolve() == Path(other).expanduser().resolve()


async def _from_last_checkpoint(
    run: Run, service: ServiceClient, metadata: dict[str, str] | None
) -> tuple[TrainingClient, CheckpointRecord] | None:
    records = [record for record in load_checkpoints_file(run.log_path) if record.state_path is not None]
    newest_error: Exception | None = None
    for record in reversed(records):
        path = record.state_path or ""
        try:
            client = await service.create_training_client_from_state_with_optimizer(path, user_metadata=metadata)
        except Exception as error:
            if not backends.is_checkpoint_error(error):
                raise
            newest_error = newest_error or error
            logger.warning("checkpoint %s cannot be loaded (%s); trying the one before", path, error)
            continue
        logger.info("resuming from %s", path)
        return client, record
    if newest_error is not None:
        raise CheckpointError(
            f"{run.log_path}: none of its {len(records)} checkpoints can be loaded, the newest because: {newest_error}. "
            "Start over with behavior_if_log_dir_exists=delete, or in another log_path"
        ) from newest_error
    return None
