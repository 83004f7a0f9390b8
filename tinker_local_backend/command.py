"""Start-up of commands without the library's `run_recipe`: check the environment, parse keys, print errors as one line."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import NoReturn, TypeVar

from tinker_local_backend.environment import check_variables
from tinker_local_backend.errors import LocalBackendError, RequestError

T = TypeVar("T")


def check_command() -> None:
    """Exit with an error if a TINKER_* variable is unknown or has a wrong value, except under `--help`."""
    if {"--help", "-h"} & set(sys.argv[1:]):
        return
    try:
        check_variables()
    except RequestError as error:
        fail(error)


def parse(config_cls: type[T]) -> T:
    """Parse the config from the command line, after `check_command`. A value out of range is reported in one line."""
    import chz

    check_command()
    try:
        return chz.entrypoint(config_cls, allow_hyphens=True)
    except ValueError as error:
        fail(re.sub(r"^Expected X_(\w+) to ", r"\1 must ", str(error)))


def run(main: Callable[[T], None], config: T) -> None:
    """Call `main`; print an error of this package as one line, and exit with its `exit_code`."""
    try:
        main(config)
    except LocalBackendError as error:
        fail(error, error.exit_code)


def fail(error: LocalBackendError | str, code: int = LocalBackendError.exit_code) -> NoReturn:
    print(f"error: {error}", file=sys.stderr)
    raise SystemExit(code)
