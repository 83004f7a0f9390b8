"""A stub module `verifiers`, for environments that import it where the package is not installed, while they are loaded."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from tinker_cookbook.env.verifiers import v0_1
from tinker_cookbook.exceptions import ConfigurationError

NAME = "verifiers"
_TAKEN = (
    v0_1.Environment,
    v0_1.SingleTurnEnv,
    v0_1.Rubric,
    v0_1.Parser,
    v0_1.ThinkParser,
    v0_1.XMLParser,
)
_TYPES = ("Messages", "State", "Info")
LOAD = "load_environment"

HOW_TO_GO_ON = (
    f"the package verifiers is not installed, and in its place there are {', '.join(one.__name__ for one in _TAKEN)}, "
    f"{', '.join(_TYPES)} and {LOAD}, for environments of one turn. For others install the release that they are written for "
    "(pip install -e '.[verifiers]', or '.[verifiers-legacy]'), and run python -m recipes.verifiers_rl taskset=..."
)


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{NAME}.{name}: {HOW_TO_GO_ON}")


def _make(load_environment: Callable[..., Any]) -> ModuleType:
    module = _StandIn(NAME, v0_1.__doc__)
    vars(module).update({one.__name__: one for one in _TAKEN} | {name: getattr(v0_1, name) for name in _TYPES})
    module.__dict__[LOAD] = load_environment
    module.__dict__["__all__"] = [*(one.__name__ for one in _TAKEN), *_TYPES, LOAD]
    module.__spec__ = ModuleSpec(NAME, None)
    return module


@contextmanager
def verifiers_stands_in(load_environment: Callable[..., Any]) -> Iterator[None]:
    """Within the body `import verifiers` returns the stub, unless such a package or module exists. It is removed
    afterwards.

    Args:
        load_environment: returns the environment object for a name and arguments, like `verifiers.load_environment`.

    Raises ConfigurationError for an import that the stub does not support.
    """
    if NAME in sys.modules or importlib.util.find_spec(NAME) is not None:
        yield
        return
    sys.modules[NAME] = _make(load_environment)
    try:
        yield
    except ImportError as error:  # `from verifiers import x`, which hides the module's message, or `import verifiers.x`
        if (error.name or "").partition(".")[0] != NAME:
            raise
        raise ConfigurationError(f"{error}: {HOW_TO_GO_ON}") from error
    finally:
        del sys.modules[NAME]
