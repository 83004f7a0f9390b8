"""Locations of shipped files: data, and models by their short names."""

import json
from pathlib import Path

from tinker_cookbook import backends
from tinker_cookbook.utils.narrowing import is_object

EXAMPLE_DATA = Path(backends.shipped.EXAMPLE_DATA)
TINY_MODEL = "tiny_model"
"""Key in config.json of the models made by `tools/`; transformers keeps it in copies and merged models."""


def shipped_model(name: str) -> str:
    """The folder of a shipped model (tiny_chat), from any working directory; other names are unchanged. Use
    `./tiny_chat` for a local folder with such a name.
    """
    return backends.shipped.shipped_model(name)


def shipped_path(name: str | Path) -> str:
    """The location of a shipped file or folder, by its name in the project (example_data/conversations.jsonl), from
    any working directory. A local file with this name takes precedence; other names are unchanged.
    """
    return backends.shipped.shipped_path(name)


def is_tiny(model_name: str) -> bool:
    """Whether a model is of the shipped tiny kind, in any folder, according to its config.json. Some defaults
    (learning rate, length of a reply) depend on it, because they would damage or truncate a real model.
    """
    file = Path(shipped_model(model_name)).expanduser() / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # a hub id, or a folder that is rejected when the model is opened
        return False
    return is_object(config) and config.get(TINY_MODEL) is True
