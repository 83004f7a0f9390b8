"""Writes the shipped programming problems deterministically.

python -m tools.code_problems
"""

import ast
import inspect
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chz

from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.utils.files import write_jsonl
from tinker_cookbook.utils.seeds import derive_seed
from tools.code_problems import functions, programs

TESTS, DRAWS = 10, 1000
"""Distinct tests per problem, at most half of them with the same output; and inputs drawn to find them."""
EVERY = 5
"""Every fifth problem is held out: eight functions and four programs."""
TAIL = "\n\nimport sys\n\nprint({name}(sys.stdin.read()))\n"


def solution(function: Callable[..., Any]) -> str:
    """The source of a function without its docstring."""
    (tree,) = ast.parse(inspect.getsource(function)).body
    assert isinstance(tree, ast.FunctionDef)
    tree.body = tree.body[1:]
    return ast.unparse(tree)


def tests_of(
    function: Callable[..., Any], draw: Callable[[random.Random], Any], is_program: bool
) -> list[dict[str, Any]]:
    """Distinct random inputs with the solution's outputs; a constant output passes at most half of them."""
    rng = random.Random(derive_seed(0, function.__name__))
    tests: dict[str, dict[str, Any]] = {}
    seen: Counter[str] = Counter()
    for _ in range(DRAWS):
        given = draw(rng)
        key = json.dumps(given)
        fresh = json.loads(key)
        output = f"{function(fresh)}\n" if is_program else function(*fresh)
        encoded = json.dumps(output)
        if key not in tests and len(tests) < TESTS and seen[encoded] < TESTS // 2:
            tests[key] = {"input": given, "output": json.loads(encoded)}
            seen[encoded] += 1
    return list(tests.values())


def rows() -> list[dict[str, Any]]:
    """All problems, as rows of a file."""
    problems: list[dict[str, Any]] = []
    for function, draw in [*functions.INPUTS.items(), *programs.INPUTS.items()]:
        is_program = function in programs.INPUTS
        name = function.__name__
        row = {"id": name, "question": " ".join((function.__doc__ or "").split())}
        if not is_program:
            row["function"] = name
        tail = TAIL.format(name=name) if is_program else "\n"
        row |= {"tests": tests_of(function, draw, is_program), "solution": solution(function) + tail}
        problems.append(row)
    return problems


@chz.chz(typecheck=True)
class CLIConfig:
    """Keys of `python -m tools.code_problems`."""

    folder: str = chz.field(default=str(EXAMPLE_DATA / "code"), doc="output folder")


async def main(cli: CLIConfig) -> None:
    """Write train.jsonl and test.jsonl."""
    folder = Path(cli.folder)
    folder.mkdir(parents=True, exist_ok=True)
    problems = rows()
    write_jsonl(folder / "train.jsonl", [row for i, row in enumerate(problems) if i % EVERY != EVERY - 1])
    write_jsonl(folder / "test.jsonl", [row for i, row in enumerate(problems) if i % EVERY == EVERY - 1])


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
