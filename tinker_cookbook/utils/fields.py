"""Fields of chz configs: their defaults, and copying equal fields from one config to another."""

from __future__ import annotations

from typing import Any, TypeVar

import chz
from chz.field import Field
from chz.util import MISSING_TYPE

T = TypeVar("T")


def fill(config_cls: type[T], source: Any, **own: Any) -> T:
    """Make a `config_cls` with the fields of the same name in `source`, overridden by `own`.

    Raises TypeError for a required field that neither has, and for a name in `own` that is not a field.
    """
    known = chz.chz_fields(source)
    shared = {name: getattr(source, name) for name in chz.chz_fields(config_cls) if name in known and name not in own}
    return config_cls(**shared, **own)


def default_of(field: Field) -> Any:
    """A field's default; chz's MISSING for a required one."""
    factory = field._default_factory
    return field._default if isinstance(factory, MISSING_TYPE) else factory()
