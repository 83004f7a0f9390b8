"""Fields of chz configs: their defaults, and one config made from another's fields of the same names."""

from __future__ import annotations

from typing import Any, TypeVar

import chz
from chz.field import Field
from chz.util import MISSING_TYPE

T = TypeVar("T")


def fill(config_cls: type[T], source: Any, **own: Any) -> T:
    """A `config_cls` whose fields come from those of the same name in `source`, except `own`.

    Raises TypeError for a required field that neither has, and for one of `own` that is no field.
    """
    known = chz.chz_fields(source)
    shared = {name: getattr(source, name) for name in chz.chz_fields(config_cls) if name in known and name not in own}
    return config_cls(**shared, **own)


def default_of(field: Field) -> Any:
    """A field's default; chz's MISSING for a required one."""
    factory = field._default_factory
    return field._default if isinstance(factory, MISSING_TYPE) else factory()
