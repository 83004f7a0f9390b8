"""Plugins by name (a judge, a reward, a task, a loss, ...): resolve text on the command line to objects.

A text is a registered name, `package.module:object`, or `path/file.py:object`. From Python, pass the object itself.
The object is checked before a model loads, and the error for a wrong one shows what is expected, with an example.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from tinker_cookbook.exceptions import ConfigurationError

T = TypeVar("T")


@dataclass(frozen=True)
class Kind:
    """A kind of plugin for a config key.

    Attributes:
        key: the config's field, for errors ("reward_fn").
        wanted: one line that describes the object, its signature first.
        example: a few lines that define one.
        problem: returns what is wrong with an object, or None; never calls the object.
    """

    key: str
    wanted: str
    example: str
    problem: Callable[[Any], str | None]

    def check(self, part: Any, name: str) -> Any:
        """The object, if it is of this kind. `name` is the user's text. Raises ConfigurationError."""
        problem = self.problem(part)
        if problem is not None:
            raise ConfigurationError(f"{self.key}={name}: {problem}. {self.help()}")
        return part

    def help(self) -> str:
        """The expected object, with the example."""
        return f"Wanted: {self.wanted}\n\n{textwrap.indent(self.example.strip(), '    ')}\n"


class Registry(Generic[T]):
    """Plugins by name: the library's, and those that users register.

    Args:
        kind: the kind of the plugins.
        shipped: the library's plugins, by name.
    """

    def __init__(self, kind: Kind, shipped: Mapping[str, T]):
        self.kind = kind
        self._parts: dict[str, T] = dict(shipped)

    def register(self, name: str, part: T) -> None:
        """Register `part` under a name. Raises ConfigurationError for a name that is taken, empty, or looks like a
        path.
        """
        if not name or ":" in name or "," in name:
            raise ConfigurationError(f"{self.kind.key}: {name!r} is not a name; use letters, digits and underscores")
        if name in self._parts:
            raise ConfigurationError(f"{self.kind.key}: the name {name!r} is taken; choose another")
        self._parts[name] = self.kind.check(part, repr(name))

    def unregister(self, name: str) -> None:
        """Remove a name, so that it can be registered again."""
        self._parts.pop(name, None)

    def names(self) -> list[str]:
        """All names, the library's first."""
        return list(self._parts)

    def __contains__(self, name: object) -> bool:
        return name in self._parts

    def resolve(self, given: Any, also: Iterable[str] = ()) -> T:
        """The plugin for a text or an object. Raises ConfigurationError for anything else.

        `also` are more names that errors list as known.
        """
        if not isinstance(given, str):
            return self.kind.check(given, describe(given))
        if given in self._parts:
            return self._parts[given]
        return self.kind.check(load_object(self.kind, given, [*also, *self._parts]), repr(given))


def is_reference(text: str) -> bool:
    """Whether a text has the form `package.module:object` or `path/file.py:object`."""
    place, colon, name = text.rpartition(":")
    is_place = place.endswith(".py") or all(part.isidentifier() for part in place.split("."))
    return bool(colon) and is_place and all(part.isidentifier() for part in name.split("."))


def full_reference(text: str) -> str:
    """Make the path in `path/file.py:object` absolute, so that it works from any folder; other names are unchanged."""
    place, _, name = text.rpartition(":")
    if not (place.endswith(".py") and is_reference(text)):
        return text
    return f"{Path(place).expanduser().resolve()}:{name}"


def load_object(kind: Kind, reference: str, known: Iterable[str] = ()) -> Any:
    """The object of `package.module:object` or `path/file.py:object`.

    Raises:
        ConfigurationError: neither a known name nor of these forms, no such file, module or object, or an error while
            importing the module. The message lists the known names and shows what is expected.
    """
    place, _, name = reference.rpartition(":")
    names = ", ".join(known)
    unknown = ConfigurationError(
        f"{kind.key}={reference!r} is unknown; use {names + ', ' if names else ''}package.module:object or "
        f"path/file.py:object. {kind.help()}"
    )
    if not is_reference(reference):
        raise unknown
    try:
        module = load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except FileNotFoundError as error:
        raise ConfigurationError(f"{kind.key}={reference!r}: there is no file {error.filename}") from None
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == place.partition(".")[0]:
            raise unknown from None
        raise ConfigurationError(f"{kind.key}={reference!r}: importing {place} failed: {what_failed(error)}") from error
    loaded: Any = module
    for part in name.split("."):
        if not hasattr(loaded, part):
            raise ConfigurationError(f"{kind.key}={reference!r}: {place} has no {name}. {kind.help()}")
        loaded = getattr(loaded, part)
    return loaded


def what_failed(error: Exception) -> str:
    """The error of an import, and the line of the imported code that raised it."""
    frames = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    is_importlib = [str(file).startswith("<frozen importlib") for file, _ in frames]
    below = frames[is_importlib.index(True) :] if any(is_importlib) else []  # importlib runs the imported code
    places = [f" ({file.name}, line {line})" for file, line in below if not str(file).startswith("<")]
    return f"{type(error).__name__}: {error}{places[-1] if places else ''}"


def load_file(path: Path) -> ModuleType:
    """The module of a file, cached per file. It can import modules next to it, and other processes unpickle by its
    name.

    A file `__init__.py` is imported as its folder's package. Raises FileNotFoundError, ImportError, or the module's
    own error.
    """
    path = path.expanduser().resolve()
    if not path.is_file():
        raise FileNotFoundError(2, "no such file", str(path))
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(path) and getattr(module, "__name__", "") != "__main__":
            return module
    name, root = (path.parent.name, path.parent.parent) if path.stem == "__init__" else (path.stem, path.parent)
    if str(root) not in sys.path:
        sys.path.append(str(root))
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin != str(path):
        raise ImportError(
            f"a module called {name} exists already; rename the {'folder' if path.stem == '__init__' else 'file'}"
        )
    return importlib.import_module(name)


def describe(part: Any) -> str:
    """The name of a script's object in messages: `module:name`."""
    return f"{getattr(part, '__module__', '?')}:{getattr(part, '__qualname__', type(part).__qualname__)}"


def takes_keyword(function: Any, names: tuple[str, ...], keyword: str) -> bool:
    """Whether a function accepts as many positional arguments as `names`, plus this keyword."""
    try:
        inspect.signature(function).bind(*names, **{keyword: None})
    except (TypeError, ValueError):
        return False
    return True


def parameter_problem(function: Any, names: tuple[str, ...], keyword: str | None = None) -> str | None:
    """The problem with a function that will be called with as many positional arguments as `names`; None: none.

    `keyword` is an optional keyword argument.
    """
    if not callable(function):
        return f"is not a function, but {type(function).__name__}"
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None  # a builtin without a signature
    if keyword is not None and takes_keyword(function, names, keyword):
        return None
    try:
        signature.bind(*names)
    except TypeError:
        return f"takes {signature}, but will be called with ({', '.join(names)})"
    return None
