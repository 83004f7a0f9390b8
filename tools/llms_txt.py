"""Writes `llms.txt`, an index of the code for language models, and `llms-full.txt`, every public name with its signature.

    python -m tools.llms_txt            write both
    python -m tools.llms_txt --check    fail if one is stale

The sources are parsed, not imported, so the result depends only on them.
"""

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tinker_cookbook.utils.files import write_text
from tinker_local_backend.command import check_command

PACKAGES = ("tinker_cookbook", "tinker_local_backend", "recipes")
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/*.md",
    "examples/*.py",
    "example_data/README.md",
    "benchmarks/README.md",
)
INNER = re.compile(
    r"tinker_local_backend\.(\w+)\.|tinker_cookbook\.(capture|env\.(?:reasoning|verifiers)|renderers|report|runs|sandbox|stores)\."
)
"""Modules that users reach through a package's clients and commands; the index counts them by folder."""
INDEX, FULL = "llms.txt", "llms-full.txt"
MAX_INDEX_BYTES = 76_000
ROOT = Path(__file__).resolve().parents[1]

_TITLE = """\
# tinker-cookbook-local

> Post-training recipes for language models that run the same on the hosted Tinker service and on an in-process LoRA
> engine on your own GPU or CPU.
"""
_INDEX_HEADER = f"""{_TITLE}
This is the index. [{FULL}]({FULL}) has every public class and function with its signature. Both are generated from the
docstrings by `make llms`; do not edit them.
"""
_FULL_HEADER = f"""{_TITLE}
This file lists every module with its public classes and functions; [{INDEX}]({INDEX}) is the short form. Both are
generated from the docstrings by `make llms`; do not edit them.
"""

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def render_full(root: Path) -> str:
    """The text of `llms-full.txt` for the checkout at `root`.

    Raises:
        SyntaxError: a source file does not parse.
    """
    sections = [_FULL_HEADER]
    for package in PACKAGES:
        texts = [text for module in _modules(root, package) if (text := _full_entry(module))]
        if texts:
            sections.append(f"## {package}\n")
            sections.extend(texts)
    return "\n".join(sections)


def render_index(root: Path, max_bytes: int = MAX_INDEX_BYTES) -> str:
    """The text of `llms.txt`: pages, recipes, and modules with as many of their public names as `max_bytes` allow.

    A module shows at most n names, with the same n everywhere, as large as fits; further names are counted.

    Raises:
        SyntaxError: a source file does not parse.
        ValueError: the index is longer than `max_bytes` even without names.
    """
    modules = {package: list(_modules(root, package)) for package in PACKAGES}
    pages = [entry for pattern in PAGES for path in sorted(root.glob(pattern)) if (entry := _page_entry(root, path))]
    most = max((len(module.names) for members in modules.values() for module in members), default=0)
    texts = (_index(pages, modules, shown) for shown in range(most, -1, -1))
    fitting = next((text for text in texts if len(text.encode()) <= max_bytes), None)
    if fitting is None:
        raise ValueError(f"max_bytes={max_bytes}: the index is longer even without names; shorten the first sentences")
    return fitting


RENDERERS = {INDEX: render_index, FULL: render_full}
"""File name -> function that renders its text for a checkout."""


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Write both files, or with `--check` compare them; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.llms_txt", description=f"Write {INDEX} and {FULL}.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is stale")
    options = parser.parse_args(argv)
    stale = 0
    for name, render in RENDERERS.items():
        path, text = root / name, render(root)
        if not options.check:
            write_text(path, text)
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            print(f"{path} is stale; run `make llms`", file=sys.stderr)
            stale = 1
    return stale


@dataclass(frozen=True)
class _Module:
    name: str
    path: str
    """relative to the root, with forward slashes"""
    tree: ast.Module
    is_command: bool

    @cached_property
    def summary(self) -> str:
        """The first paragraph of the docstring, as it is wrapped there."""
        return (ast.get_docstring(self.tree) or "").split("\n\n")[0]

    @cached_property
    def names(self) -> list[str]:
        """The public classes and functions, in the order of the file."""
        members = (node for node in self.tree.body if isinstance(node, _Function | ast.ClassDef))
        return [node.name for node in members if not node.name.startswith("_")]


def _modules(root: Path, package: str) -> Iterator[_Module]:
    folder = root / package
    for path in sorted(folder.rglob("*.py"), key=lambda path: path.relative_to(folder).parts):
        source = path.read_text(encoding="utf-8")
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        is_command = 'if __name__ == "__main__":' in source
        yield _Module(name, path.relative_to(root).as_posix(), ast.parse(source, filename=str(path)), is_command)


def _index(pages: Sequence[str], modules: dict[str, list[_Module]], shown: int) -> str:
    recipes = [module for module in modules["recipes"] if module.is_command]
    lines = [_INDEX_HEADER]
    sections = {
        "Pages": list(pages),
        "Recipes, run as `python -m NAME key=value`": [_index_entry(m, 0) for m in recipes],
    }
    for package, members in modules.items():
        # Names that a module only re-exports are listed at the module that defines them.
        listed = [
            m for m in members if m not in recipes and (m.names or m.summary) and not m.summary.startswith("Re-exports")
        ]
        outer = [m for m in listed if not INNER.match(m.name)]
        inner = Counter(match[1] or match[2] for m in listed if (match := INNER.match(m.name)))
        counted = ", ".join(f"{folder} ({count})" for folder, count in inner.items())
        sections[package] = [_index_entry(m, shown, below=package) for m in outer]
        sections[package] += [f"- and the modules of {counted}: [{FULL}]({FULL})"] if inner else []
    for title, entries in sections.items():
        if entries:
            lines += [f"## {title}\n", "\n".join(entries) + "\n"]
    return "\n".join(lines)


def _index_entry(module: _Module, shown: int, below: str = "") -> str:
    """`below`: the package in the heading, whose name is not repeated."""
    name = module.name.removeprefix(f"{below}.")
    text = f"- [{name}]({module.path})"
    if module.summary:
        text += f": {_first_sentence(module.summary)}"
    names = module.names
    if shown and names:
        more = f", {len(names) - shown} more" if len(names) > shown else ""
        text += f" `{', '.join(names[:shown])}`{more}"
    return text


def _page_entry(root: Path, path: Path) -> str:
    """Title and first sentence of a page, or name and first docstring sentence of an example script."""
    text = path.read_text(encoding="utf-8")
    relative = path.relative_to(root).as_posix()
    if path.suffix == ".py":
        summary = (ast.get_docstring(ast.parse(text, filename=str(path))) or "").split("\n\n")[0]
        return f"- [{relative}]({relative}): {_first_sentence(summary)}" if summary else ""
    blocks = text.strip().split("\n\n")
    title = blocks[0].removeprefix("# ").strip()
    # A page may begin with a heading or a table; then the title is enough.
    prose = blocks[1] if len(blocks) > 1 and blocks[1][:1] not in "#|`-> " else ""
    return f"- [{relative}]({relative}): {title}" + (f". {_first_sentence(prose)}" if prose else "")


def _first_sentence(text: str) -> str:
    """The first sentence, with links replaced by their text: their paths are relative to the page."""
    text = re.sub(r"\[([^]]+)]\([^)]+\)", r"\1", text)
    return re.split(r"(?<=[.?!])\s", " ".join(text.split()), maxsplit=1)[0]


def _full_entry(module: _Module) -> str:
    lines = list(_render_members(module.tree.body))
    if not module.summary and not lines:
        return ""
    summary = [module.summary + "\n"] if module.summary else []
    members = ["\n".join(lines) + "\n"] if lines else []
    return "\n".join([f"### {module.name}\n", *summary, *members])


def _render_members(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, _Function) and not node.name.startswith("_"):
            yield "- " + _entry(_signature(node), node)
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield "- " + _entry(_class_signature(node), node)
            for member in node.body:
                if isinstance(member, _Function) and not member.name.startswith("_"):
                    yield "  - " + _entry(_signature(member), member)


def _entry(signature: str, node: _Function | ast.ClassDef) -> str:
    doc = (ast.get_docstring(node) or "").split("\n")[0]
    return f"`{signature}`: {doc}" if doc else f"`{signature}`"


def _signature(node: _Function) -> str:
    prefix = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    return f"{prefix}{node.name}({_arguments(node.args)}){returns}"


def _class_signature(node: ast.ClassDef) -> str:
    """Name, bases, and what the class is made from: the arguments of `__init__`, else the annotated fields."""
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    head = f"class {node.name}({bases})" if bases else f"class {node.name}"
    for member in node.body:
        if isinstance(member, _Function) and member.name == "__init__":
            return f"{head}: __init__({_arguments(member.args)})"
    fields = [
        _field(member)
        for member in node.body
        if isinstance(member, ast.AnnAssign)
        and isinstance(member.target, ast.Name)
        and not member.target.id.startswith("_")
    ]
    return f"{head}: {', '.join(fields)}" if fields else head


def _field(node: ast.AnnAssign) -> str:
    text = f"{ast.unparse(node.target)}: {ast.unparse(node.annotation)}"
    default = node.value
    if isinstance(default, ast.Call) and ast.unparse(default.func) in ("chz.field", "field", "dataclasses.field"):
        # From a field(...) call only the default matters; the rest is documentation and checks.
        keywords = {keyword.arg: keyword.value for keyword in default.keywords}
        if "default" not in keywords:
            return f"{text} = ..." if {"default_factory", "blueprint_unspecified"} & keywords.keys() else text
        default = keywords["default"]
    return f"{text} = {ast.unparse(default)}" if default is not None else text


def _arguments(arguments: ast.arguments) -> str:
    text = ast.unparse(arguments)
    for implicit in ("self", "cls"):
        if text == implicit or text.startswith(f"{implicit}, "):
            return text[len(implicit) + 2 :]
    return text


if __name__ == "__main__":
    check_command()
    sys.exit(main())
