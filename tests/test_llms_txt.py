"""`llms.txt` and `llms-full.txt` say what the code says now, and the generator reads signatures and docstrings as they are."""

import re
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


INDEX_ENTRIES = """\
## Pages

- [README.md](README.md): A project. What it is for.
- [docs/table.md](docs/table.md): A table
- [examples/mine.py](examples/mine.py): An example of one's own.

## Recipes, run as `python -m NAME key=value`

- [recipes.two](recipes/two.py): A recipe.

## recipes

- [one](recipes/one.py): What the module is for. `Config, go, Plain`
- [sub](recipes/sub/__init__.py): A sub-package.
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout with a few modules and pages."""
    sources = {
        "recipes/one.py": SOURCE,
        "recipes/two.py": '"""A recipe."""\n\nif __name__ == "__main__":\n    pass\n',
        "recipes/__init__.py": "",
        "recipes/sub/__init__.py": '"""A sub-package."""\n',
        "examples/__init__.py": "",
        "examples/mine.py": '"""An example of\none\'s own. More."""\n',
        "README.md": "# A project\n\nWhat it is\nfor. And more.\n",
        "docs/table.md": "# A table\n\n| a | b |\n|---|---|\n",
    }
    for name, source in sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    return tmp_path


def test_signatures_and_first_lines_are_listed(tree: Path) -> None:
    text = llms_txt.render_full(tree)
    end = f"## recipes\n\n{EXPECTED}\n### recipes.sub\n\nA sub-package.\n\n### recipes.two\n\nA recipe.\n"
    assert text.endswith(end)


def test_the_index_lists_pages_recipes_and_modules(tree: Path) -> None:
    assert llms_txt.render_index(tree).endswith(INDEX_ENTRIES)


def test_names_that_do_not_fit_are_counted(tree: Path) -> None:
    whole = llms_txt.render_index(tree)
    assert llms_txt.render_index(tree, len(whole.encode())) == whole
    shorter = llms_txt.render_index(tree, len(whole.encode()) - 1)
    assert shorter == whole.replace("`Config, go, Plain`", "`Config`, 2 more")
    without = llms_txt.render_index(tree, len(shorter.encode()) - 1)
    assert without == whole.replace(" `Config, go, Plain`", "")
    with pytest.raises(ValueError, match="max_bytes"):
        llms_txt.render_index(tree, len(without.encode()) - 1)


def test_check_fails_until_the_files_are_written(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert llms_txt.main(["--check"], root=tree) == 1
    assert capsys.readouterr().err.count("make llms") == 2
    assert llms_txt.main([], root=tree) == 0
    assert llms_txt.main(["--check"], root=tree) == 0
    # A docstring inside a module is told by the full file alone, a page by the index alone.
    (tree / "recipes" / "one.py").write_text(SOURCE.replace("Go.", "Go on."))
    assert llms_txt.main(["--check"], root=tree) == 1
    assert "llms-full.txt" in capsys.readouterr().err
    (tree / "recipes" / "one.py").write_text(SOURCE)
    (tree / "docs" / "more.md").write_text("# More\n")
    assert llms_txt.main(["--check"], root=tree) == 1
    assert "llms.txt" in capsys.readouterr().err


@pytest.mark.parametrize("name", llms_txt.RENDERERS)
def test_the_files_of_this_checkout_are_up_to_date(name: str) -> None:
    path = llms_txt.ROOT / name
    assert path.exists(), f"{name} is missing; run `make llms`"
    text = llms_txt.RENDERERS[name](llms_txt.ROOT)
    assert path.read_text(encoding="utf-8") == text, f"{name} is stale; run `make llms`"


def test_the_index_is_short_and_its_links_lead_somewhere() -> None:
    path = llms_txt.ROOT / llms_txt.INDEX
    assert path.stat().st_size <= llms_txt.MAX_INDEX_BYTES
    links = re.findall(r"\]\(([^)]+)\)", path.read_text(encoding="utf-8"))
    assert len(links) > 200
    assert [link for link in links if not (llms_txt.ROOT / link).is_file()] == []
