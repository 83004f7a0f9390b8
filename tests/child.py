"""Python processes that tests start."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def python_path() -> str:
    """PYTHONPATH for a child process: this checkout, then what this process got, where its packages may lie."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
