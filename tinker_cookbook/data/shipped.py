"""Where what comes with the project lies: data, and models by their short names."""

from pathlib import Path

EXAMPLE_DATA = Path(__file__).resolve().parents[2] / "example_data"


def shipped_model(name: str) -> str:
    """The folder of a model that comes with the project (tiny_chat), from whatever folder it is asked for; other names as
    they are. A folder of one's own with such a name is `./tiny_chat`."""
    is_plain = name != "" and "/" not in name and "." not in name
    return str(EXAMPLE_DATA / name) if is_plain and (EXAMPLE_DATA / name / "config.json").is_file() else name
