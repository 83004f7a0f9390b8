"""The shape of the code: sizes of files and functions, which way imports go, and that none goes in a circle."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("tinker_cookbook", "tinker_local_backend", "recipes", "examples", "benchmarks", "tests")
MAX_LINES, MAX_FUNCTION_LINES = 450, 80


def files(*packages: str) -> list[Path]:
    return sorted(path for package in packages for path in (ROOT / package).rglob("*.py"))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_no_file_is_too_long() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files(*PACKAGES)}
    assert len(lengths) > 200
    assert {name: n for name, n in lengths.items() if n > MAX_LINES} == {}


def test_no_function_is_too_long() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in files(*PACKAGES)
        for node in functions(ast.parse(path.read_text()))
    }
    assert {name: n for name, n in found.items() if n > MAX_FUNCTION_LINES} == {}


def test_the_mutation_tool_is_told_of_files_that_exist() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mutmut"]
    named = [*config["only_mutate"], *config["pytest_add_cli_args_test_selection"], *config["also_copy"]]
    assert [name for name in named if not (ROOT / name).exists()] == []


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path, known: set[str], at_load: bool) -> set[str]:
    """The modules of ours that a file imports: when it is loaded, or also in functions and for the type checker."""
    tree = ast.parse(path.read_text())
    everything = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    nodes = list(_at_load(tree.body)) if at_load else everything
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            # `from package import x` may name a module or something in the package.
            found |= {n if (n := f"{node.module}.{alias.name}") in known else node.module for alias in node.names}
    return found & known


def _at_load(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _at_load(node.orelse)
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from _at_load([child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)])
        else:
            yield node


def test_no_import_goes_in_a_circle() -> None:
    paths = {module_name(path): path for path in files(*PACKAGES)}
    graph = {name: imported(path, set(paths), at_load=True) - {name} for name, path in paths.items()}
    assert sum(map(len, graph.values())) > 500
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> None:
        if name in trail:
            pytest.fail("circular import: " + " -> ".join([*trail[trail.index(name) :], name]))
        if name not in done:
            for other in sorted(graph[name]):
                visit(other, [*trail, name])
            done.add(name)

    for name in sorted(graph):
        visit(name, [])


def test_arrows_run_one_way() -> None:
    known = {module_name(path) for path in files(*PACKAGES)}
    for path in files("tinker_cookbook", "tinker_local_backend"):
        name = module_name(path)
        seen = imported(path, known, at_load=False)
        roots = {module.split(".")[0] for module in seen}
        assert not roots & {"recipes", "examples", "benchmarks", "tests"}, f"{name} imports {sorted(roots)}"
        if path.is_relative_to(ROOT / "tinker_local_backend"):
            assert "tinker_cookbook" not in roots, f"{name} knows of the library"
        elif name != "tinker_cookbook.backends":
            assert "tinker_local_backend" not in roots, (
                f"{name} imports the engine; go through tinker_cookbook.backends"
            )
    for path in files("recipes"):
        assert not {m.split(".")[0] for m in imported(path, known, at_load=False)} & {"examples", "benchmarks", "tests"}
