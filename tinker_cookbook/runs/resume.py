"""Where a run starts: at its last checkpoint, at given weights, or at a new adapter. The same for every loop."""

from __future__ import annotations

import logging

from tinker_cookbook.clients import ServiceClient, TrainingClient
from tinker_cookbook.runs.bootstrap import Run
from tinker_cookbook.runs.checkpoints import CheckpointRecord, get_last_checkpoint

logger = logging.getLogger(__name__)


async def open_training_client(
    run: Run,
    service: ServiceClient,
    model_name: str,
    lora_rank: int,
    seed: int,
    load_checkpoint_path: str | None,
) -> tuple[TrainingClient, CheckpointRecord | None]:
    """The client to train with, and the checkpoint it goes on from (None: from the first batch).

    A resumed run takes weights and optimizer state of its last checkpoint; `load_checkpoint_path` counts at the first start only.
    """
    record = get_last_checkpoint(run.log_path) if run.resumed else None
    if record is not None and record.state_path is not None:
        logger.info("resuming from %s", record.state_path)
        return await service.create_training_client_from_state_with_optimizer(record.state_path), record
    if run.resumed:
        logger.warning("%s holds no checkpoint to go on from: starting at the first batch", run.log_path)
    if load_checkpoint_path is not None:
        return await service.create_training_client_from_state(load_checkpoint_path), None
    return await service.create_lora_training_client(model_name, rank=lora_rank, seed=seed), None
