"""Every rollout of a step in one compact file, `rollouts.parquet`, a row per turn: enough to view, replay and judge it again.

The columns are those of `SCHEMA`; docs/records.md says what each holds. Prompts are stored as what they add to the turn
before. Settings of the run and groups that were given up are in the file's own metadata, under `run` and `failed_groups`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinker_cookbook.exceptions import DataFormatError
from tinker_cookbook.rl.data_processing import DatumMetadata
from tinker_cookbook.rl.rollouts import FailedGroup
from tinker_cookbook.rl.types import PARSE_ERROR_MASKED_METRIC_KEY, TrajectoryGroup, Transition
from tinker_cookbook.utils.files import to_jsonable, write_bytes
from tinker_cookbook.utils.lazy import np, tinker

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


@dataclass(frozen=True)
class StepRollouts:
    """What a step sampled and what became of it. Lists of groups are in the order in which they were sampled."""

    groups_P: Sequence[TrajectoryGroup | FailedGroup]
    versions_P: Sequence[int]
    """optimizer updates that each group's policy had seen"""
    advantages_P: Sequence[Sequence[float]] = ()
    """of each member of the groups that came through, in order"""
    data_D: Sequence[tinker.Datum] = ()
    """what was trained on"""
    metadata_D: Sequence[DatumMetadata] = ()
    """group_idx counts the groups that came through"""
    trainer_logprobs_D: Sequence[np.ndarray] | None = None
    """of the targets of each datum, before the update; None: the update failed, or there was none"""
    run: Mapping[str, Any] = field(default_factory=dict)
    """step, model and settings"""


def write_rollouts(path: Path, step: StepRollouts) -> None:
    """Write the file, whole or not at all."""
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
    about = {"schema_version": SCHEMA_VERSION, "run": step.run, "failed_groups": failed}
    metadata = {key: json.dumps(to_jsonable(value)) for key, value in about.items()}
    table = pyarrow.table({name: arrays[name] for name in COLUMNS}).replace_schema_metadata(metadata)
    buffer = pyarrow.BufferOutputStream()
    # Ids and logprobs compress by their bytes of equal weight; what repeats, by a dictionary.
    parquet.write_table(
        table,
        buffer,
        compression="zstd",
        use_dictionary=[*_VALUES, "advantages.list.element"],
        use_byte_stream_split=[f"{name}.list.element" for name in _LISTS if name != "advantages"],
    )
    write_bytes(path, buffer.getvalue())


def read_rollouts(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What is said of the run, and the turns in order, each a dict of COLUMNS with its whole `prompt`.

    Lists of numbers are numpy arrays, JSON texts are parsed, `tags` is a list.

    Raises:
        DataFormatError: the file is damaged, or of another version.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.read_table(path)
        about = {key.decode(): json.loads(value) for key, value in (table.schema.metadata or {}).items()}
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise DataFormatError(f"{path}: cannot be read as rollouts ({error})") from error
    if about.get("schema_version") != SCHEMA_VERSION:
        raise DataFormatError(f"{path}: schema_version {about.get('schema_version')} is not {SCHEMA_VERSION}")
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
    came_through = 0
    for index, (group, version) in enumerate(zip(step.groups_P, step.versions_P, strict=True)):
        if isinstance(group, FailedGroup):
            continue
        advantages_G = step.advantages_P[came_through]
        for i, trajectory in enumerate(group.trajectories_G):
            info = group.member_info_G[i] if group.member_info_G else {}
            member = {
                "group": index,
                "member": i,
                "tags": json.dumps(group.tags),
                "dataset_index": group.dataset_index,
                "role": group.get_roles()[i],
                "sampling_client_step": version,
                "total_reward": group.get_total_rewards()[i],
                "final_reward": group.final_rewards_G[i],
                "member_advantage": advantages_G[i],
                "trained": group.is_trained()[i],
                "rollout_stop_reason": trajectory.stop_reason,
                "verdict": info.get("verdict"),
                "group_metrics": _text(group.metrics_G[i]),
                "info": _text(info),
            }
            trained = _Trained(step, of_member.get((came_through, i), []))
            before = np.zeros(0, dtype=np.int32)
            for turn, transition in enumerate(trajectory.transitions):
                row, before = _turn(transition, before, trained)
                yield member | {"turn": turn} | row
        came_through += 1


def _turn(transition: Transition, before: np.ndarray, trained: _Trained) -> tuple[dict[str, Any], np.ndarray]:
    prompt = np.array(_ids(transition.ob), dtype=np.int32)
    completion = np.array(transition.ac.tokens, dtype=np.int32)
    common = min(len(prompt), len(before))
    differs = np.flatnonzero(prompt[:common] != before[:common])
    shared = int(differs[0]) if len(differs) else common
    masked = bool(transition.metrics.get(PARSE_ERROR_MASKED_METRIC_KEY))
    trainer_logprobs, advantages = (None, None) if masked else trained.take(prompt, completion)
    row = {
        "prompt_shared": shared,
        "prompt": prompt[shared:],
        "completion": completion,
        "sampled_logprobs": np.array(transition.ac.maybe_logprobs or [], dtype=np.float32),
        "trainer_logprobs": trainer_logprobs,
        "advantages": advantages,
        "masked": masked,
        "stop_reason": transition.ac.stop_reason,
        "reward": transition.reward,
        "metrics": _text(transition.metrics),
        "logs": _text(transition.logs),
    }
    return row, np.concatenate([prompt, completion])


class _Trained:
    """What the datums of a member say of its turns, asked turn by turn. A turn may have none: its advantages were all zero."""

    def __init__(self, step: StepRollouts, own: Sequence[int]):
        self._step, self._own, self._told = step, list(own), 0

    def take(self, prompt: np.ndarray, completion: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Trainer's logprobs and advantages of a turn's tokens; None where it was not trained on.

        The datum of a turn begins with its prompt and goes on with its tokens, which are trained on there.
        """
        trained = slice(len(prompt) - 1, len(prompt) - 1 + len(completion))  # position i predicts token i + 1
        for place, d in enumerate(self._own if len(prompt) and len(completion) else ()):
            if place == 0 and len(prompt) < self._told:
                continue  # another turn, with the same words as one before
            inputs = self._step.data_D[d].loss_fn_inputs
            targets, mask = inputs["target_tokens"].to_numpy(), inputs["mask"].to_numpy()
            if not (np.array_equal(targets[trained], completion) and (mask[trained] > 0).all()):
                continue
            if self._step.data_D[d].model_input.to_ints()[: len(prompt)] != prompt.tolist():
                continue
            self._own, self._told = self._own[place:], len(prompt) + len(completion)
            logprobs = self._step.trainer_logprobs_D
            return None if logprobs is None else logprobs[d][trained], inputs["advantages"].to_numpy()[trained]
        return None, None


def _ids(observation: tinker.ModelInput) -> list[int]:
    ids: list[int] = []
    for chunk in observation.chunks:
        ids += chunk.tokens if isinstance(chunk, tinker.EncodedTextChunk) else [MEDIA] * chunk.length
    return ids


def _text(value: Mapping[str, Any]) -> str:
    return json.dumps(to_jsonable(value), ensure_ascii=False)


def _list_column(values: Sequence[np.ndarray | None], kind: str) -> pyarrow.Array:
    import pyarrow

    lengths = [0 if value is None else len(value) for value in values]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    flat = np.concatenate([np.zeros(0, dtype=kind), *(value for value in values if value is not None)]).astype(kind)
    missing = pyarrow.array([value is None for value in values])
    return pyarrow.ListArray.from_arrays(pyarrow.array(offsets), pyarrow.array(flat), mask=missing)


def _values(column: pyarrow.ChunkedArray, name: str) -> list[Any]:
    if name not in _LISTS:
        return column.to_pylist()
    return [None if not value.is_valid else value.values.to_numpy(zero_copy_only=False) for value in column]
