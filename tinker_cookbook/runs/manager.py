"""When a run is saved, and which checkpoints are deleted: periodic, rolling and final ones.

A checkpoint's cursor names the next batch, so the loop calls `maybe_save` when a batch is done *and its metrics are on
disk*. Whenever a run is killed, its metrics reach at least as far as its last checkpoint, and resuming drops the rows
after it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tinker_cookbook.backends import is_engine_error
from tinker_cookbook.clients import ServiceClient, TrainingClient
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.runs.checkpoints import Kind, PendingCheckpoint, submit_checkpoint
from tinker_cookbook.stores.checkpoint_record import CheckpointRecord

logger = logging.getLogger(__name__)

FINAL_NAME = "final"
ROLLING_KEY = "rolling"
TOKENS_KEY = "elapsed_tokens"


class CheckpointManager:
    """Saves a run as often as its config says.

    Args:
        training_client: the client whose weights and optimizer state are saved.
        service_client: deletes rolling checkpoints that a newer one has replaced.
        log_path: the run's folder, with checkpoints.jsonl.
        save_every: periodic save (state and sampler weights) after every n-th step; 0 for none.
        save_every_tokens: also save after this many more trained tokens.
        save_every_seconds: also save after this much time since the last periodic save.
        ttl_seconds: lifetime of periodic checkpoints; None keeps them.
        rolling_save_every: save only the state after every n-th step without a periodic save; the previous one is
            deleted.
        rolling_ttl_seconds: lifetime of a rolling checkpoint that is never replaced.
        async_periodic_saves: periodic saves do not block the loop. Calls run in order, so the saved weights are the
            same; the checkpoint is listed once it is written.
        resumed_from: the checkpoint that the run resumes from; its token count continues.
        clock: time in seconds, for save_every_seconds.
    """

    def __init__(
        self,
        training_client: TrainingClient,
        service_client: ServiceClient,
        log_path: str | Path,
        save_every: int = 0,
        save_every_tokens: int = 0,
        save_every_seconds: float = 0.0,
        ttl_seconds: int | None = 604800,
        rolling_save_every: int = 0,
        rolling_ttl_seconds: int = 7200,
        async_periodic_saves: bool = False,
        resumed_from: CheckpointRecord | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        for name, value in (("save_every", save_every), ("rolling_save_every", rolling_save_every)):
            if value < 0:
                raise ConfigurationError(f"{name}={value}: must be 0 (never) or more")
        self._client, self._service, self._log_path = training_client, service_client, Path(log_path)
        self._save_every, self._save_every_tokens = save_every, save_every_tokens
        self._save_every_seconds, self._ttl_seconds = save_every_seconds, ttl_seconds
        self._rolling_save_every, self._rolling_ttl_seconds = rolling_save_every, rolling_ttl_seconds
        self._async, self._clock = async_periodic_saves, clock
        self.loop_state: dict[str, Any] = {}
        """Entries that every record gets, for example the path of a reference policy."""
        self.on_replaced: Callable[[str], None] | None = None
        """Called with the path of a rolling checkpoint when it is deleted, for the files that the loop keeps with it."""
        self.tokens: int = resumed_from.get(TOKENS_KEY, 0) if resumed_from is not None else 0
        """Tokens trained on so far, before a resume included."""
        self._saved_tokens, self._saved_at = self.tokens, clock()
        self._rolling_path: str | None = None
        if resumed_from is not None and resumed_from.get(ROLLING_KEY):
            self._rolling_path = resumed_from.state_path
        self._pending: asyncio.Task[dict[str, str]] | None = None

    def should_save_periodic(self, step: int) -> bool:
        """Whether a periodic checkpoint is due after `step` steps."""
        if step <= 0:
            return False
        return (
            (self._save_every > 0 and step % self._save_every == 0)
            or (self._save_every_tokens > 0 and self.tokens - self._saved_tokens >= self._save_every_tokens)
            or (self._save_every_seconds > 0 and self._clock() - self._saved_at >= self._save_every_seconds)
        )

    def should_save_rolling(self, step: int) -> bool:
        """Whether a rolling checkpoint is due at `step`; a periodic one at the same step replaces it."""
        return step > 0 and self._rolling_save_every > 0 and step % self._rolling_save_every == 0

    def should_save(self, step: int) -> bool:
        """Whether any save is due, so that a pipelined loop knows when to drain."""
        return self.should_save_periodic(step) or self.should_save_rolling(step)

    async def maybe_save(self, step: int, cursor: Mapping[str, Any], tokens: int = 0) -> None:
        """Save what is due after `step` steps, once their metrics are logged.

        Args:
            cursor: `batch`, and `epoch` where the loop has epochs: the next batch to run.
            tokens: tokens trained since the last call.
        """
        self.tokens += tokens
        if self.should_save_periodic(step):
            await self.save_periodic(step, cursor)
        elif self.should_save_rolling(step):
            await self._save_rolling(step, cursor)

    async def save_periodic(self, step: int, cursor: Mapping[str, Any]) -> None:
        """State and sampler weights under the zero-padded step, whether due or not."""
        await self.finalize()
        self._saved_tokens, self._saved_at = self.tokens, self._clock()
        pending = self._submit(f"{step:06d}", cursor, "both", self._ttl_seconds)
        if self._async:
            self._pending = asyncio.create_task(pending.finish())
        else:
            await pending.finish()

    async def _save_rolling(self, step: int, cursor: Mapping[str, Any]) -> None:
        await self.finalize()
        name, state = f"{step:06d}-rolling", {**cursor, ROLLING_KEY: True}
        paths = await self._submit(name, state, "state", self._rolling_ttl_seconds).finish()
        replaced, self._rolling_path = self._rolling_path, paths["state_path"]
        await self._delete(replaced)

    async def save_stopped(self, step: int, cursor: Mapping[str, Any]) -> None:
        """Save the finished steps before an error ends the run. Nothing is saved before the first step.

        A failure to save (the same broken connection, say) is logged and not raised, so that the original error is
        raised.
        """
        try:
            await self.finalize()
            if step > 0:
                await self._submit(f"{step:06d}-stopped", cursor, "state", self._ttl_seconds).finish()
        except Exception as error:
            if is_engine_error(error):
                logger.error("what was done until step %d could not be saved: %s", step, error)
            else:
                logger.exception("what was done until step %d could not be saved", step)

    async def save_final(self, cursor: Mapping[str, Any]) -> None:
        """Save the finished run: state and sampler weights that do not expire. The rolling checkpoint is deleted."""
        await self.finalize()
        await self._submit(FINAL_NAME, {**cursor, "final": True}, "both", None).finish()
        replaced, self._rolling_path = self._rolling_path, None
        await self._delete(replaced)

    async def finalize(self) -> None:
        """Wait for a save in progress."""
        pending, self._pending = self._pending, None
        if pending is not None:
            await pending

    def _submit(self, name: str, cursor: Mapping[str, Any], kind: Kind, ttl: int | None) -> PendingCheckpoint:
        state = {**self.loop_state, **cursor}
        if self.tokens:
            state[TOKENS_KEY] = self.tokens
        return submit_checkpoint(self._client, name, self._log_path, state, kind, ttl)

    async def _delete(self, path: str | None) -> None:
        if path is None:
            return
        try:
            await self._service.create_rest_client().delete_checkpoint_from_tinker_path_async(path)
            if self.on_replaced is not None:
                self.on_replaced(path)
        except Exception as error:
            # It expires and is no longer needed: not worth ending a run for.
            logger.warning("the replaced rolling checkpoint %s could not be deleted: %s", path, error)
