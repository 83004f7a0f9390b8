"""Where the data that comes with the project lies."""

from pathlib import Path

EXAMPLE_DATA = Path(__file__).resolve().parents[2] / "example_data"
