"""The models that come with the project, by their short names, and the one that is meant where none is given."""

from __future__ import annotations

from pathlib import Path

from tinker_local_backend import environment

EXAMPLE_DATA = Path(__file__).resolve().parents[1] / "example_data"
TINY_CHAT = EXAMPLE_DATA / "tiny_chat"


def default_model(shipped: str = TINY_CHAT.name) -> str:
    """The name in TINKER_DEBATE_BASE_MODEL, else that of a shipped model."""
    return environment.read("TINKER_DEBATE_BASE_MODEL") or shipped


def shipped_models() -> list[str]:
    """The short names of all of them."""
    return sorted(config.parent.name for config in EXAMPLE_DATA.glob("*/config.json"))


def shipped_model(name: str) -> str:
    """The folder of a shipped model (tiny_chat), from whatever folder it is asked for; other names as they are. A folder of
    one's own with such a name is `./tiny_chat`."""
    is_plain = name != "" and "/" not in name and "." not in name
    return str(EXAMPLE_DATA / name) if is_plain and (EXAMPLE_DATA / name / "config.json").is_file() else name
