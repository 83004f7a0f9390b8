"""Tools declared as TypeScript, in the form that Kimi-K2.5 and K2.6 were trained with.

    # Tools

    ## functions
    namespace functions {
    // Adds two numbers.
    type add = (_: {
      // The first.
      a: number,
      // Default: 1
      b?: number
    }) => any;
    }

Fields are sorted by name, required ones first. Schemas under `$defs` become interfaces.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers.types import ToolSpec
from tinker_cookbook.utils.narrowing import is_list, is_mapping

Schema: TypeAlias = Mapping[str, object]

_INDENT = "  "
_SELF = "parameters"
_TYPES = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "{}",
    "array": "Array<any>",
}
_BOUNDS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}


def encode_tools_to_typescript_style(tools: Sequence[Mapping[str, Any]]) -> str:
    """The content of the message that declares `tools`, each `{"type": "function", "function": ToolSpec}`; "" for none.

    Raises RendererError for a tool that is not a function, and for a schema that the notation cannot express.
    """
    if others := sorted({str(tool.get("type")) for tool in tools} - {"function"}):
        raise RendererError(f"tools of type {', '.join(others)} cannot be declared: only functions can")
    if not tools:
        return ""
    functions = "\n".join(_function(tool["function"]) for tool in tools)
    return f"# Tools\n\n## functions\nnamespace functions {{\n{functions}\n}}\n"


def _function(tool: ToolSpec) -> str:
    parameters = tool["parameters"] or {}
    lines: list[str] = []
    argument_type = _object(parameters, "")
    if _refers_to_itself(parameters):
        fields = [
            _field(name, schema, parameters, _INDENT) for name, schema in _mapping(parameters, "properties").items()
        ]
        lines.append(f"interface {_SELF} " + ("{\n" + ",\n".join(fields) + "\n}" if fields else "{}"))
        argument_type = _SELF
    for name, schema in _mapping(parameters, "$defs").items():
        described = _comments(schema.get("description"), "") if is_mapping(schema) else ""
        lines.append(f"{described}interface {name} {_type(schema, '')}")
    lines.append(f"{_comments(tool['description'], '')}type {tool['name']} = (_: {argument_type}) => any;")
    return "\n".join(lines)


def _object(schema: Schema, indent: str) -> str:
    properties, inner = _mapping(schema, "properties"), indent + _INDENT
    by_need = sorted(properties, key=lambda name: (not _is_required(name, schema), name))
    fields = [_field(name, properties[name], schema, inner) for name in by_need]
    if (others := schema.get("additionalProperties")) is not None:
        any_or_never = {True: "any", False: "never"}
        fields.append(
            f"{inner}[k: string]: {any_or_never[others] if isinstance(others, bool) else _type(others, inner)}"
        )
    return "{\n" + ",\n".join(fields) + f"\n{indent}}}" if fields else "{}"


def _field(name: str, schema: object, parent: Schema, indent: str) -> str:
    comments = _notes(schema, indent)
    default = schema.get("default") if is_mapping(schema) else None
    if default is not None:
        shown = repr(default) if isinstance(default, int | float) else json.dumps(default, ensure_ascii=False)
        comments += f"{indent}// Default: {shown}\n"
    return f"{comments}{indent}{name}{'' if _is_required(name, parent) else '?'}: {_type(schema, indent)}"


def _type(schema: object, indent: str) -> str:
    if isinstance(schema, bool):
        return "any" if schema else "null"
    if not is_mapping(schema):
        raise _not_expressible(schema)
    reference, variants, choices, kind = (schema.get(key) for key in ("$ref", "anyOf", "enum", "type"))
    if reference is not None:
        return _resolve_reference(str(reference))
    if is_list(variants):
        return " | ".join(_type(variant, indent) for variant in variants)
    if is_list(choices):
        return " | ".join(f'"{choice}"' if isinstance(choice, str) else str(choice) for choice in choices)
    if is_list(kind) and all(name in _TYPES for name in kind):
        return " | ".join(_TYPES[name] for name in kind)
    if kind == "object":
        return _object(schema, indent)
    if kind == "array":
        return _array(schema.get("items"), indent)
    if isinstance(kind, str):
        return _TYPES.get(kind, kind)
    if not schema:
        return "any"
    raise _not_expressible(schema)


def _array(items: object, indent: str) -> str:
    inner = indent + _INDENT
    if not items:
        return "Array<any>"
    if notes := _notes(items, inner):
        return f"Array<\n{notes}{inner}{_type(items, inner)}\n{indent}>"
    return f"Array<{_type(items, indent)}>"


def _notes(schema: object, indent: str) -> str:
    """The comments before a field or an item: its description and bounds."""
    if not is_mapping(schema):
        return ""
    plain = not {"$ref", "anyOf", "enum"} & schema.keys()
    keys = _BOUNDS.get(str(schema.get("type")), ()) if plain else ()
    bounds = ", ".join(f"{key}: {schema[key]}" for key in keys if key in schema)
    return _comments(schema.get("description"), indent) + (f"{indent}// {bounds}\n" if bounds else "")


def _comments(text: object, indent: str) -> str:
    """A comment per line; an empty line stays empty."""
    lines = str(text).split("\n") if text else []
    return "".join((f"{indent}// {line}" if line else "") + "\n" for line in lines)


def _resolve_reference(reference: str) -> str:
    if reference == "#":
        return _SELF
    if reference.startswith("#/$defs/"):
        return reference.rpartition("/")[2]
    raise RendererError(f"$ref {reference!r} cannot be followed; refer to '#' or '#/$defs/NAME'")


def _refers_to_itself(schema: object) -> bool:
    if is_mapping(schema):
        return schema.get("$ref") == "#" or any(_refers_to_itself(value) for value in schema.values())
    return is_list(schema) and any(_refers_to_itself(item) for item in schema)


def _is_required(name: str, schema: Schema) -> bool:
    required = schema.get("required")
    return is_list(required) and name in required


def _mapping(schema: Schema, key: str) -> Schema:
    value = schema.get(key)
    return value if is_mapping(value) else {}


def _not_expressible(schema: object) -> RendererError:
    return RendererError(f"the schema {schema!r} cannot be declared: give it a type, an enum, anyOf or $ref")
