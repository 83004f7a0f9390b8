"""All rollouts of a step in one compact file, `rollouts.parquet`, one row per turn: enough to view, replay and judge
them again.

The columns are those of `SCHEMA`, described in docs/records.md. A prompt is stored as the part that it adds to the
turn before. The run's settings and the groups that were given up are in the file's metadata, under `run` and
`failed_groups`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from tinker_cookbook.exceptions import DataFormatError
from tinker_cookbook.rl.data_processing import DatumMetadata
from tinker_cookbook.rl.rollouts import FailedGroup
from tinker_cookbook.rl.types import PARSE_ERROR_MASKED_METRIC_KEY, TrajectoryGroup
from tinker_cookbook.utils.files import to_jsonable, write_bytes
from tinker_cookbook.utils.lazy import np, tinker
from tinker_cookbook.utils.secrets import redactor

if TYPE_CHECKING:
    import pyarrow

FILE_NAME = "rollouts.parquet"
SCHEMA_VERSION = 1
MEDIA = -1
"""Stands for a position of an image or other media in a prompt."""

_LISTS = {"prompt": "int32", "completion": "int32"} | dict.fromkeys(
    ("sampled_logprobs", "trainer_logprobs", "advantages"), "float32"
)
_VALUES = {
    "group": "int32", "member": "int32", "turn": "int32", "tags": "string", "dataset_index": "int32", "role": "string",
    "sampling_client_step": "int32", "prompt_shared": "int32", "masked": "bool", "stop_reason": "string", "reward": "float64",
    "metrics": "string", "logs": "string", "total_reward": "float64", "final_reward": "float64",
    "member_advantage": "float64", "trained": "bool", "rollout_stop_reason": "string", "verdict": "string",
    "group_metrics": "string", "info": "string",
}  # fmt: skip
COLUMNS = (*_VALUES, *_LISTS)


Advantages: TypeAlias = Sequence[float] | Sequence[Sequence[float]]
"""Of each member of a group; or of each of its turns with credit=turn."""


@dataclass(frozen=True)
class StepRollouts:
    """The rollouts of a step or an evaluation and their results. All rollout files are made from this.

    Groups are in the order in which they were sampled.
    """

    groups_P: Sequence[TrajectoryGroup | FailedGroup]
    versions_P: Sequence[int | None]
    """optimizer updates that each group's policy had seen; None: not known"""
    advantages_P: Sequence[Advantages] = ()
    """of each member of the successful groups, in order; empty for an evaluation"""
    data_D: Sequence[tinker.Datum] = ()
    """what was trained on"""
    metadata_D: Sequence[DatumMetadata] = ()
    """group_idx counts the successful groups"""
    trainer_logprobs_D: Sequence[np.ndarray | None] = ()
    """of the targets of each datum, before the update; None for one whose pass was skipped; empty: the update failed"""
    run: Mapping[str, Any] = field(default_factory=dict)
    """step, model and settings"""

    def first(self, count: int) -> StepRollouts:
        """Only the first groups, without the training data."""
        return StepRollouts(self.groups_P[:count], self.versions_P[:count], self.advantages_P)

    def groups(self) -> Iterator[tuple[TrajectoryGroup | FailedGroup, int | None, Advantages | None]]:
        """Each group with the number of updates that its policy had seen and the advantages of its members."""
        advantages = iter(self.advantages_P)
        for group, version in zip(self.groups_P, self.versions_P, strict=True):
            yield group, version, None if isinstance(group, FailedGroup) else next(advantages, None)


def run_settings(config: Any, step: int, learning_rate: float, loss_fn: Any) -> dict[str, Any]:
    """`StepRollouts.run` for a loop whose config has these fields."""
    return {
        "step": step,
        "model": config.model_name,
        "max_tokens_per_turn": config.max_tokens,
        "temperature": config.temperature,
        "learning_rate": learning_rate,
        "loss_fn": loss_fn,
        "seed": config.seed,
    }


def write_rollouts(path: Path, step: StepRollouts, records: Sequence[str] = ()) -> None:
    """Write the file atomically, and create its folder. `records`: the JSON files of single groups that the step has."""
    import pyarrow
    from pyarrow import parquet

    rows = list(_rows(step))
    arrays = {name: _list_column([row[name] for row in rows], kind) for name, kind in _LISTS.items()}
    for name, kind in _VALUES.items():
        arrays[name] = pyarrow.array([row[name] for row in rows], type=pyarrow.type_for_alias(kind))
    failed = [
        {"group": i, "tags": group.tags, "errors": [[error.error_type, error.error_message] for error in group.errors]}
        for i, group in enumerate(step.groups_P)
        if isinstance(group, FailedGroup)
    ]
    about = {"schema_version": SCHEMA_VERSION, "run": step.run, "failed_groups": failed, "records": records}
    metadata = {key: json.dumps(redactor()(to_jsonable(value))) for key, value in about.items()}
    table = pyarrow.table({name: arrays[name] for name in COLUMNS}).replace_schema_metadata(metadata)
    split = [f"{name}.list.element" for name in _LISTS if name != "advantages"]
    buffer = pyarrow.BufferOutputStream()
    # Byte-stream split compresses ids and logprobs well, a dictionary repeated values. Both options also take a list of
    # columns.
    parquet.write_table(
        table,
        buffer,
        compression="zstd",
        use_dictionary=[*_VALUES, "advantages.list.element"],  # pyright: ignore[reportArgumentType]
        use_byte_stream_split=split,  # pyright: ignore[reportArgumentType]
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, buffer.getvalue())


def read_about(path: Path | str, content: bytes | None = None) -> dict[str, Any]:
    """Read the run's metadata, without the turns. `content`: as in `read_rollouts`.

    Raises:
        DataFormatError: the file is damaged, or has another version.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        metadata = parquet.read_schema(path if content is None else pyarrow.BufferReader(content)).metadata or {}
        about = {key.decode(): json.loads(value) for key, value in metadata.items() if key != b"ARROW:schema"}
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise DataFormatError(f"{path}: cannot be read as rollouts ({error})") from error
    if about.get("schema_version") != SCHEMA_VERSION:
        raise DataFormatError(f"{path}: schema_version {about.get('schema_version')} is not {SCHEMA_VERSION}")
    return about


def read_rollouts(path: Path | str, content: bytes | None = None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Read the run's metadata and the turns in order, each a dict of COLUMNS with its whole `prompt`.

    Lists of numbers become numpy arrays, JSON texts are parsed, `tags` is a list.

    Args:
        path: the file.
        content: the bytes of a file that is not on disk; `path` is then only used in errors.

    Raises:
        DataFormatError: the file is damaged, or has another version.
    """
    import pyarrow
    from pyarrow import parquet

    about = read_about(path, content)
    try:
        table = parquet.read_table(path if content is None else pyarrow.BufferReader(content))
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise DataFormatError(f"{path}: cannot be read as rollouts ({error})") from error
    if missing := [name for name in COLUMNS if name not in table.column_names]:
        raise DataFormatError(f"{path}: has no column {', '.join(missing)}")
    columns = {name: _values(table[name], name) for name in COLUMNS}
    rows = [{name: columns[name][i] for name in COLUMNS} for i in range(table.num_rows)]
    before = np.zeros(0, dtype=np.int32)
    for row in rows:
        for name in ("tags", "metrics", "logs", "group_metrics", "info"):
            row[name] = json.loads(row[name])
        row["prompt"] = np.concatenate([before[: row["prompt_shared"]], row["prompt"]])
        before = np.concatenate([row["prompt"], row["completion"]])
    return about, rows


def _rows(step: StepRollouts) -> Iterator[dict[str, Any]]:
    of_member: dict[tuple[int, int], list[int]] = {}
    for d, meta in enumerate(step.metadata_D):
        of_member.setdefault((meta["group_idx"], meta["traj_idx"]), []).append(d)
    successful, hide = 0, redactor()

    def text(value: Mapping[str, Any]) -> str:
        return json.dumps(hide(to_jsonable(value)), ensure_ascii=False)

    for index, (group, version, advantages_G) in enumerate(step.groups()):
        if isinstance(group, FailedGroup):
            continue
        assert advantages_G is not None, "of an evaluation, not of a step"
        for member in group.members():
            transitions, advantage = member.trajectory.transitions, advantages_G[member.index]
            of_every_turn = {
                "group": index,
                "member": member.index,
                "tags": json.dumps(group.tags),
                "dataset_index": group.dataset_index,
                "role": member.role,
                "sampling_client_step": version,
                "total_reward": member.total_reward,
                "final_reward": member.final_reward,
                "trained": member.trained,
                "rollout_stop_reason": member.trajectory.stop_reason,
                "verdict": member.info.get("verdict"),
                "group_metrics": text(member.metrics),
                "info": text(member.info),
            }
            ids_T = [
                (np.array(_ids(made.ob), dtype=np.int32), np.array(made.ac.tokens, dtype=np.int32))
                for made in transitions
            ]
            masked_T = [bool(made.metrics.get(PARSE_ERROR_MASKED_METRIC_KEY)) for made in transitions]
            positions = _token_positions(step, of_member.get((successful, member.index), []), ids_T, masked_T)
            before = np.zeros(0, dtype=np.int32)
            for turn, (transition, (prompt, completion)) in enumerate(zip(transitions, ids_T, strict=True)):
                masked = masked_T[turn]
                trained = (
                    (None, None)
                    if masked or turn not in positions
                    else _trained(step, *positions[turn], len(completion))
                )
                common = min(len(prompt), len(before))
                differs = np.flatnonzero(prompt[:common] != before[:common])
                shared = int(differs[0]) if len(differs) else common
                before = np.concatenate([prompt, completion])
                yield of_every_turn | {
                    "turn": turn,
                    "member_advantage": advantage[turn] if isinstance(advantage, Sequence) else advantage,
                    "prompt_shared": shared,
                    "prompt": prompt[shared:],
                    "completion": completion,
                    "sampled_logprobs": np.array(transition.ac.maybe_logprobs or [], dtype=np.float32),
                    "trainer_logprobs": trained[0],
                    "advantages": trained[1],
                    "masked": masked,
                    "stop_reason": transition.ac.stop_reason,
                    "reward": transition.reward,
                    "metrics": text(transition.metrics),
                    "logs": text(transition.logs),
                }
        successful += 1


def _token_positions(
    step: StepRollouts,
    indices: Sequence[int],
    ids_T: Sequence[tuple[np.ndarray, np.ndarray]],
    masked_T: Sequence[bool],
) -> dict[int, tuple[int, int]]:
    """For each trained turn, the index of its datum and the position of its first token there.

    Turns merge into sequences as in `trajectory_to_data`. A sequence whose turns are all masked has no datum, even if
    another has the same tokens; any other may have none either, if all its advantages were zero.
    """
    sequences: list[tuple[np.ndarray, dict[int, int]]] = []
    for turn, (prompt, completion) in enumerate(ids_T):
        if not len(completion):
            continue
        before = sequences[-1][0] if sequences else None
        if before is None or not np.array_equal(prompt[: len(before)], before):
            sequences.append((prompt, {}))
        starts = sequences[-1][1] | {turn: len(prompt)}
        sequences[-1] = (np.concatenate([prompt, completion]), starts)
    positions: dict[int, tuple[int, int]] = {}
    remaining = list(indices)
    for sequence, starts in sequences:
        if not remaining:
            break
        if all(masked_T[turn] for turn in starts):
            continue
        datum = step.data_D[remaining[0]]
        targets = datum.loss_fn_inputs["target_tokens"].to_numpy()
        if np.array_equal(targets, sequence[1:]) and _ids(datum.model_input, 1) == sequence[:1].tolist():
            d = remaining.pop(0)
            positions |= {turn: (d, start) for turn, start in starts.items()}
    return positions


def _trained(step: StepRollouts, d: int, start: int, count: int) -> tuple[np.ndarray | None, np.ndarray]:
    """Trainer's logprobs (None if missing) and advantages of `count` tokens of a datum. The very first token has no
    target.
    """
    first = max(0, start - 1)  # position i predicts token i + 1
    advantages = step.data_D[d].loss_fn_inputs["advantages"].to_numpy()[first : start - 1 + count]
    missing = count - len(advantages)
    advantages = np.concatenate([np.zeros(missing, dtype=np.float32), advantages])
    logprobs = step.trainer_logprobs_D[d] if step.trainer_logprobs_D else None
    if logprobs is None:
        return None, advantages
    logprobs = logprobs[first : start - 1 + count]
    return np.concatenate([np.full(missing, np.nan, dtype=np.float32), logprobs]), advantages


def _ids(observation: tinker.ModelInput, count: int | None = None) -> list[int]:
    """All ids, or the first `count`."""
    ids: list[int] = []
    for chunk in observation.chunks:
        ids += chunk.tokens[:count] if isinstance(chunk, tinker.EncodedTextChunk) else [MEDIA] * chunk.length
        if count is not None and len(ids) >= count:
            break
    return ids[:count]


def _list_column(values: Sequence[np.ndarray | None], kind: str) -> pyarrow.Array:
    import pyarrow

    lengths = [0 if value is None else len(value) for value in values]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    flat = np.concatenate([np.zeros(0, dtype=kind), *(value for value in values if value is not None)]).astype(kind)
    missing = pyarrow.array([value is None for value in values], type=pyarrow.bool_())  # also if there are no rows
    return pyarrow.ListArray.from_arrays(pyarrow.array(offsets), pyarrow.array(flat), mask=missing)


def _values(column: pyarrow.ChunkedArray, name: str) -> list[Any]:
    if name not in _LISTS:
        return column.to_pylist()
    return [None if not value.is_valid else value.values.to_numpy(zero_copy_only=False) for value in column]
