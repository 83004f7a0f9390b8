"""The files of one training run in a storage; docs/runs.md and docs/records.md describe them.

A loop writes turns (`rollouts.parquet`) only to its own folder; this store can read but not write them.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinker_cookbook.rl.rollout_files import FILE_NAME, read_rollouts
from tinker_cookbook.runs.checkpoints import CHECKPOINTS_BASE_NAME, CheckpointRecord, parse_checkpoints
from tinker_cookbook.runs.metadata import CONFIG_BASE_NAME, METADATA_BASE_NAME
from tinker_cookbook.runs.vocabulary import VOCABULARY_BASE_NAME, parse_vocabulary
from tinker_cookbook.stores.incremental import IncrementalReader
from tinker_cookbook.stores.storage import Storage, in_thread, storage_join
from tinker_cookbook.utils.files import (
    json_bytes,
    json_line,
    parse_json_object,
    parse_jsonl,
    to_jsonable,
    without_torn_tail,
)
from tinker_cookbook.utils.loggers import metrics_row
from tinker_cookbook.utils.misc_utils import iteration_name
from tinker_cookbook.utils.ml_log import METRICS_BASE_NAME, naming_fix_of_metrics
from tinker_cookbook.utils.secrets import redact_code, redactor

_ITERATION = re.compile(r"iteration_(\d+)")
_LOGTREE = "_logtree.json"
_SUMMARIES = "_rollout_summaries.jsonl"
TIMING_BASE_NAME = "timing_spans.jsonl"
CODE_DIFF_BASE_NAME = "code.diff"
TRAIN = "train"


@dataclass(frozen=True)
class IterationInfo:
    """The files of a step's folder."""

    iteration: int
    """the step"""
    has_train_rollouts: bool
    has_train_logtree: bool
    eval_labels: tuple[str, ...]
    """transcripts of evaluations, by the `base_name` that `read_logtree` takes"""


class TrainingRunStore:
    """Reads a run, even while it is being written, and accepts a loop's output.

    Methods that begin with `a` are coroutine versions that run in a thread.

    Args:
        storage: the storage of the run.
        prefix: the run's folder there; "" is the root.
    """

    def __init__(self, storage: Storage, prefix: str = "") -> None:
        self.storage, self.prefix = storage, prefix
        self._new_metrics = IncrementalReader(storage, self._path(METRICS_BASE_NAME))
        self._timing = IncrementalReader(storage, self._path(TIMING_BASE_NAME))
        self._whole: set[str] = set()

    def url(self, path: str = "") -> str:
        """The URL of a file of the run."""
        return self.storage.url(self._path(path))

    def read_config(self) -> dict[str, Any] | None:
        """The config of the first start; None: there is none. Raises DataFormatError if it is not a JSON object."""
        content = self._read(CONFIG_BASE_NAME)
        return (
            None if content is None else parse_json_object(content, self.url(CONFIG_BASE_NAME), "it is no run's config")
        )

    def read_metadata(self) -> dict[str, Any] | None:
        """The metadata of the run's start: machine, versions and code; None: there is none. Raises as in `read_config`."""
        content = self._read(METADATA_BASE_NAME)
        name = self.url(METADATA_BASE_NAME)
        return None if content is None else parse_json_object(content, name, "it is no run's metadata")

    def read_vocabulary(self) -> list[bytes] | None:
        """The bytes that each token id adds to a text, by id; None: the run has no vocabulary. Raises DataFormatError
        if it is damaged.
        """
        content = self._read(VOCABULARY_BASE_NAME)
        return None if content is None else parse_vocabulary(content, self.url(VOCABULARY_BASE_NAME))

    def read_metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl. Errors as in `ml_log.read_metrics`."""
        content = self._read(METRICS_BASE_NAME) or b""
        with naming_fix_of_metrics():
            return [line.row for line in parse_jsonl(content, self.url(METRICS_BASE_NAME), tolerate_torn_tail=True)]

    def read_new_metrics(self) -> list[dict[str, Any]]:
        """The rows since the last call on this object; steps that a resumed run repeats are returned again."""
        with naming_fix_of_metrics():
            return self._new_metrics.read()

    def metric_keys(self) -> set[str]:
        """The names of all metrics, without "step"."""
        return {key for row in self.read_metrics() for key in row} - {"step"}

    def read_checkpoints(self) -> list[dict[str, Any]]:
        """The lines of checkpoints.jsonl. Errors as `read_checkpoint_records`."""
        return [record.to_dict() for record in self.read_checkpoint_records()]

    def read_checkpoint_records(self) -> list[CheckpointRecord]:
        """The checkpoints, oldest first. Errors as `checkpoint_utils.load_checkpoints_file`."""
        return parse_checkpoints(self._read(CHECKPOINTS_BASE_NAME) or b"", self.url(CHECKPOINTS_BASE_NAME))

    def list_iterations(self) -> list[IterationInfo]:
        """The steps that have a folder, in order."""
        found = (_ITERATION.fullmatch(name) for name in self.storage.list_dir(self.prefix))
        return [self._iteration(step) for step in sorted(int(match[1]) for match in found if match)]

    def _iteration(self, step: int) -> IterationInfo:
        names = self.storage.list_dir(self._path(iteration_name(step)))
        trees = [name.removesuffix(_LOGTREE) for name in names if name.endswith(_LOGTREE)]
        return IterationInfo(step, FILE_NAME in names, TRAIN in trees, tuple(name for name in trees if name != TRAIN))

    def read_timing(self) -> list[dict[str, Any]]:
        """The lines of timing_spans.jsonl: `{"step": ..., "spans": [...]}`. Raises DataFormatError for a damaged line."""
        self._timing.read()
        return self._timing.records

    def read_rollouts(self, iteration: int, base_name: str = TRAIN) -> list[dict[str, Any]]:
        """A step's rollout summaries, a dict per trajectory (`rl.rollout_logging`); empty if none were written.

        Args:
            base_name: train, or eval_<name>.

        Raises:
            DataFormatError: a line is damaged.
        """
        name = _summaries_path(iteration, base_name)
        return [line.row for line in parse_jsonl(self._read(name) or b"", self.url(name))]

    def read_single_rollout(
        self, iteration: int, group_idx: int, traj_idx: int, base_name: str = TRAIN
    ) -> dict[str, Any] | None:
        """The trajectory of `read_rollouts` with these indices; None: there is none."""
        rows = self.read_rollouts(iteration, base_name)
        return next((row for row in rows if (row["group_idx"], row["traj_idx"]) == (group_idx, traj_idx)), None)

    def read_turns(self, iteration: int) -> list[dict[str, Any]]:
        """The turns of a step's rollouts, as in `rl.rollout_files.read_rollouts`; empty if none were written.

        Raises:
            DataFormatError: the file is damaged, or has another version.
        """
        content = self.read_rollouts_file(iteration)
        return [] if content is None else read_rollouts(self.url(_rollouts_path(iteration)), content)[1]

    def read_rollouts_file(self, iteration: int) -> bytes | None:
        """The bytes of a step's `rollouts.parquet`; None if none was written."""
        return self._read(_rollouts_path(iteration))

    def list_logtrees(self, iteration: int) -> list[str]:
        """The transcripts of a step: `train`, `eval_<name>`."""
        info = self._iteration(iteration)
        return [*([TRAIN] if info.has_train_logtree else []), *info.eval_labels]

    def read_logtree(self, iteration: int, base_name: str = TRAIN) -> dict[str, Any] | None:
        """A transcript as a tree; None: there is none. Raises DataFormatError if it is damaged."""
        name = storage_join(iteration_name(iteration), base_name + _LOGTREE)
        content = self._read(name)
        return None if content is None else parse_json_object(content, self.url(name), "it was not written whole")

    def write_config(self, config: dict[str, Any]) -> None:
        """Write the config unchanged. `ml_log.dump_config` makes it from a config object, without secrets."""
        self.storage.write(self._path(CONFIG_BASE_NAME), json_bytes(config))

    def write_metrics(self, metrics: Mapping[str, float | int | str], step: int | None = None) -> None:
        """Append a line to metrics.jsonl. Errors as `ml_log.JsonLogger.log_metrics`."""
        self._append(METRICS_BASE_NAME, metrics_row(metrics, step))

    def write_checkpoint(self, record: dict[str, Any]) -> None:
        """Append a line to checkpoints.jsonl. Raises CheckpointError if it is not a checkpoint."""
        self._append(CHECKPOINTS_BASE_NAME, CheckpointRecord.from_dict(record).to_dict())

    def write_timing_spans(self, step: int, spans: Sequence[Mapping[str, Any]]) -> None:
        """Append a line to timing_spans.jsonl, unless there are no spans. A span is a dict from
        `trace.IterationWindow`.
        """
        if spans:
            self._append(TIMING_BASE_NAME, {"step": step, "spans": redactor()([dict(span) for span in spans])})

    def write_rollouts(self, iteration: int, records: Sequence[dict[str, Any]], base_name: str = TRAIN) -> None:
        """Write a step's rollout summaries, without secrets, replacing existing ones. Arguments as in `read_rollouts`."""
        without_secrets = redactor()
        lines = b"".join([json_line(without_secrets(to_jsonable(record))) for record in records])
        self.storage.write(self._path(_summaries_path(iteration, base_name)), lines)

    def write_logtree(self, iteration: int, data: dict[str, Any], base_name: str = TRAIN) -> None:
        """Write a transcript, a tree of dicts, without secrets, replacing an existing one."""
        path = storage_join(iteration_name(iteration), base_name + _LOGTREE)
        self.storage.write(self._path(path), json_bytes(redactor()(to_jsonable(data))))

    def write_code_diff(self, diff: str) -> None:
        """Write code.diff, the state of the code (`utils.code_state`), without secrets."""
        self.storage.write(self._path(CODE_DIFF_BASE_NAME), redact_code(diff).encode())

    def truncate_metrics(self, from_step: int) -> int:
        """Drop the rows of metrics.jsonl from this step on, for a run that repeats them; return how many were dropped.

        A copy of the original file is kept as `metrics.jsonl.pre_resume_<step>`. Rows without a step stay.
        """
        path = self._path(METRICS_BASE_NAME)
        content = self._read(METRICS_BASE_NAME) or b""
        lines = parse_jsonl(content, self.url(METRICS_BASE_NAME), tolerate_torn_tail=True)
        rows = [line.row for line in lines]
        kept = [row for row in rows if not (isinstance(row.get("step"), int) and row["step"] >= from_step)]
        if len(kept) < len(rows):
            self.storage.write(f"{path}.pre_resume_{from_step:06d}", content)
            self.storage.write(path, b"".join([json_line(row) for row in kept]))
        return len(rows) - len(kept)

    aread_config = in_thread(read_config)
    aread_metrics = in_thread(read_metrics)
    aread_new_metrics = in_thread(read_new_metrics)
    aread_rollouts = in_thread(read_rollouts)
    aread_checkpoints = in_thread(read_checkpoints)
    aread_timing = in_thread(read_timing)
    aread_logtree = in_thread(read_logtree)
    awrite_metrics = in_thread(write_metrics)
    awrite_checkpoint = in_thread(write_checkpoint)

    def _append(self, name: str, row: dict[str, Any]) -> None:
        line, path = json_line(row), self._path(name)
        if path not in self._whole:
            # Before this object's first line, because a killed writer may have left a torn one.
            content = self._read(name) or b""
            if (whole := without_torn_tail(content)) != content:
                self.storage.write(path, whole)
            self._whole.add(path)
        self.storage.append(path, line)

    def _read(self, name: str) -> bytes | None:
        path = self._path(name)
        return None if self.storage.stat(path) is None else self.storage.read(path)

    def _path(self, name: str) -> str:
        return storage_join(self.prefix, name)


def _rollouts_path(iteration: int) -> str:
    return storage_join(iteration_name(iteration), FILE_NAME)


def _summaries_path(iteration: int, base_name: str) -> str:
    return storage_join(iteration_name(iteration), base_name + _SUMMARIES)
