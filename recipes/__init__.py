"""The commands, one module each. An unknown NAME is reported here, because `python -m recipes.NAME` itself only says
that there is no such module.
"""

import sys
from pathlib import Path

import tinker_cookbook

if not hasattr(tinker_cookbook, "__upstream__"):
    # `name` makes `python -m recipes.NAME` print only the sentence, without its location.
    raise ImportError(
        f"{tinker_cookbook.__path__[0]} holds the files of the distribution tinker-cookbook, where this project's should be; "
        "run `pip uninstall tinker-cookbook`, then install this project again, or use a separate environment",
        name=__name__,
    )


def _asked_for() -> str | None:
    """The module of `python -m`, while the interpreter imports the packages above it."""
    words = sys.orig_argv
    if sys.argv[:1] != ["-m"] or "-m" not in words[:-1]:
        return None
    return words[words.index("-m") + 1]


def _answer(module: str) -> None:
    path = Path(__file__).parent.joinpath(*module.split(".")[1:])
    if not (path.with_name(f"{path.name}.py").is_file() or (path / "__main__.py").is_file()):
        from recipes.__main__ import refuse

        refuse(module.removeprefix("recipes."))


if (_module := _asked_for()) is not None and _module.startswith("recipes."):
    _answer(_module)
