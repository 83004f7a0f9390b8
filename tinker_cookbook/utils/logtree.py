"""Text for people, as a tree of sections, written as one HTML file and as JSON.

A tree is built node by node, or through the context: while a trace is open, `log_text` and the others add to the innermost
open section, and without one they do nothing. An asyncio task starts out in the section it was created in and opens its own
from there, so tasks that run at the same time do not write into each other's.

    with logtree.init_trace("Answers", path="answers.html"):
        with logtree.scope_header("Question 1"):
            logtree.log_text(reply, label="reply")
            logtree.table({"reward": 1.0})

Text is never taken for markup. What belongs into a transcript is left to the callers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

import jinja2

from tinker_cookbook.utils.files import write_json, write_text

Cell: TypeAlias = str | int | float | bool | None
TableData: TypeAlias = Mapping[str, Any] | Sequence[Mapping[str, Any]]


@dataclass
class Node:
    """A part of a tree.

    A section has a heading and children; details are a section that is folded until one opens it. A text has a label, a
    table a label too, and rows. A table without `columns` has a name and a value in each row.
    """

    kind: Literal["section", "details", "text", "table"]
    title: str = ""
    content: str = ""
    columns: list[str] = field(default_factory=list)
    rows: list[list[Cell]] = field(default_factory=list)
    children: list[Node] = field(default_factory=list)

    def section(self, title: str) -> Node:
        """A new section at the end of this one."""
        return self._add(Node("section", _text(title)))

    def details(self, title: str) -> Node:
        """A new folded section at the end of this one."""
        return self._add(Node("details", _text(title)))

    def text(self, content: str, label: str = "") -> Node:
        """A text, shown with its spaces and lines as they are."""
        return self._add(Node("text", _text(label), _text(content)))

    def table(self, data: TableData, label: str = "") -> Node:
        """A table of one mapping (a row per key), or of several (a row each, a column for every key that one of them has)."""
        if isinstance(data, Mapping):
            rows = [[_text(key), _cell(value)] for key, value in data.items()]
            return self._add(Node("table", _text(label), rows=rows))
        keys = list(dict.fromkeys(key for row in data for key in row))
        rows = [[_cell(row.get(key)) for key in keys] for row in data]
        return self._add(Node("table", _text(label), columns=[_text(key) for key in keys], rows=rows))

    def take(self) -> list[Node]:
        """The children, which this node then no longer has."""
        taken, self.children = self.children, []
        return taken

    def _add(self, node: Node) -> Node:
        self.children.append(node)
        return node

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it: kind, title, and what the kind has."""
        named: dict[str, Any] = {"kind": self.kind, "title": self.title}
        if self.kind == "text":
            return named | {"content": self.content}
        if self.kind == "table":
            return named | {"columns": self.columns, "rows": self.rows}
        return named | {"children": [child.to_dict() for child in self.children]}


_current: ContextVar[Node | None] = ContextVar("logtree", default=None)


def is_enabled() -> bool:
    """Whether a trace is open here. For callers to whom a text costs something to make."""
    return _current.get() is not None


@contextmanager
def init_trace(title: str, path: str | Path | None = None) -> Iterator[Node]:
    """Open a trace, a tree of its own also within another one.

    Args:
        path: where to write the HTML on leaving, also when the body raised; the JSON goes beside it as
            `<stem>_logtree.json`. None: the caller does with the tree what it likes.
    """
    root = Node("section", _text(title))
    try:
        with _inside(root):
            yield root
    finally:
        if path is not None:
            write_trace(root, path)


def write_into(node: Node) -> AbstractContextManager[None]:
    """Let what the body writes go to `node`, if a trace is open here; it need not be a part of that trace."""
    return _inside(node) if is_enabled() else nullcontext()


def scope_header(title: str) -> AbstractContextManager[None]:
    """A section for what the body writes."""
    parent = _current.get()
    return nullcontext() if parent is None else _inside(parent.section(title))


def details(title: str) -> AbstractContextManager[None]:
    """A folded section for what the body writes."""
    parent = _current.get()
    return nullcontext() if parent is None else _inside(parent.details(title))


def log_text(content: str, label: str = "") -> None:
    """Add a text to the innermost open section."""
    if (node := _current.get()) is not None:
        node.text(content, label)


def table(data: TableData, label: str = "") -> None:
    """Add a table to the innermost open section (`Node.table`)."""
    if (node := _current.get()) is not None:
        node.table(data, label)


def write_trace(root: Node, path: str | Path) -> None:
    """Write a tree as HTML to `path` and as JSON to `<stem>_logtree.json` beside it, each whole or not at all.

    The page is one file that loads and runs nothing. Control characters, which a browser would swallow, are shown as symbols.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path.with_name(f"{path.stem}_logtree.json"), root.to_dict())
    write_text(path, _page().render(root=root))


@contextmanager
def _inside(node: Node) -> Iterator[None]:
    token = _current.set(node)
    try:
        yield
    finally:
        _current.reset(token)


def _text(value: object) -> str:
    """Any value as text that can be written: half of a surrogate pair, which no file takes, is spelled out."""
    return str(value).encode("utf-8", "backslashreplace").decode()


def _cell(value: object) -> Cell:
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    return _text(value)


_SYMBOLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {0x7F: 0x2421}


def _visible(text: str) -> str:
    return text.translate(_SYMBOLS)


def _show_cell(value: Cell) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else _visible(str(value))


@cache
def _page() -> jinja2.Template:
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    environment.filters |= {"visible": _visible, "cell": _show_cell}
    return environment.from_string(_PAGE)


# A line break right after <pre> is not part of the text, so each text is given one: its own first one stays.
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{{ root.title | visible }}</title>
<style>
body { font: 15px/1.45 system-ui, sans-serif; max-width: 70rem; margin: 1.5rem auto; padding: 0 1rem; }
section, details { margin: .8rem 0 .8rem .2rem; padding-left: .9rem; border-left: 2px solid #ddd; }
summary { cursor: pointer; font-weight: 600; }
h1, h2, h3 { margin: .4rem 0; line-height: 1.2; }
h3 { font-size: 1rem; }
figure { margin: .6rem 0; }
figcaption { color: #666; font-size: .85rem; }
pre { margin: 0; padding: .5rem .7rem; background: #f5f5f2; white-space: pre-wrap; overflow-wrap: anywhere; }
figure[data-label^="reply"] pre { background: #e9f5e9; }
table { border-collapse: collapse; font-size: .9rem; }
td, th { padding: .15rem .6rem; border: 1px solid #ddd; text-align: left; vertical-align: top; white-space: pre-wrap; }
</style>
</head>
<body>
<h1>{{ root.title | visible }}</h1>
{% macro show(nodes, depth) %}
{% for node in nodes %}
{% if node.kind in ("text", "table") %}
<figure data-label="{{ node.title | visible }}">
{% if node.title %}<figcaption>{{ node.title | visible }}</figcaption>{% endif +%}
{% if node.kind == "text" %}
<pre>
{{ node.content | visible }}</pre>
{% else %}
<table>
{% if node.columns %}
<tr>{% for column in node.columns %}<th>{{ column | visible }}</th>{% endfor %}</tr>
{% endif %}
{% for row in node.rows %}
<tr>{% for value in row %}<td>{{ value | cell }}</td>{% endfor %}</tr>
{% endfor %}
</table>
{% endif %}
</figure>
{% elif node.kind == "details" %}
<details>
<summary>{{ node.title | visible }}</summary>
{{ show(node.children, depth + 1) }}
</details>
{% else %}
<section>
<h{{ depth }}>{{ node.title | visible }}</h{{ depth }}>
{{ show(node.children, [depth + 1, 6] | min) }}
</section>
{% endif %}
{% endfor %}
{% endmacro %}
{{ show(root.children, 2) }}
</body>
</html>
"""
