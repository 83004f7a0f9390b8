"""The example notebook runs in a kernel, whose event loop the runs share, and shows each step once."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.child import ROOT, python_path
from tests.waiting import HANG_SECONDS

pytestmark = pytest.mark.notebook


def shown(cell: Any) -> str:
    """What stands below a cell: its streams, and the text of what it displays."""
    texts = (output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs)
    return "\n".join(texts)


def test_the_notebook_runs_and_shows_each_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat  # pyright: ignore[reportMissingImports] - of the extra `notebook`
    from nbclient import NotebookClient  # pyright: ignore[reportMissingImports]

    monkeypatch.setenv("PYTHONPATH", python_path())
    monkeypatch.setenv("TINKER_LOCAL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.outputs for cell in notebook.cells if cell.cell_type == "code"), "it is kept without outputs"
    NotebookClient(notebook, timeout=int(HANG_SECONDS), resources={"metadata": {"path": os.fspath(tmp_path)}}).execute()
    below = [shown(cell) for cell in notebook.cells if cell.cell_type == "code"]
    for cell, steps in ((below[0], 6), (below[2], 3)):
        assert [cell.count(f"step {step:4d}  ") for step in range(steps)] == [1] * steps, cell
        assert cell.count("Files: ") == 1 and "Traceback" not in cell
    assert "6 steps; held-out nll before and after: [" in below[1]
    assert below[3].count("tinker://") == 1 and below[4].strip()
