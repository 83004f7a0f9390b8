"""Fields of chz configs: their defaults, and copying equal fields from one config to another."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import chz
from chz.field import Field
from chz.util import MISSING, MISSING_TYPE

from tinker_cookbook.exceptions import ConfigurationError

T = TypeVar("T")

REQUIRED: Any = object()
"""Given as a default, it makes the field required."""


class Defaults:
    """Base of chz classes whose subclasses change inherited defaults in the class statement:

        @chz.chz(typecheck=True)
        class CLIConfig(RLConfig, max_steps=16):
            DOCS = docs(max_steps="steps of the last stage")

    A field keeps its type and validators, and its documentation unless DOCS replaces it. A function is a default_factory;
    REQUIRED removes the default.
    """

    def __init_subclass__(cls, **defaults: Any) -> None:
        super().__init_subclass__()
        other_docs = vars(cls).get("DOCS", {})
        for name in dict.fromkeys([*defaults, *other_docs]):
            override(cls, name, defaults.get(name, MISSING), other_docs.get(name))


def docs(**of_fields: str) -> Mapping[str, str]:
    """New documentation of inherited fields, by name (`Defaults`)."""
    return of_fields


class FieldGroup(Defaults):
    """Base of chz classes whose fields other configs inherit. Only its direct subclasses are groups.

    The help lists their fields with those of the config that inherits them.
    """


def is_group(cls: type) -> bool:
    """Whether a class is a field group, not a config."""
    return FieldGroup in cls.__bases__


def override(cls: type, name: str, default: Any = MISSING, doc: str | None = None) -> None:
    """Redeclare an inherited field with another default or documentation, before `chz.chz` sees the class.

    Raises TypeError for a name that no base class has as a field.
    """
    inherited = [fields[name] for base in cls.__mro__ if name in (fields := getattr(base, "__chz_fields__", {}))]
    if not inherited:
        raise TypeError(f"{cls.__name__} inherits no field {name!r}")
    field = copy.copy(inherited[0])
    if default is REQUIRED:
        field._default = field._default_factory = MISSING
    elif not isinstance(default, MISSING_TYPE):
        is_factory = callable(default) and not isinstance(default, type)
        field._default, field._default_factory = (MISSING, default) if is_factory else (default, MISSING)
    if doc is not None:
        field._doc = doc
    cls.__annotations__ = {**inspect.get_annotations(cls), name: field.final_type}
    setattr(cls, name, field)


def of_value(function: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """A munger that applies a function to the field's value."""
    return lambda owner, value: function(value)


def positive_or_none(owner: Any, attribute: str) -> None:
    """Validator for a positive number, or None. Raises ConfigurationError."""
    value = getattr(owner, attribute)
    if value is not None and not 0 < value < math.inf:
        raise ConfigurationError(f"{attribute.removeprefix('X_')}: must be greater than 0, got {value:g}")


def fill(config_cls: type[T], source: Any, **overrides: Any) -> T:
    """Make a `config_cls` with the fields of the same name in `source`, overridden by `overrides`.

    Raises TypeError for a required field that neither has, and for a name in `overrides` that is not a field.
    """
    known = chz.chz_fields(source)
    shared = {
        name: getattr(source, name) for name in chz.chz_fields(config_cls) if name in known and name not in overrides
    }
    return config_cls(**shared, **overrides)


def default_of(field: Field) -> Any:
    """A field's default; chz's MISSING for a required one."""
    kept = vars(field)  # chz has no public name for it
    factory = kept["_default_factory"]
    return kept["_default"] if isinstance(factory, MISSING_TYPE) else factory()


def doc_of(field: Field) -> str:
    """A field's documentation."""
    return vars(field)["_doc"]
