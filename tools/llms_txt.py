"""Writes `llms.txt`, the map of the code for language models, from the docstrings: modules, classes and functions.

    python -m tools.llms_txt            write it
    python -m tools.llms_txt --check    fail if it is stale

The sources are parsed, not imported, so the result depends on nothing but them.
"""

import argparse
import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tinker_cookbook.runs.files import write_text

PACKAGES = ("tinker_cookbook", "tinker_local_backend", "recipes")
FILE_NAME = "llms.txt"
ROOT = Path(__file__).resolve().parents[1]

_HEADER = """\
# tinker-cookbook-local

> Post-training recipes for language models that run the same on the hosted Tinker service and on an in-process LoRA
> engine on one's own GPU or CPU. This file lists every module with its public classes and functions. It is generated
> from the docstrings by `make llms`; do not edit it.
"""

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def render(root: Path) -> str:
    """The text of `llms.txt` for the checkout at `root`.

    Raises:
        SyntaxError: a source file does not parse.
    """
    sections = [_HEADER]
    for package in PACKAGES:
        modules = [text for path in _sources(root / package) if (text := _render_module(root, path))]
        if modules:
            sections.append(f"## {package}\n")
            sections.extend(modules)
    return "\n".join(sections)


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Write the file, or with `--check` compare it; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.llms_txt", description="Write llms.txt.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the file is stale")
    options = parser.parse_args(argv)
    path, text = root / FILE_NAME, render(root)
    if not options.check:
        write_text(path, text)
        return 0
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return 0
    print(f"{path} is stale; run `make llms`", file=sys.stderr)
    return 1


def _sources(folder: Path) -> Iterator[Path]:
    yield from sorted(folder.rglob("*.py"), key=lambda path: path.relative_to(folder).parts)


def _render_module(root: Path, path: Path) -> str:
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    parts = path.relative_to(root).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    summary = (ast.get_docstring(tree) or "").split("\n\n")[0]
    lines = list(_render_members(tree.body))
    if not summary and not lines:
        return ""
    blocks = [f"### {name}\n", *([summary + "\n"] if summary else []), *(["\n".join(lines) + "\n"] if lines else [])]
    return "\n".join(blocks)


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
        # Of a field(...) call only the default is of interest; the rest is documentation and checks.
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
    sys.exit(main())
