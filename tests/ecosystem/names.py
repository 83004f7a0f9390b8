"""The public names of a release of tinker-cookbook, read from its sources without importing them, and which of them are here."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

LEFT_OUT = ("recipes", "sandbox", "inference", "third_party", "scripts", "xmux")
"""Packages below tinker_cookbook that are programs, or need services of their own."""
NO_NAMES = ("logger", "T")
"""What nobody imports: a module's logger, a type variable."""


def public_names(wheel: Path) -> dict[str, list[str]]:
    """Module -> its names: types, functions, exceptions and constants; of a package those of its `__all__`.

    Args:
        wheel: the folder of an unpacked wheel.
    """
    found: dict[str, list[str]] = {}
    for path in sorted((wheel / "tinker_cookbook").rglob("*.py")):
        parts = path.relative_to(wheel).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        is_private = any(part.startswith("_") or part.endswith("_test") for part in parts)
        if is_private or (len(parts) > 1 and parts[1] in LEFT_OUT):
            continue
        names = [name for name in dict.fromkeys(_names(path)) if not name.startswith("_") and name not in NO_NAMES]
        if names:
            found[".".join(parts)] = names
    return found


def _names(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assigned = {name: value for node in tree.body for name, value in _assigned(node)}
    if path.name == "__init__.py" and "__all__" in assigned:
        yield from ast.literal_eval(assigned["__all__"])
        return
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom) and any(part.startswith("_") for part in (node.module or "").split(".")):
            # What a module takes from a private one and does not use itself, it shows.
            if not (node.module or "").startswith("__"):
                yield from (alias.name for alias in node.names if alias.name not in used)
        else:
            yield from (name for name, _ in _assigned(node))


def _assigned(node: ast.stmt) -> list[tuple[str, ast.expr]]:
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
        return [(node.target.id, node.value)]
    if isinstance(node, ast.Assign):
        return [(target.id, node.value) for target in node.targets if isinstance(target, ast.Name)]
    return []


def absent(names: dict[str, list[str]]) -> dict[str, list[str]]:
    """Those that cannot be imported here from the same module."""
    missing: dict[str, list[str]] = {}
    for module, wanted in names.items():
        try:
            found = importlib.import_module(module)
        except ImportError:
            missing[module] = wanted
            continue
        if lost := [name for name in wanted if not hasattr(found, name)]:
            missing[module] = lost
    return missing
