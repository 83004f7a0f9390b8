"""Deprecated names: a warning first, and an error from the announced version on."""

from __future__ import annotations

import functools
import importlib
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

from tinker_cookbook.utils.git_rev import installed_version

F = TypeVar("F", bound=Callable[..., Any])


def warn_deprecated(name: str, *, removal_version: str | None = None, message: str = "", stacklevel: int = 2) -> None:
    """Warn (DeprecationWarning) that something should no longer be used.

    Args:
        removal_version: the version of this project that removes it; None: undecided.
        message: what to use instead.
        stacklevel: which caller's line the warning names; 2 is the caller's caller.

    Raises:
        RuntimeError: that version has been reached.
    """
    text = f"'{name}' is deprecated."
    if removal_version is not None:
        text += f" It will be removed in version {removal_version}."
    text += f" {message}" if message else ""
    if removal_version is not None and _numbers(installed_version()) >= _numbers(removal_version):
        raise RuntimeError(f"{text} This is version {installed_version()}")
    warnings.warn(text, DeprecationWarning, stacklevel=stacklevel + 1)


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers at the start of a version: (1, 2) for "1.2.dev3"; (0,) if unknown."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else (0,)


@overload
def deprecated(function: F, /) -> F: ...


@overload
def deprecated(*, message: str = ..., removal_version: str | None = ...) -> Callable[[F], F]: ...


def deprecated(function: Any = None, /, *, message: str = "", removal_version: str | None = None) -> Any:
    """Warn at each call of a function, or when a class is instantiated: `@deprecated`, or `@deprecated(message=...)`."""
    if function is None:
        return functools.partial(_deprecated, message=message, removal_version=removal_version)
    return _deprecated(function, message, removal_version)


def _deprecated(target: Any, message: str, removal_version: str | None) -> Any:
    is_class = isinstance(target, type)
    called: Any = target.__init__ if is_class else target
    name = f"{'Class' if is_class else 'Function'} {target.__qualname__}"

    @functools.wraps(called)
    def call(*args: Any, **kwargs: Any) -> Any:
        warn_deprecated(name, removal_version=removal_version, message=message)
        return called(*args, **kwargs)

    if not is_class:
        return call
    target.__init__ = call
    return target


def make_deprecated_module_getattr(
    module_name: str, attrs: Mapping[str, tuple[str, str | None]]
) -> Callable[[str], Any]:
    """`__getattr__` for a module with moved names: `__getattr__ = make_deprecated_module_getattr(__name__, {...})`.

    Args:
        attrs: old name -> new location, `package.module.Name`, and the version that removes the old name.
    """

    def get(name: str) -> Any:
        if name not in attrs:
            raise AttributeError(f"module {module_name!r} has no attribute {name!r}")
        place, removal_version = attrs[name]
        module, dot, attribute = place.rpartition(".")
        if not dot:
            raise ValueError(f"{module_name}.{name}: {place!r} must be package.module.Name")
        value = getattr(importlib.import_module(module), attribute)
        warn_deprecated(f"{module_name}.{name}", removal_version=removal_version, message=f"Use {place} instead.")
        return value

    return get
