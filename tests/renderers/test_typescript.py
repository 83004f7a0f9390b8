"""Tools as TypeScript-like declarations: one field for each kind of JSON schema, spelled out."""

import pytest

from tinker_cookbook.renderers import ToolSpec
from tinker_cookbook.renderers.typescript import declare_namespace


@pytest.mark.parametrize(
    ("schema", "field"),
    [
        ({"type": "string"}, "x?: string,"),
        ({"type": "integer", "description": "n", "default": 0}, "// n\nx?: number, // default: 0"),
        ({"type": "boolean", "nullable": True}, "x?: boolean | null,"),
        ({"type": "string", "enum": ["c", "f"], "default": "c"}, 'x?: "c" | "f", // default: c'),
        ({"type": "string", "default": "é"}, 'x?: string, // default: "é"'),
        ({"type": ["integer", "null"], "nullable": True}, "x?: number | null,"),
        ({"type": "array", "items": {"type": "string"}}, "x?: string[],"),
        ({"type": "array"}, "x?: Array<any>,"),
        ({"anyOf": [{"type": "string"}]}, "x?: any,"),
        ({}, "x?: any,"),
        ({"type": "string", "title": "T", "examples": ["e"]}, '// T\n//\n// Examples:\n// - "e"\nx?: string,'),
        ({"type": "object", "properties": {"k": {"type": "number"}}}, "x?: {\n    k?: number,\n    },"),
        (
            {"oneOf": [{"type": "string", "default": "x"}, {"type": "number", "description": "n"}], "description": "d"},
            '// d\nx?:\n | string // default: "x"\n | number // n\n,',
        ),
    ],
)
def test_types(schema: dict[str, object], field: str) -> None:
    tool = ToolSpec(name="f", description="", parameters={"type": "object", "properties": {"x": schema}})
    assert f"type f = (_: {{\n{field}\n}}) => any;" in declare_namespace("functions", [tool])
