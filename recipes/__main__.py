"""`python -m recipes` lists the recipes; `python -m recipes NAME key=value ...` runs one, as `python -m recipes.NAME` does.

An installation has the same command: `tinker-recipes NAME key=value ...`.
"""

import ast
import difflib
import runpy
import sys
from pathlib import Path
from typing import NoReturn

from tinker_cookbook.backends import check_command

FOLDER = Path(__file__).parent
RENAMED = {"env_rl": "rl"}
"""Earlier name of a recipe -> its name. `tools.migrate` rewrites command lines."""


def recipes() -> dict[str, str]:
    """Name -> first sentence of the docstring, for every runnable module here; imports nothing."""
    listed = {}
    for path in sorted(FOLDER.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if path.name != "__main__.py" and 'if __name__ == "__main__":' in text:
            name = ".".join(path.relative_to(FOLDER).with_suffix("").parts)
            if name in RENAMED:
                continue
            listed[name] = (ast.get_docstring(ast.parse(text)) or "").splitlines()[0]
    return listed


def refuse(name: str) -> NoReturn:
    """Report a recipe that has another name now, or an unknown one with the closest name."""
    if name in RENAMED:
        print(f"error: recipes.{name} is recipes.{RENAMED[name]} now", file=sys.stderr)
        raise SystemExit(2)
    near = difflib.get_close_matches(name, recipes(), n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else "python -m recipes lists them"
    print(f"error: there is no recipe {name!r}; {hint}", file=sys.stderr)
    raise SystemExit(2)


def main(arguments: list[str]) -> None:
    check_command()
    known = recipes()
    if not arguments or arguments[0] in ("-h", "--help"):
        width = max(map(len, known)) + 2
        print("usage: python -m recipes.NAME key=value ...    (python -m recipes.NAME --help lists the keys)\n")
        print("\n".join(f"  {name.ljust(width)}{line}" for name, line in known.items()))
        return
    name = arguments[0].removeprefix("recipes.")
    if name not in known:
        refuse(name)
    sys.argv = [f"recipes.{name}", *arguments[1:]]
    runpy.run_module(f"recipes.{name}", run_name="__main__", alter_sys=True)


def command() -> None:
    """The console command. As with `python -m`, modules of the current folder can be imported: plugins are named by
    them.
    """
    sys.path.insert(0, "")
    main(sys.argv[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
