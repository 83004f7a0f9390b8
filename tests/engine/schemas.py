"""Random JSON schemas, from a seed: what every one of their samples must be valid under."""

from __future__ import annotations

import random
from typing import Any

WORDS = ("name", "age", "x", "tags", "größe", "a b", 'quo"te', "back\\slash")


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema whose samples are short: numbers, strings and arrays have bounds."""
    makers = [_string, _pattern, _integer, _number, _enum, _const, _boolean, _null]
    nested = [_array, _object, _object, _any_of, _reference]
    return rng.choice(nested if depth == 3 else makers + nested if depth else makers)(rng, depth)


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randrange(3)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randrange(5)}


def _pattern(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "string", "pattern": rng.choice(("^[a-z]{1,4}$", "^(yes|no)$", "^[A-Z][0-9]{2}$", "^é{2}$"))}


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randrange(-50, 50)
    return {"type": "integer", "minimum": least, "maximum": least + rng.randrange(200)}


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randrange(-50, 50)
    return {"type": "number", "minimum": least, "exclusiveMaximum": least + 1 + rng.randrange(9), "multipleOf": 0.25}


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": rng.sample(["red", "green", 3, -1.5, None, True, {"k": [1]}, "wörter\n"], 1 + rng.randrange(4))}


def _const(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"const": rng.choice(("fixed", 17, False, [1, 2], {"k": "v"}))}


def _boolean(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "boolean"}


def _null(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "null"}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randrange(2)
    return {
        "type": "array",
        "items": random_schema(rng, depth - 1),
        "minItems": least,
        "maxItems": least + rng.randrange(3),
    }


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(WORDS, 1 + rng.randrange(3))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": False,
    }


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}


def _reference(rng: random.Random, depth: int) -> dict[str, Any]:
    """The target is one of DEFINITIONS, which `rooted` adds."""
    return {"$ref": f"#/$defs/{rng.choice(('point', 'word'))}"}


DEFINITIONS = {
    "point": {
        "type": "object",
        "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}, "y": {"$ref": "#/$defs/word"}},
        "required": ["x", "y"],
        "additionalProperties": False,
    },
    "word": {"type": "string", "pattern": "^[a-z]{1,3}$"},
}


def rooted(schema: dict[str, Any]) -> dict[str, Any]:
    """With the definitions that its references name."""
    return {**schema, "$defs": DEFINITIONS}
