"""Checked arguments of an environment: `env_args`."""

import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import chz
from chz.tiepin import is_subtype_instance

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.utils.fields import fill

T = TypeVar("T")


@contextmanager
def arguments_called(key: str) -> Generator[None]:
    """Rename arguments in errors: `env_args.x` becomes `<key>.x`, or `x` for an empty key."""
    try:
        yield
    except ConfigurationError as error:
        error.args = (str(error).replace("env_args.", f"{key}." if key else ""),)
        raise


def check_type(owner: str, key: str, value: Any, hint: Any) -> None:
    """Raises ConfigurationError for a value of `env_args` that does not match the type of its annotation."""
    if not is_subtype_instance(value, hint):
        wanted = hint.__name__ if isinstance(hint, type) else str(hint)
        raise ConfigurationError(
            f"env_args.{key}={value!r}: is {type(value).__name__}, but {owner} takes {key}: {wanted}"
        )


def fill_with_args(config_cls: type[T], settings: Any, env_args: Mapping[str, Any], **overrides: Any) -> T:
    """Call `fill` with `env_args` as additional fields. Raises ConfigurationError for values that the class refuses."""
    for key, value in env_args.items():
        check_type(config_cls.__name__, key, value, chz.chz_fields(config_cls)[key].final_type)
    try:
        return fill(config_cls, settings, **overrides, **env_args)
    except ConfigurationError:
        raise
    except (TypeError, ValueError) as error:  # chz names the field as it stores it
        named = re.sub(rf"\bX_({'|'.join(env_args)})\b", r"env_args.\1", str(error)).replace("X_", "")
        raise ConfigurationError(f"{config_cls.__name__}: {named}") from None
