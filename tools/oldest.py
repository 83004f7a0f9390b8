"""The oldest versions that pyproject.toml allows, as constraints for pip, for `make test-oldest`.

    python -m tools.oldest > oldest.txt
    pip install -c oldest.txt -e '.[dev]'

It needs only Python, because it runs before anything is installed.
"""

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXTRA = "dev"
_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)\s*>=\s*(?P<version>[\w.]+)[^;]*(?P<marker>;.*)?")


def constraints(requirements: Iterable[str]) -> list[str]:
    """A line `name==version`, with its marker, for each requirement `name>=version`.

    Raises:
        ValueError: a requirement states no oldest version.
    """
    lines = []
    for requirement in requirements:
        match = _REQUIREMENT.fullmatch(requirement)
        if match is None:
            raise ValueError(f"{requirement!r} in pyproject.toml states no oldest version: write it as name>=version")
        lines.append(f"{match['name']}=={match['version']}{match['marker'] or ''}")
    return lines


def stated() -> list[str]:
    """The requirements of the project and of EXTRA."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [*project["dependencies"], *project["optional-dependencies"][EXTRA]]


if __name__ == "__main__":
    print("\n".join(constraints(stated())))
