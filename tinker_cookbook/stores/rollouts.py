"""`rollouts.parquet`: all rollouts of a step in one compact file, a row per turn: enough to view, replay and judge them
again.

The columns are described in docs/records.md. A prompt is stored as the part that it adds to the turn before. The run's
settings and the failed groups are in the file's metadata, under `run` and `failed_groups`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tinker_cookbook.exceptions import DataFormatError
from tinker_cookbook.stores.columns import arrays_of, lists, numbers, read_file, texts
from tinker_cookbook.stores.images import ShownImage
from tinker_cookbook.utils.files import to_jsonable
from tinker_cookbook.utils.lazy import np
from tinker_cookbook.utils.secrets import redactor

FILE_NAME = "rollouts.parquet"
SCHEMA_VERSION = 1
MEDIA = -1
"""The id at positions of images or other media in a prompt. The column `images` says which image it is."""

_LISTS = {"prompt": "int32", "completion": "int32", "weight_versions": "int32"} | dict.fromkeys(
    ("sampled_logprobs", "trainer_logprobs", "advantages"), "float32"
)
_VALUES = {
    "group": "int32", "member": "int32", "turn": "int32", "tags": "string", "dataset_index": "int32", "role": "string",
    "sampling_client_step": "int32", "prompt_shared": "int32", "masked": "bool", "stop_reason": "string", "reward": "float64",
    "metrics": "string", "logs": "string", "total_reward": "float64", "final_reward": "float64",
    "member_advantage": "float64", "trained": "bool", "rollout_stop_reason": "string", "verdict": "string",
    "group_metrics": "string", "info": "string", "images": "string", "env_seconds": "float64",
}  # fmt: skip
COLUMNS = (*_VALUES, *_LISTS)
_LATER = ("weight_versions", "images", "env_seconds")
"""Columns that files of earlier versions lack; their values are read as None."""


def rollouts_file(rows: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> bytes:
    """The content of a file.

    Args:
        rows: a dict of COLUMNS per turn, its `prompt` without the first `prompt_shared` ids, its `images` (ShownImage, or None)
            only those in the stored part.
        about: the metadata: `run`, `failed_groups` and `records`. Secrets are hidden.
    """
    import pyarrow
    from pyarrow import parquet

    rows = [{**row, "images": json.dumps(images) if (images := row.get("images")) else None} for row in rows]
    arrays = {name: lists([row[name] for row in rows], kind) for name, kind in _LISTS.items()}
    for name, kind in _VALUES.items():
        arrays[name] = (texts if kind == "string" else numbers)([row[name] for row in rows], kind)
    about = {"schema_version": SCHEMA_VERSION, **about}
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
    return buffer.getvalue().to_pybytes()


def read_about(path: Path | str, content: bytes | None = None) -> dict[str, Any]:
    """Read the run's metadata, without the turns. `content`: as in `read_rollouts`.

    Raises:
        DataFormatError: the file is damaged, or has another version.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        metadata: dict[bytes, bytes] = (
            parquet.read_schema(path if content is None else pyarrow.BufferReader(content)).metadata or {}
        )
        about = {key.decode(): json.loads(value) for key, value in metadata.items() if key != b"ARROW:schema"}
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise DataFormatError(f"{path}: cannot be read as rollouts ({error})") from error
    if about.get("schema_version") != SCHEMA_VERSION:
        raise DataFormatError(f"{path}: schema_version {about.get('schema_version')} is not {SCHEMA_VERSION}")
    return about


def read_rollouts(path: Path | str, content: bytes | None = None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Read the run's metadata and the turns in order, each a dict of COLUMNS with its full `prompt` and all its `images`.

    Lists of numbers become numpy arrays, JSON texts are parsed, `tags` is a list, and so is `images`, of ShownImage.

    Args:
        path: the file.
        content: the bytes of a file that is not on disk; `path` is then only used in errors.

    Raises:
        DataFormatError: the file is damaged, or has another version.
    """
    import pyarrow

    about = read_about(path, content)
    try:
        table = read_file(path if content is None else pyarrow.BufferReader(content))
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise DataFormatError(f"{path}: cannot be read as rollouts ({error})") from error
    absent = [name for name in COLUMNS if name not in table.column_names]
    if missing := [name for name in absent if name not in _LATER]:
        raise DataFormatError(f"{path}: has no column {', '.join(missing)}")

    def values_of(name: str) -> list[Any]:
        return arrays_of(table[name]) if name in _LISTS else table[name].to_pylist()

    columns = {name: [None] * table.num_rows if name in absent else values_of(name) for name in COLUMNS}
    rows = [{name: columns[name][i] for name in COLUMNS} for i in range(table.num_rows)]
    before, images = np.zeros(0, dtype=np.int32), list[ShownImage]()
    for row in rows:
        for name in ("tags", "metrics", "logs", "group_metrics", "info"):
            row[name] = json.loads(row[name])
        row["prompt"] = np.concatenate([before[: row["prompt_shared"]], row["prompt"]])
        before = np.concatenate([row["prompt"], row["completion"]])
        images = [image for image in images if image["at"] < row["prompt_shared"]] + json.loads(row["images"] or "[]")
        row["images"] = images
    return about, rows
