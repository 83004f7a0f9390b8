"""The files that ship with the project: their paths, short names of models, and the default model."""

from __future__ import annotations

import os
from pathlib import Path

from tinker_local_backend import environment

SHIPPED_FOLDERS = ("example_data", "configs")
DATA_PACKAGE = "tinker_local_data"
_PARENT = Path(__file__).resolve().parents[1]
# setup.py installs the folders inside one package, because their names are too common; a checkout has no such package.
ROOT = installed if (installed := _PARENT / DATA_PACKAGE).is_dir() else _PARENT
EXAMPLE_DATA = ROOT / "example_data"
TINY_CHAT = EXAMPLE_DATA / "tiny_chat"


def default_model(shipped: str = TINY_CHAT.name) -> str:
    """The model named by TINKER_DEBATE_BASE_MODEL, else a shipped one."""
    return environment.read("TINKER_DEBATE_BASE_MODEL") or shipped


def shipped_path(name: str | Path) -> str:
    """The path of a shipped file or folder, by its name in the project (example_data/qa/test.jsonl, configs/mixture.toml), from
    any current folder. A file of that name in the current folder takes precedence. Other names are returned unchanged."""
    path = Path(name)
    known = path.parts[:1] in [(folder,) for folder in SHIPPED_FOLDERS]
    # os.path.exists is False for names that a file system refuses, such as overlong ones.
    return str(ROOT / path if known and not os.path.exists(path) and os.path.exists(ROOT / path) else name)


def shipped_models() -> list[str]:
    """The short names of all shipped models."""
    return sorted(config.parent.name for config in EXAMPLE_DATA.glob("*/config.json"))


def shipped_model(name: str) -> str:
    """The folder of a shipped model, by its short name (tiny_chat) or as `shipped_path`. Other names are returned unchanged;
    write `./tiny_chat` for a local folder of that name."""
    is_plain = name != "" and "/" not in name and "." not in name
    is_shipped = is_plain and os.path.isfile(EXAMPLE_DATA / name / "config.json")
    return str(EXAMPLE_DATA / name) if is_shipped else shipped_path(name)
