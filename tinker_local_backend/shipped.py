"""What comes with the project: where it lies, models by their short names, and the one that is meant where none is given."""

from __future__ import annotations

import os
from pathlib import Path

from tinker_local_backend import environment

SHIPPED_FOLDERS = ("example_data", "configs")
DATA_PACKAGE = "tinker_local_data"
_BESIDE = Path(__file__).resolve().parents[1]
# setup.py puts the folders into a package of their own, since their names are anybody's; a checkout has no such package.
ROOT = installed if (installed := _BESIDE / DATA_PACKAGE).is_dir() else _BESIDE
EXAMPLE_DATA = ROOT / "example_data"
TINY_CHAT = EXAMPLE_DATA / "tiny_chat"


def default_model(shipped: str = TINY_CHAT.name) -> str:
    """The name in TINKER_DEBATE_BASE_MODEL, else that of a shipped model."""
    return environment.read("TINKER_DEBATE_BASE_MODEL") or shipped


def shipped_path(name: str | Path) -> str:
    """Where a shipped file or folder lies, by its name in the project (example_data/qa/test.jsonl, configs/mixture.toml), from
    whatever folder it is asked for. What lies at that name in the current folder comes first; other names as they are."""
    path = Path(name)
    known = path.parts[:1] in [(folder,) for folder in SHIPPED_FOLDERS]
    # os.path's, since a name may be longer than a file system takes, or hold what it refuses: then there is no such file.
    return str(ROOT / path if known and not os.path.exists(path) and os.path.exists(ROOT / path) else name)


def shipped_models() -> list[str]:
    """The short names of all of them."""
    return sorted(config.parent.name for config in EXAMPLE_DATA.glob("*/config.json"))


def shipped_model(name: str) -> str:
    """The folder of a shipped model, by its short name (tiny_chat) or as `shipped_path`; other names as they are. A folder of
    one's own with such a short name is `./tiny_chat`."""
    is_plain = name != "" and "/" not in name and "." not in name
    is_shipped = is_plain and os.path.isfile(EXAMPLE_DATA / name / "config.json")
    return str(EXAMPLE_DATA / name) if is_shipped else shipped_path(name)
