"""The large packages, imported when something of theirs is first used: `from tinker_cookbook.utils.lazy import tinker, torch`.

Together they take seconds to import, and a command line with a typing error, or with `--help`, needs none of them. A module
that takes them from here names them only in functions, and begins with `from __future__ import annotations` if its annotations
name them. (Not a module with a chz class that is a callable value of a field: chz cannot read the annotations of its __call__.)
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = ["exports", "httpx", "np", "pandas", "tinker", "torch", "transformers"]


class LazyModule:
    """Stands for a module, which is imported when an attribute of it is first asked for."""

    def __init__(self, name: str):
        self._name = name
        self._module: ModuleType | None = None

    def __getattr__(self, attribute: str) -> Any:
        if self._module is None:
            self._module = importlib.import_module(self._name)
        return getattr(self._module, attribute)

    def __repr__(self) -> str:
        return f"<lazy module {self._name!r}>"


if TYPE_CHECKING:
    import httpx
    import numpy as np
    import pandas
    import tinker
    import torch
    import transformers
else:
    httpx = LazyModule("httpx")
    np = LazyModule("numpy")
    pandas = LazyModule("pandas")
    tinker = LazyModule("tinker")
    torch = LazyModule("torch")
    transformers = LazyModule("transformers")


def exports(package: str, places: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package that shows names of its modules and imports a module when its name is asked for.

    They are the package's `__all__`, too.

    Args:
        places: module below the package, or the whole name of one elsewhere -> the names it has, with spaces between; ""
            stands for the module itself.
    """
    homes = {name: module for module, names in places.items() for name in names.split() or [module]}

    def get(name: str) -> Any:
        if name == "__all__":
            return sorted(homes)
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name]
        module = importlib.import_module(home if home.startswith("tinker_cookbook.") else f"{package}.{home}")
        return module if name == home else getattr(module, name)

    return get, lambda: sorted(homes)
