"""Re-exports models/renderer.py and the modules of checkpoints, for scripts that import this path."""

from tinker_cookbook.models.renderer import (
    RENDERER_NAME_METADATA_KEY,
    add_renderer_name_to_user_metadata,
    check_renderer_name_for_checkpoint,
    check_renderer_name_for_checkpoint_async,
    get_renderer_name_from_checkpoint,
    get_renderer_name_from_checkpoint_async,
    resolve_renderer_name_from_checkpoint_or_default,
    resolve_renderer_name_from_checkpoint_or_default_async,
)
from tinker_cookbook.runs.checkpoints import (
    PendingCheckpoint,
    append_checkpoint,
    get_last_checkpoint,
    load_checkpoints_file,
    save_checkpoint,
    save_checkpoint_async,
    submit_checkpoint,
)
from tinker_cookbook.runs.manager import CheckpointManager
from tinker_cookbook.stores.checkpoint_record import CheckpointRecord
from tinker_cookbook.stores.training_store import CHECKPOINTS_BASE_NAME

__all__ = [
    "CHECKPOINTS_BASE_NAME",
    "RENDERER_NAME_METADATA_KEY",
    "CheckpointManager",
    "CheckpointRecord",
    "PendingCheckpoint",
    "add_renderer_name_to_user_metadata",
    "append_checkpoint",
    "check_renderer_name_for_checkpoint",
    "check_renderer_name_for_checkpoint_async",
    "get_last_checkpoint",
    "get_renderer_name_from_checkpoint",
    "get_renderer_name_from_checkpoint_async",
    "load_checkpoints_file",
    "resolve_renderer_name_from_checkpoint_or_default",
    "resolve_renderer_name_from_checkpoint_or_default_async",
    "save_checkpoint",
    "save_checkpoint_async",
    "submit_checkpoint",
]
