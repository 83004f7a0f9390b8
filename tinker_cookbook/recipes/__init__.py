"""`python -m tinker_cookbook.recipes.NAME` is `python -m recipes.NAME`; `recipes` is imported on first use.

If another package on the path also has `tinker_cookbook/recipes`, its recipes take precedence: `tinker_cookbook.recipes.sl_basic`
is then that package's, and only recipes that it lacks are ours.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType

import tinker_cookbook

_HERE = Path(__file__).parent
_PREFIX = f"{__name__}."

MOVED = {
    "chat_sl.train": "chat_sl",
    "distillation.off_policy_reasoning": "distillation.off_policy",
    "distillation.on_policy_distillation": "distillation.on_policy",
    "math_rl.train": "math_rl",
    "multiplayer_rl.guess_number.train": "guess_number",
    "multiplayer_rl.twenty_questions.train": "twenty_questions",
    "preference.dpo.train": "preference.train",
    "preference.rlhf.rlhf_pipeline": "preference.rlhf_pipeline",
    "preference.shorter.train": "shorter",
    "rubric.train": "rubric",
    "sdft.train": "distillation.sdft",
    "verifiers_rl.train": "verifiers_rl",
}
"""tinker-cookbook's path of a recipe -> its path here. The keys are those of our recipe's `--help`."""


def _folders() -> list[str]:
    """Other packages' folders of this name, then this one."""
    entries = [*tinker_cookbook.__path__, *(str(Path(entry, "tinker_cookbook")) for entry in sys.path)]
    folders = dict.fromkeys(str(folder) for entry in entries if (folder := Path(entry, "recipes").resolve()).is_dir())
    return [*(folder for folder in folders if folder != str(_HERE.resolve())), str(_HERE)]


def _ours() -> set[str]:
    """The modules of `recipes` and those of MOVED, with the packages above them."""
    spec = importlib.util.find_spec("recipes")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            "the package recipes, which comes with tinker_cookbook, is not on the path", name="recipes"
        )
    root = spec.submodule_search_locations[0]
    files = [path.relative_to(root).with_suffix("").parts for path in Path(root).rglob("*.py")]
    names = {".".join(parts).removesuffix(".__init__") for parts in files} | MOVED.keys()
    return {".".join(parts[:n]) for name in names if (parts := name.split(".")) for n in range(1, len(parts) + 1)}


class _Forwarder(Loader):
    """A module that forwards its names to another one, and runs it when it is run. A package may have no target."""

    def __init__(self, target: str):
        self._target = f"recipes.{target}"

    def exec_module(self, module: ModuleType) -> None:
        def get(name: str) -> object:
            if name.startswith("__"):
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            return getattr(importlib.import_module(self._target), name)

        module.__dict__["__getattr__"] = get

    def get_code(self, fullname: str) -> CodeType:
        """For `python -m`."""
        program = f"import runpy\nrunpy.run_module({self._target!r}, run_name='__main__', alter_sys=True)"
        return compile(program, f"<{fullname}>", "exec")


class _Finder(MetaPathFinder):
    """The last finder, so it only gets modules that are in none of the folders of `__path__`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(_PREFIX):
            return None
        name, ours = fullname.removeprefix(_PREFIX), _ours()
        base = name.removesuffix(".__main__")  # of a package that is run
        if base not in ours:
            raise ModuleNotFoundError(f"there is no recipe {base!r}; there are {', '.join(_recipes())}", name=fullname)
        is_package = any(other.startswith(f"{name}.") for other in ours)
        return ModuleSpec(fullname, _Forwarder(MOVED.get(base, base)), origin=fullname, is_package=is_package)


def _recipes() -> list[str]:
    known = importlib.import_module("recipes.__main__").recipes()
    return [*known, *(name for name in MOVED if name not in known)]


__path__ = _folders()
sys.meta_path.append(_Finder())
