"""The distribution tinker-cookbook has a package of the same name. Beside it, or under its files, one sentence says so."""

import shutil
import subprocess
import sys
from pathlib import Path

from tests.waiting import HANG_SECONDS

ROOT = Path(__file__).parents[1]


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """In `folder`, whose modules come before those of this checkout."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={"PYTHONPATH": f"{folder}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )


def test_a_recipe_over_their_files_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "tinker_cookbook").mkdir()
    (tmp_path / "tinker_cookbook" / "__init__.py").write_text('__version__ = "0.6.1"\n')
    done = python(tmp_path, "-m", "recipes.rl_basic")
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    assert f"{tmp_path / 'tinker_cookbook'} holds the files of the distribution tinker-cookbook" in done.stderr
    assert "pip uninstall tinker-cookbook" in done.stderr


def test_our_files_beside_theirs_warn(tmp_path: Path) -> None:
    (tmp_path / "tinker_cookbook").mkdir()
    for name in ("__init__.py", "exceptions.py"):
        shutil.copy(ROOT / "tinker_cookbook" / name, tmp_path / "tinker_cookbook" / name)
    code = "import tinker_cookbook; print(tinker_cookbook.__file__)"
    alone = python(tmp_path, "-c", code)
    (tmp_path / "tinker_cookbook-0.6.1.dist-info").mkdir()
    beside = python(tmp_path, "-c", code)
    assert alone.stdout == beside.stdout == f"{tmp_path}/tinker_cookbook/__init__.py\n"
    assert alone.stderr == ""
    assert "UserWarning: the distribution tinker-cookbook is installed next to this project" in beside.stderr
