"""What the committed recordings say of tinker-cookbook 0.6.1 is what its wheel does: renderers, and its table of models.

tests/reference compares this library with the recordings on every run of the tests; here they are made anew.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.child import ROOT
from tests.ecosystem.package import NEEDED, IndexUnreachableError, install, unpack_wheel
from tests.reference import write_tokenizers
from tests.reference.compare import GOLDEN
from tests.reference.subjects import FAMILIES
from tests.waiting import HANG_SECONDS

pytestmark = pytest.mark.ecosystem

VERSION = "0.6.1"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with recordings of today, made where the tests and the wheel can be imported and this library cannot."""
    alone = tmp_path_factory.mktemp("alone")
    try:
        library = unpack_wheel(alone / "library", VERSION)
        install(alone / "packages", NEEDED)
    except IndexUnreachableError as error:
        pytest.skip(str(error))
    (alone / "tests").symlink_to(ROOT / "tests")
    write_tokenizers.main(alone / "tokenizers")
    (alone / "golden").mkdir()
    paths = [library, alone, alone / "packages"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.reference.record", "tokenizers", "golden"],
        cwd=alone,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=2 * HANG_SECONDS,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return alone / "golden"


@pytest.mark.parametrize("name", [*FAMILIES, "models"])
def test_the_wheel_does_what_is_recorded(name: str, recorded: Path) -> None:
    found, told = ((folder / f"{name}.json").read_text(encoding="utf-8") for folder in (recorded, GOLDEN))
    assert json.loads(found) == json.loads(told)
