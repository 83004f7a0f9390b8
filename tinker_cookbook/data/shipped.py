"""Where what comes with the project lies: data, and models by their short names."""

import json
from pathlib import Path

from tinker_cookbook import backends

EXAMPLE_DATA = backends.example_data()
TINY_MODEL = "tiny_model"
"""Key of the config.json of the models that `tools/` makes; transformers keeps it in copies and merged models."""


def shipped_model(name: str) -> str:
    """The folder of a model that comes with the project (tiny_chat), from whatever folder it is asked for; other names as
    they are. A folder of one's own with such a name is `./tiny_chat`."""
    return backends.shipped_model(name)


def shipped_path(name: str | Path) -> str:
    """Where a shipped file or folder lies, by its name in the project (example_data/conversations.jsonl), from whatever folder
    it is asked for. What lies at that name in the current folder comes first; other names as they are."""
    return backends.shipped_path(name)


def is_tiny(model_name: str) -> bool:
    """Whether a model is of the kind that ships, in whatever folder: its config.json says so. Defaults that would wreck or cut
    short a real model (learning rate, length of a reply) go by this."""
    file = Path(shipped_model(model_name)).expanduser() / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # a hub id, or a folder that is refused where the model is opened
        return False
    return isinstance(config, dict) and config.get(TINY_MODEL) is True
