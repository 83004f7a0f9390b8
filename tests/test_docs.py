"""The pages say what is there: links, commands and environment variables; and the README stays a short way in."""

import importlib.util
import re
from pathlib import Path

import pytest

from tinker_cookbook.renderers.registry import _BUILT_IN
from tinker_cookbook.rl.algorithms import PRESETS
from tinker_local_backend import environment

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
OTHERS = (
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "benchmarks/README.md",
    "example_data/README.md",
    "example_data/tiny_chat/README.md",
    "example_data/tiny_debate/README.md",
)
PAGES = [README, *DOCS, *(ROOT / name for name in OTHERS)]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as forges make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link} leads nowhere"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link} names no heading of {target.name}"


def test_the_readme_is_short_and_leads_to_every_page() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= 130
    linked = {link.partition("#")[0] for link in LINK.findall(text)}
    assert {f"docs/{page.name}" for page in DOCS} <= linked
    contents = {link for link in LINK.findall((ROOT / "docs" / "README.md").read_text())}
    assert {page.name for page in DOCS} - {"README.md"} == contents


def test_commands_name_modules_that_exist() -> None:
    texts = {str(page.relative_to(ROOT)): page.read_text() for page in PAGES}
    # The first column of the runbooks' table holds the names of other programs.
    texts["docs/runbooks.md"] = re.sub(r"^\| [^|]*\|", "|", texts["docs/runbooks.md"], flags=re.MULTILINE)
    text = "\n".join(texts.values())
    modules = set(re.findall(r"(?:python -m |`)((?:recipes|tools|examples|benchmarks)(?:\.\w+)+)", text))
    modules |= set(re.findall(r"python -m (tinker_\w+(?:\.\w+)*)", text))
    assert len(modules) > 30
    assert [
        name
        for name in sorted(modules - {"recipes.NAME", "tinker_cookbook.recipes.NAME"})
        if importlib.util.find_spec(name) is None
    ] == []


def test_the_files_that_contributing_names_exist() -> None:
    paths = set(re.findall(r"`([\w/]+\.(?:py|md|toml))`", (ROOT / "CONTRIBUTING.md").read_text()))
    paths = {path for path in paths if "NAME" not in path and "FAMILY" not in path}
    assert len(paths) > 20
    bases = (ROOT, ROOT / "tinker_cookbook", ROOT / "tinker_local_backend")
    assert [path for path in sorted(paths) if not any((base / path).is_file() for base in bases)] == []


def first_column(page: str) -> set[str]:
    """The names in the first column of a page's tables."""
    rows = re.findall(r"^\|([^|]*)\|", (ROOT / "docs" / page).read_text(), re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_every_renderer_and_preset_is_explained() -> None:
    assert set(_BUILT_IN) == first_column("renderers.md")
    assert PRESETS.keys() <= first_column("algorithms.md")


def test_every_environment_variable_is_explained() -> None:
    meanings = {name: variable.meaning for name, variable in environment.VARIABLES.items()}
    rows = re.findall(r"^\| `(TINKER_\w+)` \| (.*) \|$", (ROOT / "docs" / "environment.md").read_text(), re.MULTILINE)
    assert dict(rows) == meanings
    assert len(rows) == len(dict(rows))


def test_no_variable_is_read_past_the_tables() -> None:
    """Also the SDK's, which stand there for the reader; a program's own environment goes to its children whole."""
    packages = ("tinker_cookbook", "tinker_local_backend", "recipes")
    sources = [path.read_text() for package in packages for path in (ROOT / package).rglob("*.py")]
    named = {name for source in sources for name in re.findall(r'"(TINKER_[A-Z_]+[A-Z])"', source)}
    assert named == environment.VARIABLES.keys()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_holds_the_marks_of_a_merge(page: Path) -> None:
    assert re.findall(r"^(?:<{7} |>{7} |={7}$).*", page.read_text(), re.MULTILINE) == []
