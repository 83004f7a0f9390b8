"""Lazy imports of large packages: `from tinker_cookbook.utils.lazy import tinker, torch`.

Importing them takes seconds, which a command line with a typo, or with `--help`, does not need. A module that imports
them from here uses them only in functions, and begins with `from __future__ import annotations` if its annotations use
them. (Not a module with a chz class that is a callable value of a field: chz cannot read the annotations of its
__call__.)
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = ["exports", "httpx", "jinja2", "np", "pandas", "tinker", "torch", "transformers"]


class LazyModule:
    """A proxy for a module, which is imported when one of its attributes is first accessed."""

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
    import jinja2
    import numpy as np
    import pandas
    import tinker
    import torch
    import transformers
else:
    httpx = LazyModule("httpx")
    jinja2 = LazyModule("jinja2")
    np = LazyModule("numpy")
    pandas = LazyModule("pandas")
    tinker = LazyModule("tinker")
    torch = LazyModule("torch")
    transformers = LazyModule("transformers")


def exports(package: str, places: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package that re-exports names of its modules, and imports a module when a name
    is accessed.

    The names also form the package's `__all__`.

    Args:
        places: module in the package, or the full name of another one -> its names, separated by spaces; "" means the
            module itself.
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
