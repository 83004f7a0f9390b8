"""Where a run starts: at its last checkpoint, at given weights, or at a new adapter. The same for every loop."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from tinker_cookbook import backends
from tinker_cookbook.clients import ServiceClient, TrainingClient
from tinker_cookbook.exceptions import CheckpointError
from tinker_cookbook.renderer_metadata import RENDERER_NAME_METADATA_KEY
from tinker_cookbook.runs.bootstrap import Run
from tinker_cookbook.runs.checkpoints import CheckpointRecord, load_checkpoints_file
from tinker_cookbook.weights_config import find_origin

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
        renderer_name = (metadata or {}).get(RENDERER_NAME_METADATA_KEY)
        await find_origin(service, load_checkpoint_path, model_name, renderer_name, "load_checkpoint_path")
        client = await service.create_training_client_from_state(load_checkpoint_path, user_metadata=metadata)
    else:
        client = await service.create_lora_training_client(
            model_name, rank=lora_rank, seed=seed, user_metadata=metadata
        )
    return client, None


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
