"""The names of the releases are here, at their path: as many as the last time, at least."""

from pathlib import Path

import pytest

from tests.ecosystem.names import absent, public_names
from tests.ecosystem.package import IndexUnreachableError, unpack_wheel

pytestmark = pytest.mark.ecosystem

HERE = {"0.6.1": (749, 624), "0.5.8": (719, 594)}
"""Names of a release, and how many of them can be imported. docs/ecosystem.md says why the others cannot.

What a module takes from a private one and uses itself is none of its names. Counted with those of `__all__` and of such imports
0.6.1 has 752: three graders of eval.benchmarks more (extract_gsm8k_answer, check_gsm8k, extract_mcq_answer), which are here too.
"""


@pytest.mark.parametrize("version", HERE)
def test_names_are_at_their_path(version: str, tmp_path: Path) -> None:
    try:
        wheel = unpack_wheel(tmp_path, version)
    except IndexUnreachableError as error:
        pytest.skip(str(error))
    names = public_names(wheel)
    every, here = HERE[version]
    assert sum(map(len, names.values())) == every
    missing = absent(names)
    assert every - sum(map(len, missing.values())) >= here, "\n".join(f"{m}: {n}" for m, n in missing.items())


def test_what_counts_as_a_name(tmp_path: Path) -> None:
    package = tmp_path / "tinker_cookbook"
    (package / "recipes").mkdir(parents=True)
    (package / "recipes" / "a.py").write_text("def left_out(): ...\n")
    (package / "a_test.py").write_text("def test_a(): ...\n")
    (package / "_private.py").write_text("def hidden(): ...\n")
    (package / "__init__.py").write_text('from .a import B\n__all__ = ["B", "gone"]\n')
    lines = [
        "from tinker_cookbook._private import hidden, shown",
        "import json",
        "logger, T = 1, 2",
        "logger = json",
        "A: int = hidden()",
        "_own = 3",
        "class B: ...",
        "async def c(): ...",
    ]
    (package / "a.py").write_text("\n".join(lines) + "\n")
    names = public_names(tmp_path)
    assert names == {"tinker_cookbook": ["B", "gone"], "tinker_cookbook.a": ["shown", "A", "B", "c"]}
    assert absent(
        {"json": ["dumps", "gone"], "tinker_cookbook.nowhere": ["x"], "tinker_cookbook.capture.store": ["y"]}
    ) == {
        "json": ["gone"],
        "tinker_cookbook.nowhere": ["x"],
        "tinker_cookbook.capture.store": ["y"],
    }
