"""Configs that nest other configs: their command line, their help, and one filled from another by the names of its fields.

What chz leaves open: a nested config given in part (`advantage.scale=token`) keeps the other values that its parent chose,
and the help shows the defaults that hold for this config, its own keys before those that it inherits.

A config class may have, as attributes that are no fields,
    SHARED_KEYS   names that the help lists together, under the class that says so
    ALIASES       what other programs call keys: an argument under such a name is one of the key
    MOVED_KEYS    names of old, each with what stands in its place
    ARGS_KEYS     names of parts, each with the key that holds its arguments: with {"env": "env_args"}, env.x=1 is env_args.x=1
a class method `layer(arguments)`, values below those of the command line that follow from it (a preset), and a class method
`read_arguments(arguments)`, which gives them under the names of the fields.
"""

from __future__ import annotations

import inspect
import logging
import re
import shutil
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import chz
from chz.blueprint import Blueprint
from chz.field import Field
from chz.util import MISSING_TYPE

from tinker_cookbook.exceptions import ConfigurationError

logger = logging.getLogger(__name__)

T = TypeVar("T")

HELP_WIDTH = (80, 130)
"""Narrowest and widest help."""


def with_default(owner: type, name: str, default: Any) -> Any:
    """The field `name` of `owner` for a subclass that has another default: documentation and validators stay."""
    field = chz.chz_fields(owner)[name]
    kept: dict[str, Any] = {"doc": field._doc, "validator": list(field._validator), "munger": field._munger}
    if chz.is_chz(default):
        return chz.field(default_factory=lambda: default, **kept)
    return chz.field(default=default, **kept)


def fill(config_cls: type[T], source: Any, **own: Any) -> T:
    """A `config_cls` whose fields come from those of the same name in `source`, except `own`.

    Raises TypeError for a required field that neither has, and for one of `own` that is no field.
    """
    known = chz.chz_fields(source)
    shared = {name: getattr(source, name) for name in chz.chz_fields(config_cls) if name in known and name not in own}
    return config_cls(**shared, **own)


def parse(config_cls: type[T], arguments: Sequence[str]) -> T:
    """The config that `key=value` arguments ask for.

    Raises:
        ConfigurationError: a key of old, or one that is given under two names.
        ValueError, TypeError: a value that the config refuses, or an argument that is not `key=value`.
        chz.blueprint exceptions: unknown keys, missing or unreadable values.
    """
    if hasattr(config_cls, "read_arguments"):
        arguments = config_cls.read_arguments(arguments)  # pyright: ignore[reportAttributeAccessIssue]
    arguments = [_args_key(config_cls, argument) for argument in _without_aliases(config_cls, arguments)]
    _say_repeated(arguments)
    given = keys_and_values(arguments)
    for key, place in getattr(config_cls, "MOVED_KEYS", {}).items():
        if key in given and key not in chz.chz_fields(config_cls):
            raise ConfigurationError(f"{key}={given[key]}: this key is now {place}")
    blueprint = Blueprint(config_cls).apply(_nested_defaults(config_cls, given), layer_name="default")
    layer = config_cls.layer(given) if hasattr(config_cls, "layer") else {}  # pyright: ignore[reportAttributeAccessIssue]
    blueprint.apply(layer, layer_name="preset")
    # What the layer says of a key that is given (preset itself) is its reading of that key.
    rest = [argument for argument in arguments if not keys_and_values([argument]).keys() & layer.keys()]
    return blueprint.apply_from_argv(rest, allow_hyphens=True).make()


def _say_repeated(arguments: Sequence[str]) -> None:
    """Scripts end their command lines in `"$@"`, so the last value counts; a reader of the log sees which."""
    found: dict[str, str] = {}
    for argument in arguments:
        ((key, value),) = keys_and_values([argument]).items()
        if found.get(key, value) != value:
            logger.warning("%s is given twice, as %s and %s: the last counts", key, found[key], value)
        found[key] = value


def _without_aliases(config_cls: type, arguments: Sequence[str]) -> list[str]:
    given, aliases = keys_and_values(arguments), getattr(config_cls, "ALIASES", {})
    for alias, key in aliases.items():
        if alias in given and key in given:
            raise ConfigurationError(
                f"{alias}={given[alias]} and {key}={given[key]} are the same key; give one of the two"
            )
    pairs = [argument.lstrip("-").partition("=") for argument in arguments]
    return [
        f"{aliases[key]}={value}" if equals and key in aliases else argument
        for argument, (key, equals, value) in zip(arguments, pairs, strict=True)
    ]


def _args_key(config_cls: type, argument: str) -> str:
    key = argument.lstrip("-").partition("=")[0]
    part, dot, _ = key.partition(".")
    holder = getattr(config_cls, "ARGS_KEYS", {}).get(part)
    return argument.replace(f"{part}.", f"{holder}.", 1) if dot and holder is not None else argument


def as_typed(config_cls: type, arguments: Sequence[str], message: str) -> str:
    """An error's text with the arguments of parts called as on the command line: env.x, not env_args.x."""
    typed = {key.partition(".")[0] for key in keys_and_values(arguments)}
    for part, holder in getattr(config_cls, "ARGS_KEYS", {}).items():
        if holder not in typed:
            message = re.sub(rf"\b{holder}\.(?=\w)", f"{part}.", message)
    return message


def keys_and_values(arguments: Sequence[str]) -> dict[str, str]:
    """`key=value` arguments as texts; of several with one key the last counts."""
    pairs = (argument.lstrip("-").partition("=") for argument in arguments)
    return {key: value for key, _, value in pairs}


def _nested_defaults(config_cls: type, given: Mapping[str, str]) -> dict[str, Any]:
    """What the defaults that are configs consist of, so that a part can be given. An argument for the whole counts alone."""
    values: dict[str, Any] = {}
    for name, field in chz.chz_fields(config_cls).items():
        default = default_of(field)
        if chz.is_chz(default) and name not in given:
            parts = chz.beta_to_blueprint_values(default)
            values |= {name: type(default)} | {f"{name}.{key}": value for key, value in parts.items() if key}
    return values


def default_of(field: Field) -> Any:
    """A field's default; chz's MISSING for a required one."""
    factory = field._default_factory
    return field._default if isinstance(factory, MISSING_TYPE) else factory()


def help_text(config_cls: type) -> str:
    """The keys of a config with their defaults, section by section: its own, those of its bases, then what is nested.

    A section is a class; a field stands under the first class that declared it, or with SHARED_KEYS. A key is `name=default`;
    one without default is required.
    """
    fields, sections = chz.chz_fields(config_cls), _sections(config_cls)
    nested = {name: cls for name, field in fields.items() if (cls := _nested_class(field)) is not None}
    blocks = []
    for owner, names in sections.items():
        rows = [_row(name, fields[name]) for name in names if name not in nested]
        if rows:
            blocks.append(f"{_first_line(owner)}\n{_table(rows)}")
    for names in sections.values():
        for name in names:
            if name in nested:
                default = default_of(fields[name])
                how = "" if chz.is_chz(default) else "; off unless a key is given"
                rows = list(_nested_rows(name, nested[name], default))
                blocks.append(f"{name}: {fields[name]._doc}{how}\n{_table(rows)}")
    return "\n\n".join(blocks)


def _sections(config_cls: type) -> dict[type, list[str]]:
    """The names of the fields, by the class under which the help lists them, in the order of the help."""
    classes = [cls for cls in config_cls.__mro__ if chz.is_chz(cls)]
    shared_by = next((cls for cls in reversed(classes) if "SHARED_KEYS" in vars(cls)), None)
    shared = [*getattr(shared_by, "SHARED_KEYS", ())]
    sections: dict[type, list[str]] = {cls: [] for cls in classes}
    known = chz.chz_fields(config_cls)
    for cls in classes:
        if cls is shared_by:
            sections[cls] = [name for name in shared if name in known]
        for name in inspect.get_annotations(cls):
            first = [other for other in classes if name in inspect.get_annotations(other)][-1]
            if first is cls and name in known and name not in shared:
                sections[cls].append(name)
    return sections


def _nested_class(field: Field) -> type | None:
    """The config class that a field holds, alone or besides None; None for other fields."""
    is_union = typing.get_origin(field.final_type) in (typing.Union, types.UnionType)
    options = typing.get_args(field.final_type) if is_union else (field.final_type,)
    options = [option for option in options if option is not type(None)]
    return options[0] if len(options) == 1 and isinstance(options[0], type) and chz.is_chz(options[0]) else None


def _nested_rows(prefix: str, config_cls: type, default: Any) -> Iterator[tuple[str, str]]:
    for name, field in chz.chz_fields(config_cls).items():
        value = getattr(default, name) if chz.is_chz(default) else default_of(field)
        inner = _nested_class(field)
        if inner is None:
            yield _row(f"{prefix}.{name}", field, value)
        else:
            yield from _nested_rows(f"{prefix}.{name}", inner, value)


def _row(key: str, field: Field, *value: Any) -> tuple[str, str]:
    default = value[0] if value else default_of(field)
    # Where None means a default that the documentation tells, "None" would be a second and wrong answer.
    told = default is None and "default:" in field._doc
    text = "" if isinstance(default, MISSING_TYPE) or told else _text(default)
    return f"{key}={text}", field._doc


def _text(value: Any) -> str:
    if isinstance(value, str) and not value.isprintable():
        return repr(value)  # a text of several lines stays on its line
    return str(value) if isinstance(value, str | int | float | None) else repr(value)


def _first_line(config_cls: type) -> str:
    return (inspect.getdoc(config_cls) or config_cls.__name__).splitlines()[0].partition(". ")[0].rstrip(".") + ":"


def _table(rows: Sequence[tuple[str, str]]) -> str:
    narrowest, widest = HELP_WIDTH
    width = min(max(shutil.get_terminal_size().columns, narrowest), widest)
    column = min(max(len(key) for key, _ in rows), width // 2 - 4) + 4
    lines = []
    for key, doc in rows:
        start = f"  {key}".ljust(column)
        if not start.endswith("  "):
            lines.append(start)
            start = " " * column
        wrapper = textwrap.TextWrapper(width, start, " " * column, break_long_words=False, break_on_hyphens=False)
        lines += wrapper.wrap(doc) or [start.rstrip()]
    return "\n".join(lines)
