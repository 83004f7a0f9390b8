"""`llms.txt` says what the code says now, and the generator reads signatures and docstrings as they are."""

from pathlib import Path

import pytest

from tools import llms_txt

SOURCE = '''\
"""What the module
is for.

More that is not shown.
"""

import chz


@chz.chz
class Config(Base):
    """A config.

    More.
    """

    name: str
    rate: float = chz.field(default=0.5, doc="a rate", validator=check)
    parts: list[int] = chz.field(default_factory=list)
    _hidden: int = 0

    def build(self, x: int, *, y: str = "a") -> None:
        """Build it."""

    def _inner(self): ...


async def go(path: str | None = None) -> int:
    """Go."""


class Plain:
    def __init__(self, a, b=1): ...


def _private(): ...
'''

EXPECTED = """\
### recipes.one

What the module
is for.

- `class Config(Base): name: str, rate: float = 0.5, parts: list[int] = ...`: A config.
  - `build(x: int, *, y: str='a') -> None`: Build it.
- `async go(path: str | None=None) -> int`: Go.
- `class Plain: __init__(a, b=1)`
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "recipes" / "sub").mkdir(parents=True)
    (tmp_path / "recipes" / "one.py").write_text(SOURCE)
    (tmp_path / "recipes" / "__init__.py").write_text("")
    (tmp_path / "recipes" / "sub" / "__init__.py").write_text('"""A sub-package."""\n')
    return tmp_path


def test_signatures_and_first_lines_are_listed(tree: Path) -> None:
    text = llms_txt.render(tree)
    assert text.endswith(f"## recipes\n\n{EXPECTED}\n### recipes.sub\n\nA sub-package.\n")


def test_check_fails_until_the_file_is_written(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert llms_txt.main(["--check"], root=tree) == 1
    assert "make llms" in capsys.readouterr().err
    assert llms_txt.main([], root=tree) == 0
    assert llms_txt.main(["--check"], root=tree) == 0
    (tree / "recipes" / "one.py").write_text(SOURCE.replace("Go.", "Go on."))
    assert llms_txt.main(["--check"], root=tree) == 1


def test_llms_txt_of_this_checkout_is_up_to_date() -> None:
    path = llms_txt.ROOT / llms_txt.FILE_NAME
    assert path.exists(), "llms.txt is missing; run `make llms`"
    assert path.read_text(encoding="utf-8") == llms_txt.render(llms_txt.ROOT), "llms.txt is stale; run `make llms`"
