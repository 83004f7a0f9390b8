"""Groups sampled ahead of the training step: when they start, which ones a step takes, and what a checkpoint stores.

A group has a position in a batch of the dataset, and its seeds depend only on batch and position. Batch b may start
when step b - K is next, where K is `max_steps_off_policy`. So at most K + 1 batches of groups are in flight or waiting
for training.

Deterministic: step i trains on batch i, and the policy of a group is at most K updates older than the one that trains
    on it. Groups start in order, as many at a time as a batch has. Before a checkpoint, the groups in flight finish
    and no new ones start; then a new sampler is made. The resumed run loads the finished groups from the checkpoint,
    so it continues exactly as an uninterrupted run does.

Otherwise all open groups run at once. With `too_old="train"`, a step takes the finished groups with the oldest
weights: nothing is dropped for its age, and a slow group is trained on when it is done, however old it is. Groups that
failed, or that are removed because their rewards are all equal, do not count toward the size of the step; groups of
later batches start to replace them. So the data may run out before the steps do.

With "wait" and "drop", no group is older than K updates. A step takes the groups that finished first, and enough of
the older ones that later steps can take the rest in time. If these have not finished, the step waits for them or drops
them.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl.config import AsyncConfig
from tinker_cookbook.rl.kept_groups import FOLDER, GroupKey, Kept, read_kept, write_kept
from tinker_cookbook.rl.sampler import Sampler, WrappedTrajectoryGroup, with_replaced
from tinker_cookbook.rl.types import EnvGroupBuilder
from tinker_cookbook.runs.checkpoints import load_checkpoints_file
from tinker_cookbook.stores.checkpoint_record import CheckpointRecord

logger = logging.getLogger(__name__)

AHEAD_KEY = "groups_ahead"
_FILE, _MOST, _LEFT, _BATCHES = "file", "max_steps_off_policy", "left", "batches"


@dataclass
class _Open:
    """A group that no finished step has trained on."""

    builder: EnvGroupBuilder
    version: int | None = None
    """number of updates of its policy, once it has started"""
    sampled: WrappedTrajectoryGroup | None = None
    task: asyncio.Task[None] | None = None
    replaced: list[WrappedTrajectoryGroup] = field(default_factory=list[WrappedTrajectoryGroup])
    """the groups without signal that it replaces, while it is being sampled"""


class PendingGroups:
    """Groups that are being sampled, or that are sampled and not trained on yet.

    Call `open` before the first step, and `close` before the task group of its tasks ends.
    """

    _tasks: asyncio.TaskGroup

    def __init__(self, sampler: Sampler, config: AsyncConfig):
        self._sampler, self._config, self._session = sampler, config, sampler.session
        self._most_ahead = config.max_steps_off_policy
        self._drains = config.deterministic and self._most_ahead > 0
        self._open: dict[GroupKey, _Open] = {}
        self._waiting: deque[GroupKey] = deque()
        self._finished: list[GroupKey] = []
        """in the order in which they finished"""
        self._kept: dict[GroupKey, Kept] = {}
        """groups from the checkpoint that the run resumes from"""
        self._sizes: dict[int, int] = {}
        self._taken: tuple[int, list[GroupKey]] = (-1, [])
        """the last step that took groups, and these groups"""
        self._next_batch = sampler.start
        self._running = 0
        self._most_running = sampler.config.max_groups_in_flight
        self._most_started = inf
        """maximum number of open groups: those of K + 1 batches"""
        self._paused = self._closed = False
        self._changed = asyncio.Event()

    def open(self, tasks: asyncio.TaskGroup) -> None:
        """Restore the groups of the checkpoint. From now on rollouts run as tasks of the task group."""
        self._tasks = tasks
        if self._drains:
            self._most_running = min(self._most_running, len(self._sampler.batches.get_batch(self._sampler.start)))
        record = self._session.record
        kept: dict[str, Any] = (record.get(AHEAD_KEY) if record is not None else None) or {}
        if _FILE in kept and kept[_MOST] <= self._most_ahead:  # otherwise some are too old for the current config
            self._kept = read_kept(self._session.run.log_path / kept[_FILE])
        if _LEFT in kept:
            self._next_batch = kept[_BATCHES]
            self._reopen([(batch, position) for batch, position in kept[_LEFT]])
        self._session.checkpoints.on_replaced = self._remove_file

    async def take(self, step: int) -> tuple[list[WrappedTrajectoryGroup], int]:
        """Wait for the groups of a step; also return how many were dropped for their age. No groups: the data ran out.

        Groups that were replaced by others, also by dropped ones, are among them.
        """
        self._paused = False
        self._forget_trained()
        while self._next_batch <= min(step + self._most_ahead, self._sampler.end - 1):
            self._open_batch()
        self._most_started = sum(self._sizes.get(batch, 0) for batch in range(step, step + self._most_ahead + 1))
        self._session.display.expect(self._sizes[step])
        self._start()
        while (chosen := self._choose(step)) is None:
            await self._until_changed()
        keys, late = chosen
        for key in late:
            if (task := self._open[key].task) is not None:
                task.cancel()
        self._taken = step, [*keys, *late]
        sampled = [group for key in keys if (group := self._open[key].sampled) is not None]
        return [*with_replaced(sampled), *(group for key in late for group in self._open[key].replaced)], len(late)

    def _open_batch(self) -> None:
        batch, self._next_batch = self._next_batch, self._next_batch + 1
        builders = self._sampler.batches.get_batch(batch)
        self._sizes[batch] = len(builders)
        for position, builder in enumerate(builders):
            self._add((batch, position), builder)

    def _choose(self, step: int) -> tuple[list[GroupKey], list[GroupKey]] | None:
        """Choose the groups that a step takes and those that it drops; None: not enough have finished."""
        need = self._sizes[step]
        if self._config.deterministic:
            keys = [(step, position) for position in range(need)]
            return None if any(self._open[key].sampled is None for key in keys) else (keys, [])
        return self._oldest_finished(need) if self._config.too_old == "train" else self._first_finished(step, need)

    def _oldest_finished(self, need: int) -> tuple[list[GroupKey], list[GroupKey]] | None:
        """The groups for a step: as many usable ones as needed, oldest weights first, and all unusable ones."""
        unusable = [key for key in self._finished if self._is_unusable(key)]
        usable = [key for key in self._finished if key not in unusable]
        if len(usable) < need and len(self._open) > len(self._finished):
            return None
        usable.sort(key=lambda key: self._open[key].version or 0)
        return _by_position([*usable[:need], *unusable]), []

    def _is_unusable(self, key: GroupKey) -> bool:
        """Whether a finished group cannot be trained on: it failed, or it will be removed."""
        sampled = self._open[key].sampled
        return sampled is not None and self._sampler.is_unusable(sampled)

    def _first_finished(self, step: int, need: int) -> tuple[list[GroupKey], list[GroupKey]] | None:
        """Earliest deadline first: take now what later steps could not fit.

        These are never more groups than the step takes: when a group started, the open groups did not exceed what the
        steps up to its deadline take.
        """
        can_drop = self._config.too_old == "drop"
        if len(self._finished) < (1 if can_drop else need):
            return None
        chosen: dict[GroupKey, None] = {}
        late: dict[GroupKey, None] = {}
        for last in range(step, step + self._most_ahead + 1):
            due = dict.fromkeys(key for key, group in self._open.items() if self._last_step(group) <= last)
            room = sum(self._sizes.get(batch, 0) for batch in range(step + 1, last + 1))
            missing = len(due) - room - sum(key in due for key in (*chosen, *late))
            ready = [key for key in self._finished if key in due and key not in chosen]
            chosen |= dict.fromkeys(ready[: max(0, missing)])
            if (missing := missing - len(ready)) > 0:
                if not can_drop:
                    return None
                unfinished = [key for key in due if self._open[key].sampled is None and key not in late]
                late |= dict.fromkeys(unfinished[:missing])
        others = [key for key in self._finished if key not in chosen]
        chosen |= dict.fromkeys(others[: need - len(chosen) - len(late)])
        if not chosen or len(chosen) + len(late) < need:
            return None
        return _by_position(chosen), sorted(late)

    def _last_step(self, group: _Open) -> float:
        """The last step that may take the group."""
        return inf if group.version is None else group.version + self._most_ahead

    def _add(self, key: GroupKey, builder: EnvGroupBuilder) -> None:
        group = self._open[key] = _Open(builder)
        kept = self._kept.pop(key, None)
        if kept is None:
            self._waiting.append(key)
            return
        last, *replaced = (
            WrappedTrajectoryGroup(sampled, builder, version, seconds, place)
            for sampled, version, seconds, place in kept
        )
        group.version = min(version for _, version, _, _ in kept)
        group.sampled = replace(last, replaced=tuple(replaced))
        self._finished.append(key)

    def _reopen(self, left: Sequence[GroupKey]) -> None:
        """Reopen the groups left over by the steps before a checkpoint, for a run that trains on whatever finishes
        first.
        """
        for batch in range(self._sampler.start, self._next_batch):
            self._sizes[batch] = len(self._sampler.batches.get_batch(batch))
        for batch in sorted({batch for batch, _ in left}):
            builders = self._sampler.batches.get_batch(batch)
            self._sizes[batch] = len(builders)
            for position in sorted(position for at, position in left if at == batch):
                self._add((batch, position), builders[position])

    def _start(self) -> None:
        replaces = not self._config.deterministic and self._config.too_old == "train"
        while not self._paused and not self._closed:
            unusable = sum(map(self._is_unusable, self._finished)) if replaces else 0
            started = len(self._open) - len(self._waiting) - unusable
            if self._running >= self._most_running or started >= self._most_started:
                return
            if not self._waiting:
                if not unusable or self._next_batch >= self._sampler.end:
                    return
                self._open_batch()  # replacements for the groups that cannot be trained on
            key = self._waiting.popleft()
            self._running += 1
            task = self._open[key].task = self._tasks.create_task(self._sample(key))
            task.add_done_callback(self._ended)

    async def _sample(self, key: GroupKey) -> None:
        group = self._open[key]
        group.version = self._sampler.client_step
        group.sampled = await self._sampler.sample_signal(*key, group.builder, self._sizes[key[0]], group.replaced)
        self._finished.append(key)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running -= 1
        if not task.cancelled():
            self._closed |= task.exception() is not None  # its peers are being cancelled
            self._start()
        self._changed.set()

    async def _until_changed(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _forget_trained(self) -> None:
        step, keys = self._taken
        if step < self._sampler.steps_done:
            for key in keys:
                self._open.pop(key, None)
            self._finished = [key for key in self._finished if key in self._open]

    async def drain(self) -> None:
        """Before a checkpoint: wait for the groups in flight if the resumed run has to do the same."""
        if not self._drains:
            return
        self._paused = True
        while self._running:
            await self._until_changed()
        await self._sampler.refresh()  # a resumed run has a new sampler, with an empty prefix cache

    async def keep(self, name: str) -> None:
        """Add to the loop's state what the checkpoint of this name stores of the open groups.

        A thread writes them: millions of tokens take seconds, and sampling continues meanwhile.
        """
        about, kept = self._to_keep()
        if kept:
            about[_FILE] = await asyncio.to_thread(write_kept, self._session.run.log_path, name, kept)
        self._describe(about)

    def keep_stopped(self, name: str) -> None:
        """`keep` before an error ends the run. A failure of `keep` is only logged, so that the original error is
        raised.
        """
        try:
            about, kept = self._to_keep()
            if kept:
                about[_FILE] = write_kept(self._session.run.log_path, name, kept)
            self._describe(about)
        except Exception:
            logger.exception("groups sampled ahead are not saved, and are sampled again")

    def _to_keep(self) -> tuple[dict[str, Any], dict[GroupKey, Kept]]:
        """A checkpoint's record of the open groups, and the groups to write to its file."""
        self._forget_trained()
        self._describe({})
        about: dict[str, Any] = {}
        kept: dict[GroupKey, Kept] = {}
        for key, group in self._open.items():
            # A synchronous run that is stopped samples its whole batch again, all at once, as an uninterrupted run
            # does.
            if (done := group.sampled) is not None and self._most_ahead > 0:
                kept[key] = [
                    (one.trajectory_group, one.sampling_client_step, one.seconds, one.place)
                    for one in with_replaced([done])
                ]
        if kept:
            about[_MOST] = self._most_ahead
        # Failed groups let the data run ahead of the steps, even when no group is open.
        is_ahead = bool(self._open) or self._next_batch > self._sampler.steps_done
        if is_ahead and not self._config.deterministic:
            about |= {_LEFT: [list(key) for key in self._open], _BATCHES: self._next_batch}
        return about, kept

    def _describe(self, about: dict[str, Any]) -> None:
        """The record in the next checkpoint; by default no open groups."""
        state = self._session.checkpoints.loop_state
        state.pop(AHEAD_KEY, None)
        if about:
            state[AHEAD_KEY] = about

    def _remove_file(self, state_path: str) -> None:
        """Remove the file of a rolling checkpoint that a newer one has replaced, unless a later one uses the same file
        name.
        """
        log_path = self._session.run.log_path
        records = load_checkpoints_file(log_path)
        matches = [i for i, record in enumerate(records) if record.state_path == state_path]
        for i in matches:
            file = _file(records[i])
            if file is not None and file not in map(_file, records[i + 1 :]):
                (log_path / file).unlink(missing_ok=True)

    def remove_files(self) -> None:
        """Remove the files once the final checkpoint exists: no run will resume from an earlier one."""
        shutil.rmtree(self._session.run.log_path / FOLDER, ignore_errors=True)

    def oldest_batch(self) -> int:
        """The first batch with an open group, or else that which opens next."""
        return min((batch for batch, _ in self._open), default=self._next_batch)

    def close(self) -> None:
        """Start no more groups. Checkpoints from now on have no open groups, except those of `keep_stopped`."""
        self._closed = True
        self._describe({})


def _by_position(keys: Iterable[GroupKey]) -> list[GroupKey]:
    """Sort by position, then by batch: the first groups of each batch are the ones with transcripts and records."""
    return sorted(keys, key=lambda key: (key[1], key[0]))


def _file(record: CheckpointRecord) -> str | None:
    return record.get(AHEAD_KEY, {}).get(_FILE)


def check_order(record: CheckpointRecord | None, config: AsyncConfig | None) -> None:
    """Raise ConfigurationError when a run that trained on whatever finished first would resume in batch order."""
    if record is not None and _LEFT in record.get(AHEAD_KEY, {}) and (config is None or config.deterministic):
        raise ConfigurationError(
            f"checkpoint {record.name} is of a run with async_config.deterministic=False, whose steps have taken groups of "
            "several batches: continue with async_config.deterministic=False (any max_steps_off_policy), or start over in "
            "another log_path"
        )
