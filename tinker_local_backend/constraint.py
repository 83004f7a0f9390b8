"""Constraints on sampled text, which the SDK does not have: a JSON schema, a regex, choices or a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from tinker_local_backend.errors import RequestError

ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""llguidance's options for JSON: if white space is unlimited, some models write nothing else."""

MAX_CHARACTERS = 1_000_000
"""Limit on the JSON of a constraint."""


@dataclass(frozen=True)
class Constraint:
    """The set of texts that a sample may be; give exactly one of the four. Arguments are copied.

    Args:
        json_schema: JSON that is valid under this schema, on one line, with at most one space after a comma or a colon. A key
            `x-guidance` in the schema sets other options of llguidance, such as {"whitespace_flexible": true}.
        regex: a text that matches this regular expression as a whole (syntax of Rust's crate regex).
        choices: one of these texts.
        grammar: a text of this Lark grammar, in the dialect of llguidance.

    Raises:
        RequestError: none or several are given, or one has the wrong type. A constraint that llguidance cannot compile is
            refused by the sampling call.
    """

    json_schema: Mapping[str, Any] | None = None
    regex: str | None = None
    choices: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [field.name for field in fields(self) if getattr(self, field.name) is not None]
        if len(given) != 1:
            raise RequestError(
                f"a constraint has {' and '.join(given) or 'nothing'}; give exactly one of json_schema, regex, choices, grammar"
            )
        name, value = given[0], getattr(self, given[0])
        if name == "json_schema":
            if not isinstance(value, Mapping):
                raise RequestError(f"constraint json_schema is {value!r:.80}; it must be a dict")
            value = _json_copy(value)
        elif name == "choices":
            if isinstance(value, str) or not isinstance(value, Sequence):
                raise RequestError(f"constraint choices is {value!r:.80}; it must be a list of texts")
            value = tuple(value)
            if not value or not all(isinstance(choice, str) and choice for choice in value):
                raise RequestError(
                    f"constraint choices is {value!r:.80}; it must hold at least one text, and none empty"
                )
        elif not isinstance(value, str) or not value:
            raise RequestError(f"constraint {name} is {value!r:.80}; it must be a text that is not empty")
        object.__setattr__(self, name, value)
        if (length := len(self.key)) > MAX_CHARACTERS:
            raise RequestError(
                f"constraint {name} has {length} characters as JSON; at most {MAX_CHARACTERS} are allowed"
            )

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return next(field.name for field in fields(self) if getattr(self, field.name) is not None)

    @cached_property
    def key(self) -> str:
        """The constraint as JSON, in which the order of a schema's properties counts: samples have that order."""
        return json.dumps(self.as_json(), ensure_ascii=False)

    def as_json(self) -> dict[str, Any]:
        """For another process. `Constraint(**it)` is equal to this one."""
        value = getattr(self, self.kind)
        return {self.kind: list(value) if self.kind == "choices" else value}


def _json_copy(schema: Mapping[str, Any]) -> Any:
    try:
        return json.loads(json.dumps(dict(schema), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"constraint json_schema is not JSON: {error}") from None


def from_json(value: Any) -> Constraint | None:
    """The inverse of `Constraint.as_json`; None stays None. Raises RequestError for anything else."""
    if value is None:
        return None
    known = {field.name for field in fields(Constraint)}
    if not isinstance(value, Mapping) or not value.keys() <= known:
        raise RequestError(f"constraint is {value!r:.80}; it must be an object with one of {', '.join(sorted(known))}")
    return Constraint(**value)
