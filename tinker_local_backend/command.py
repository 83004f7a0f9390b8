"""What commands without the library's `run_recipe` begin with: the environment, then their keys; a mistake is one line."""

from __future__ import annotations

import re
import sys
from typing import NoReturn, TypeVar

from tinker_local_backend.environment import check_variables
from tinker_local_backend.errors import LocalBackendError, RequestError

EXIT_USAGE = 2

T = TypeVar("T")


def check_command() -> None:
    """End the process where a TINKER_* variable is set that is unknown or not understood; `--help` is answered first."""
    if {"--help", "-h"} & set(sys.argv[1:]):
        return
    try:
        check_variables()
    except RequestError as error:
        fail(error)


def parse(config_cls: type[T]) -> T:
    """The config of the command line, after `check_command`. What is out of range is told in one line."""
    import chz

    check_command()
    try:
        return chz.entrypoint(config_cls, allow_hyphens=True)
    except ValueError as error:
        fail(re.sub(r"^Expected X_(\w+) to ", r"\1 must ", str(error)))


def fail(error: LocalBackendError | str, code: int = EXIT_USAGE) -> NoReturn:
    """Print what is wrong and exit."""
    print(f"error: {error}", file=sys.stderr)
    raise SystemExit(code)
