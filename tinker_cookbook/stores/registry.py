"""The runs in a set of storages, and their progress."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.stores.eval_store import EvalStore
from tinker_cookbook.stores.folder import LOCK_BASE_NAME, Holder
from tinker_cookbook.stores.storage import Storage, storage_join
from tinker_cookbook.stores.training_store import (
    CHECKPOINTS_BASE_NAME,
    CONFIG_BASE_NAME,
    METADATA_BASE_NAME,
    METRICS_BASE_NAME,
    TIMING_BASE_NAME,
    TrainingRunStore,
)

Status: TypeAlias = Literal["running", "completed", "idle"]
TrainingType: TypeAlias = Literal["rl", "sl", "dpo"]

_KINDS: dict[str, TrainingType] = {"dpo_beta": "dpo", "loss_fn": "rl", "num_epochs": "sl"}
"""A config key that identifies each kind of training; the first match counts."""

MAX_DEPTH = 3
"""Folders between a storage's root and a run: recipe, sweep, run."""


@dataclass(frozen=True)
class RunInfo:
    """A run in a storage."""

    run_id: str
    """its path below the root; its URL if it is at the root, or if a run of an earlier storage has the same path"""
    prefix: str
    """its path below the root of its storage"""
    has_config: bool
    has_metrics: bool
    has_checkpoints: bool
    iteration_count: int
    """steps that have a folder"""
    status: Status
    """running: a process holds the folder, and is not known to have died; completed: its last checkpoint is final; else idle"""
    last_updated: float | None
    """last write of metrics, checkpoints or config, in seconds since 1970; None: the storage does not record it"""
    has_timing: bool = False
    training_type: TrainingType | None = None
    """determined from its config; None: unknown"""


class RunRegistry:
    """Finds runs: folders with a run's metadata, metrics or checkpoints file. Subfolders of a run are not searched.

    Args:
        storages: the storages to search.
    """

    def __init__(self, storages: Sequence[Storage]) -> None:
        self._storages = list(storages)
        self._found: dict[str, tuple[RunInfo, Storage]] | None = None

    @property
    def storage_count(self) -> int:
        return len(self._storages)

    @property
    def primary_storage(self) -> Storage:
        """The first storage."""
        return self._storages[0]

    def refresh(self) -> list[RunInfo]:
        """Search again.

        Raises:
            DataFormatError, CheckpointError: a run's list of checkpoints is damaged.
        """
        runs: dict[str, tuple[RunInfo, Storage]] = {}
        for storage in self._storages:
            for prefix, names in _runs(storage, "", 0):
                run_id = prefix if prefix and prefix not in runs else storage.url(prefix)
                runs[run_id] = (_info(storage, prefix, names, run_id), storage)
        self._found = runs
        return self.get_runs()

    def get_runs(self) -> list[RunInfo]:
        """The runs of the last search; the first call searches."""
        return [info for info, _ in self._known().values()]

    def get_run(self, run_id: str) -> RunInfo | None:
        """A run from the last search; None: there is none with this id."""
        return self._known()[run_id][0] if run_id in self._known() else None

    def storage_for(self, run_id: str) -> Storage:
        """The storage of a run. Raises ConfigurationError for an unknown id."""
        known = self._known()
        if run_id not in known:
            raise ConfigurationError(
                f"run_id={run_id!r}: no such run; there are {sorted(known)}. refresh() searches again"
            )
        return known[run_id][1]

    def get_training_store(self, run_id: str) -> TrainingRunStore:
        """The files of a run. Raises as `storage_for`."""
        storage = self.storage_for(run_id)
        return TrainingRunStore(storage, self._known()[run_id][0].prefix)

    def get_eval_store(self) -> EvalStore | None:
        """The first evaluation store in a storage's root, `eval` or `eval_store`; None: there is none."""
        for storage in self._storages:
            for prefix in ("eval", "eval_store", ""):
                if storage.exists(storage_join(prefix, "runs.jsonl")):
                    return EvalStore(storage, prefix)
        return None

    def _known(self) -> dict[str, tuple[RunInfo, Storage]]:
        if self._found is None:
            self.refresh()
        return self._found or {}


def _runs(storage: Storage, prefix: str, depth: int) -> Iterator[tuple[str, list[str]]]:
    """The folder of each run with the file names in it, in order."""
    names = storage.list_dir(prefix)
    if {METADATA_BASE_NAME, METRICS_BASE_NAME, CHECKPOINTS_BASE_NAME} & set(names):
        yield prefix, names
    elif depth < MAX_DEPTH:
        for name in names:
            yield from _runs(storage, storage_join(prefix, name), depth + 1)


def _info(storage: Storage, prefix: str, names: list[str], run_id: str) -> RunInfo:
    store = TrainingRunStore(storage, prefix)
    files = (CONFIG_BASE_NAME, METRICS_BASE_NAME, CHECKPOINTS_BASE_NAME)
    stats = [storage.stat(storage_join(prefix, name)) for name in files]
    lock = storage_join(prefix, LOCK_BASE_NAME)
    holder = Holder.parse(storage.read(lock)) if storage.stat(lock) is not None else None
    checkpoints, config = store.read_checkpoint_records(), store.read_config() or {}
    status: Status = "completed" if checkpoints and checkpoints[-1].final else "idle"
    return RunInfo(
        run_id,
        prefix,
        *(name in names for name in files),
        iteration_count=len(store.list_iterations()),
        status="running" if holder is not None and not holder.has_died else status,
        last_updated=max((stat.mtime for stat in stats if stat is not None and stat.mtime is not None), default=None),
        has_timing=TIMING_BASE_NAME in names,
        training_type=next((kind for key, kind in _KINDS.items() if key in config), None),
    )
