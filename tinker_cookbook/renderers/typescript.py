"""Tools declared as TypeScript-like function types, the form that the Harmony format uses.

    // Adds two numbers.
    type add = (_: {
    // The first.
    a: number,
    b?: number, // default: 1
    }) => any;

Spacing and comments are those that the models were trained with, even where they are not idiomatic TypeScript.
"""

import json
from typing import Any

from tinker_cookbook.renderers.types import ToolSpec
from tinker_cookbook.utils.narrowing import is_list, is_object

Schema = dict[str, object]
_PRIMITIVES = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean"}


def declare_namespace(name: str, tools: list[ToolSpec]) -> str:
    """The section of a developer message that declares `tools` as functions of one namespace."""
    functions = "".join(f"{_declare_function(tool)}\n\n" for tool in tools)
    return f"## {name}\n\nnamespace {name} {{\n\n{functions}}} // namespace {name}"


def _declare_function(tool: ToolSpec) -> str:
    comment = "".join(f"// {line}\n" for line in tool["description"].splitlines())
    parameters = tool["parameters"]
    parameter = f"_: {type_of(parameters)}" if _mapping(parameters, "properties") else ""
    return f"{comment}type {tool['name']} = ({parameter}) => any;"


def type_of(schema: Schema, indent: str = "") -> str:
    """The type that a JSON schema describes; `any` for schemas that the notation cannot express (anyOf, $ref, no type)."""
    if variants := _schemas(schema, "oneOf"):
        return "".join(f"\n{indent} | {_variant(variant, indent, None, quoted=True)}" for variant in variants)
    kind = schema.get("type")
    if is_list(kind) and kind:
        return " | ".join("number" if name == "integer" else str(name) for name in kind)
    if kind == "object":
        return _object_type(schema, indent)
    if kind == "array":
        items = schema.get("items")
        return f"{type_of(items, indent)}[]" if is_object(items) else "Array<any>"
    choices = schema.get("enum")
    if kind == "string" and is_list(choices) and choices:
        return " | ".join(f'"{choice}"' for choice in choices if isinstance(choice, str))
    return _PRIMITIVES.get(str(kind), "any")


def _object_type(schema: Schema, indent: str) -> str:
    comment = f"{indent}// {schema['description']}\n" if schema.get("description") else ""
    required = schema.get("required")
    names: list[Any] = required if is_list(required) else []
    fields = "".join(
        _field(name if name in names else f"{name}?", field, indent)
        for name, field in _mapping(schema, "properties").items()
        if is_object(field)
    )
    return f"{comment}{{\n{fields}{indent}}}"


def _field(name: str, schema: Schema, indent: str) -> str:
    lines = [str(schema["title"]), ""] if schema.get("title") else []
    variants = _schemas(schema, "oneOf")
    description = schema.get("description")
    repeated = bool(variants) and variants[0].get("description") == description
    shown = bool(description) and not repeated
    if not variants and description:
        lines.append(str(description))
    examples = schema.get("examples")
    if is_list(examples) and examples:
        lines += ["Examples:", *(f'- "{example}"' for example in examples if isinstance(example, str))]
    if not variants:
        default = f" // {_default(schema)}" if "default" in schema else ""
        return f"{_comments(lines, indent)}{indent}{name}: {_nullable(schema, indent + '    ')},{default}\n"
    lines += [str(description)] if shown else []
    lines += [_default(schema)] if "default" in schema else []
    # The first variant is not described again if the field is described just above.
    choices = "".join(
        f"{indent} | {_variant(variant, indent, variant.get('description') if shown and i == 0 else description)}\n"
        for i, variant in enumerate(variants)
    )
    return f"{_comments(lines, indent)}{indent}{name}:\n{choices}{indent},\n"


def _variant(schema: Schema, indent: str, known: object, quoted: bool = False) -> str:
    """One alternative of oneOf; its description follows as a comment unless it is `known`."""
    notes = [str(schema["description"])] if schema.get("description") and schema["description"] != known else []
    notes += [_default(schema, quoted)] if "default" in schema else []
    return _nullable(schema, indent + "   ") + (f" // {' '.join(notes)}" if notes else "")


def _nullable(schema: Schema, indent: str) -> str:
    written = type_of(schema, indent)
    return f"{written} | null" if schema.get("nullable") is True and "null" not in written else written


def _default(schema: Schema, quoted: bool = False) -> str:
    """The default as a comment: JSON, but the bare word for one of several named choices unless `quoted`."""
    value = schema["default"]
    if isinstance(value, str) and schema.get("enum") and not quoted:
        return f"default: {value}"
    return f"default: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}"


def _comments(lines: list[str], indent: str) -> str:
    return "".join(f"{indent}// {line}".rstrip() + "\n" for line in lines)


def _mapping(schema: Schema, key: str) -> Schema:
    value = schema.get(key)
    return value if is_object(value) else {}


def _schemas(schema: Schema, key: str) -> list[Schema]:
    value = schema.get(key)
    return [item for item in value if is_object(item)] if is_list(value) else []
