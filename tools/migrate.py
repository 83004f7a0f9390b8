"""Rewrites renamed keys and recipes in command lines, and in TOML and YAML files of keys, and prints the result.

    python -m tools.migrate run_all.sh sweep.yaml
    python -m tools.migrate < commands.txt
    python -m tools.migrate --recipe math_rl keys.toml > new_keys.toml

Which keys are renamed depends on the recipe. A command line names it (`python -m recipes.math_rl largest=9`); a file
names it anywhere (`recipe: recipes.math_rl`, `program: recipes/math_rl.py`), or `--recipe` does. All other text is
unchanged. Each change is reported on stderr, and so is each key that must be rewritten by hand. The table of renamed keys
is `tinker_cookbook.cli_help.RENAMED`.
"""

import argparse
import importlib
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

from tinker_cookbook.backends import check_command
from tinker_cookbook.cli_help import renamed

_RECIPE = re.compile(r"\b(?:tinker-)?recipes[./ ]([a-z_]+(?:[./][a-z_]+)*)")
_KEY = re.compile(r"(?<![\w./-])((?:--)?(?:grid\.|set\.)?)([a-z_]+)(?==(?!=))")
_ENTRY = re.compile(r"""^(\s*(?:-\s+)?["']?)([a-z_]+)(?=["']?\s*[:=](?:\s|$))""")

Report = Callable[[str], None]


@cache
def config_of(recipe: str) -> type:
    module = importlib.import_module(f"recipes.{recipe}")
    return getattr(module, "CLIConfig", None) or module.DemoConfig


@cache
def renamed_recipes() -> dict[str, str]:
    return importlib.import_module("recipes.__main__").RENAMED


def new_recipe(mention: re.Match[str], report: Report) -> str:
    """The mention of a recipe, with the recipe's new name."""
    new = renamed_recipes().get(mention[1])
    if new is None:
        return mention[0]
    report(f"recipes.{mention[1]} is now recipes.{new}")
    return mention[0].removesuffix(mention[1]) + new


@cache
def known_recipes() -> frozenset[str]:
    return frozenset(importlib.import_module("recipes.__main__").recipes())


def recipe_named(words: str) -> str | None:
    """The recipe of `math_rl`, `preference.train` or `preference/train.py`; None if there is none of this name."""
    parts = words.replace("/", ".").split(".")
    names = [".".join(parts[:n]) for n in (len(parts), len(parts) - 1)]
    return next((name for name in names if name in known_recipes()), None)


def mentions(text: str) -> list[tuple[int, str]]:
    """Position and name of each recipe in a text."""
    return [(match.end(), name) for match in _RECIPE.finditer(text) if (name := recipe_named(match[1])) is not None]


def new_key(recipe: str, key: str, report: Report) -> str:
    """The key's new name; the key itself if it is not renamed or must be rewritten by hand."""
    new = renamed(config_of(recipe), key)
    if new is None:
        return key
    if "," in new:
        report(f"{recipe}: {key} is now {new}: rewrite it by hand")
        return key
    report(f"{recipe}: {key} is now {new}")
    return new


def migrate_command(line: str, report: Report) -> str:
    """Rewrite one command line, with its continuation lines. A key belongs to the recipe before it; grid.KEY and set.KEY of a
    sweep belong to the last one.
    """
    recipes = mentions(line)
    if not recipes:
        return line

    def rewrite(match: re.Match[str]) -> str:
        prefix, key = match.groups()
        before = [name for position, name in recipes if position <= match.start()]
        if not before:
            return match[0]
        return prefix + new_key(recipes[-1][1] if "." in prefix else before[-1], key, report)

    return _KEY.sub(rewrite, line)


def migrate(text: str, recipe: str | None, is_entries: bool, report: Report) -> str:
    """Rewrite a whole text.

    Args:
        recipe: the recipe of entries, if the text names none.
        is_entries: lines may be `key = value` (TOML) or `key: value` (YAML), not only command lines.
    """
    text = _RECIPE.sub(lambda mention: new_recipe(mention, report), text)
    named = mentions(text)
    recipe = recipe or (named[0][1] if named else None)
    lines = re.findall(r"(?:[^\n]*\\\n)*[^\n]*\n|[^\n]+", text)
    if is_entries and recipe is not None:
        text_recipe = recipe
        lines = [_ENTRY.sub(lambda match: match[1] + new_key(text_recipe, match[2], report), line) for line in lines]
    return "".join(migrate_command(line, report) for line in lines)


def main(arguments: list[str]) -> None:
    check_command()
    parser = argparse.ArgumentParser(
        prog="python -m tools.migrate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, help="files to rewrite; none: stdin")
    parser.add_argument("--recipe", help="the recipe of files that name none, such as math_rl")
    given = parser.parse_args(arguments)
    if given.recipe is not None and recipe_named(given.recipe) is None:
        parser.error(f"--recipe {given.recipe}: the recipe does not exist; python -m recipes lists all")
    for file in given.files or [None]:
        if file is not None and not file.is_file():
            parser.error(f"{file}: the file does not exist")
        text = sys.stdin.read() if file is None else file.read_text(encoding="utf-8")
        where = "" if file is None else f"{file}: "
        is_entries = file is None or file.suffix in (".toml", ".yaml", ".yml") or given.recipe is not None
        sys.stdout.write(
            migrate(text, given.recipe, is_entries, lambda line, where=where: print(where + line, file=sys.stderr))
        )


if __name__ == "__main__":
    main(sys.argv[1:])
