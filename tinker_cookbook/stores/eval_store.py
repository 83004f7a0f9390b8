"""Evaluations of checkpoints in a storage: settings, every sample, and the scores.

    runs.jsonl                                   a line for each run that was started
    runs/<run_id>/metadata.json                  `RunMetadata`
    runs/<run_id>/<benchmark>/result.json        `BenchmarkResult`
    runs/<run_id>/<benchmark>/trajectories.jsonl a `StoredTrajectory` per line
    runs/<run_id>/summary.json                   the scores of all benchmarks

The files have tinker-cookbook's format. `eval.benchmarks` writes its own, more detailed ones next to them.
"""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Self, cast

from tinker_cookbook.exceptions import ConfigurationError, DataFormatError
from tinker_cookbook.stores.storage import FileStore, LocalStorage, Storage, in_thread, storage_join
from tinker_cookbook.utils.files import json_line, parse_jsonl

_RUNS, _INDEX = "runs", "runs.jsonl"
_METADATA, _SUMMARY, _RESULT, _TRAJECTORIES = "metadata.json", "summary.json", "result.json", "trajectories.jsonl"
_FIX = "remove it, or evaluate again"


class _Row:
    """A dataclass that is stored as a JSON object."""

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Self:
        """Parse the object; unknown keys are ignored. Raises DataFormatError if a field is missing."""
        known = {entry.name for entry in fields(cls)}  # pyright: ignore[reportArgumentType]
        try:
            return cls(**{key: value for key, value in d.items() if key in known})
        except TypeError as error:
            raise DataFormatError(f"{cls.__name__}: {error}; it has {', '.join(d) or 'no keys'}") from error

    def to_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)  # pyright: ignore[reportArgumentType]


@dataclass
class RunMetadata(_Row):
    """Settings of an evaluation run."""

    run_id: str
    model_name: str
    checkpoint_path: str | None
    """tinker://...; None: the base model"""
    checkpoint_name: str | None
    benchmarks: list[str]
    timestamp: str
    """start time, in ISO 8601"""
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    scores: dict[str, float] = field(default_factory=dict[str, float])
    """by benchmark; filled in by `EvalStore.finalize_run`"""


@dataclass
class StoredTurn(_Row):
    """A message of a sample."""

    role: Literal["system", "user", "assistant", "tool", "environment", "grader"]
    content: str
    token_count: int = 0
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass
class StoredTrajectory(_Row):
    """One sample of one example."""

    idx: int
    """index of the example, in the benchmark's order"""
    benchmark: str
    example_id: str = ""
    turns: list[StoredTurn] = field(default_factory=list[StoredTurn])
    reward: float = 0.0
    metrics: dict[str, float | int] = field(default_factory=dict[str, float | int])
    logs: dict[str, str | int | float] = field(default_factory=dict[str, str | int | float])
    error: str | None = None
    """why it could not be graded; None: it was graded"""
    time_seconds: float = 0.0

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Self:
        row = super().from_dict(d)
        turns = cast(list[Any], row.turns)  # as read: dicts
        row.turns = [turn if isinstance(turn, StoredTurn) else StoredTurn.from_dict(turn) for turn in turns]
        return row


@dataclass
class BenchmarkResult(_Row):
    """The result of a benchmark."""

    name: str
    score: float
    num_examples: int
    num_correct: int
    num_errors: int = 0
    num_truncated: int = 0
    metrics: dict[str, float | int] = field(default_factory=dict[str, float | int])
    time_seconds: float = 0.0
    pass_at_k: dict[int, float] = field(default_factory=dict[int, float])

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Self:
        row = super().from_dict(d)
        row.pass_at_k = {int(k): score for k, score in row.pass_at_k.items()}
        return row

    @property
    def num_completed(self) -> int:
        """Examples that were graded."""
        return self.num_examples - self.num_errors

    @property
    def score_completed(self) -> float:
        """The fraction of right answers among graded examples; 0 if there are none."""
        return self.num_correct / self.num_completed if self.num_completed else 0.0


class EvalStore(FileStore):
    """Writes and reads evaluation runs.

    `alist_runs`, `aread_trajectories` and `aread_result` are coroutine versions that run in a thread.

    Args:
        storage_or_path: the location of the store; a path is a folder, which is created.
        prefix: the folder in the storage.
    """

    def __init__(self, storage_or_path: Storage | str | Path, prefix: str = "") -> None:
        is_path = isinstance(storage_or_path, str | Path)
        super().__init__(LocalStorage(storage_or_path) if is_path else storage_or_path, prefix)

    def create_run(
        self,
        model_name: str,
        benchmarks: Sequence[str],
        checkpoint_path: str | None = None,
        checkpoint_name: str | None = None,
        config: Mapping[str, Any] | None = None,
        run_id: str | None = None,
    ) -> str:
        """Start a run and return its id, by default made of the checkpoint's name and the time."""
        now = datetime.now()
        run_id = run_id or f"{checkpoint_name or 'base'}_{now:%Y%m%d_%H%M%S}_{uuid.uuid4().hex[:6]}"
        metadata = RunMetadata(
            run_id, model_name, checkpoint_path, checkpoint_name, [*benchmarks], now.isoformat(), dict(config or {})
        )
        self._write_json(self._run(run_id, _METADATA), metadata.to_dict())
        line = {"run_id": run_id, "timestamp": metadata.timestamp, "model": model_name, "checkpoint": checkpoint_name}
        self.storage.append(self._path(_INDEX), json_line(line))
        return run_id

    def run_dir(self, run_id: str) -> str:
        """The folder of a run, as a path. Raises ConfigurationError if the store is not a local folder; use `url`
        there.
        """
        root = getattr(self.storage, "root", None)
        if root is None:
            raise ConfigurationError(
                f"run_dir({run_id!r}): the store is at {self.url()}, not in a local folder; use url()"
            )
        return str(Path(root, self._path(self._run(run_id))))

    def finalize_run(self, run_id: str) -> RunMetadata:
        """Copy the scores of the run's benchmarks into its metadata. Raises FileNotFoundError if there is no such run."""
        metadata = self.read_run(run_id)
        for benchmark in metadata.benchmarks:
            if (result := self.read_result(run_id, benchmark)) is not None:
                metadata.scores[benchmark] = result.score
        self._write_json(self._run(run_id, _METADATA), metadata.to_dict())
        return metadata

    def list_runs(self) -> list[RunMetadata]:
        """The runs by id, newest first. Raises DataFormatError for damaged metadata."""
        names = sorted(self.storage.list_dir(self._path(_RUNS)), reverse=True)
        return [self.read_run(name) for name in names if self.has(self._run(name, _METADATA))]

    def read_run(self, run_id: str) -> RunMetadata:
        """A run's metadata. Raises FileNotFoundError, and the errors of `list_runs`."""
        row = self._read_json(self._run(run_id, _METADATA), _FIX)
        if row is None:
            raise FileNotFoundError(f"run {run_id!r}: there is none in {self.url()}")
        return RunMetadata.from_dict(row)

    def list_benchmarks(self, run_id: str) -> list[str]:
        """The benchmarks of a run that have results."""
        names = self.storage.list_dir(self._path(self._run(run_id)))
        return [name for name in names if self.has(self._run(run_id, name, _RESULT))]

    def read_result(self, run_id: str, benchmark: str) -> BenchmarkResult | None:
        """The result of a benchmark; None: there is none yet. Raises DataFormatError if it is damaged."""
        row = self._read_json(self._run(run_id, benchmark, _RESULT), _FIX)
        return None if row is None else BenchmarkResult.from_dict(row)

    def read_trajectories(
        self,
        run_id: str,
        benchmark: str,
        *,
        correct_only: bool = False,
        incorrect_only: bool = False,
        errors_only: bool = False,
    ) -> list[StoredTrajectory]:
        """The samples of a benchmark, filtered by kind.

        Args:
            correct_only: with a positive reward.
            incorrect_only: without one, but graded.
            errors_only: could not be graded.

        Raises:
            DataFormatError: a line is damaged.
        """
        path = self._run(run_id, benchmark, _TRAJECTORIES)
        lines = parse_jsonl(self._read(path) or b"", self._label(path), tolerate_torn_tail=True)
        trajectories = [StoredTrajectory.from_dict(line.row) for line in lines]
        return [
            row
            for row in trajectories
            if not (correct_only and row.reward <= 0)
            and not (incorrect_only and (row.reward > 0 or row.error is not None))
            and not (errors_only and row.error is None)
        ]

    def read_single_trajectory(self, run_id: str, benchmark: str, idx: int) -> StoredTrajectory | None:
        """The first sample of an example; None: there is none."""
        return next((row for row in self.read_trajectories(run_id, benchmark) if row.idx == idx), None)

    def read_summary(self, run_id: str) -> dict[str, Any] | None:
        """The scores of all benchmarks; None: there are none."""
        return self._read_json(self._run(run_id, _SUMMARY), _FIX)

    def write_result(self, run_id: str, result: BenchmarkResult) -> None:
        """Write the result of a benchmark."""
        self._write_json(self._run(run_id, result.name, _RESULT), result.to_dict())

    def write_trajectory(self, run_id: str, benchmark: str, traj: StoredTrajectory) -> None:
        """Append a sample."""
        self.storage.append(self._path(self._run(run_id, benchmark, _TRAJECTORIES)), json_line(traj.to_dict()))

    def write_summary(self, run_id: str, results: Mapping[str, BenchmarkResult]) -> None:
        """Write the scores of all benchmarks."""
        names = ("score", "num_examples", "num_correct", "num_errors")
        summary = {key: {name: getattr(result, name) for name in names} for key, result in results.items()}
        self._write_json(self._run(run_id, _SUMMARY), summary)

    def delete_run(self, run_id: str) -> None:
        """Remove the files of a run, and its folders if they are empty. The index keeps its line."""
        for name in self.storage.list_dir(self._path(self._run(run_id))):
            paths = [self._path(self._run(run_id, name, file)) for file in (_RESULT, _TRAJECTORIES)]
            if existing := [path for path in paths if self.storage.exists(path)]:
                for path in existing:
                    self.storage.remove(path)
                self.storage.remove_dir(self._path(self._run(run_id, name)))
        for file in (_METADATA, _SUMMARY):
            self.storage.remove(self._path(self._run(run_id, file)))
        self.storage.remove_dir(self._path(self._run(run_id)))

    alist_runs = in_thread(list_runs)
    aread_trajectories = in_thread(read_trajectories)
    aread_result = in_thread(read_result)

    def _run(self, run_id: str, *parts: str) -> str:
        if not run_id or "/" in run_id or run_id in (".", ".."):
            raise ConfigurationError(f"run_id={run_id!r}: must be the name of a folder")
        return storage_join(_RUNS, run_id, *parts)
