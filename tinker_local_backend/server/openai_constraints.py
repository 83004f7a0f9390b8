"""The constraint in a body of an OpenAI-compatible route: OpenAI's fields, and vLLM's `structured_outputs`.

It covers the whole reply from its first token on. The engine compiles it, and refuses one that cannot be compiled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tinker_local_backend.constraint import ONE_LINE, Constraint
from tinker_local_backend.server.chat_format import CallPiece, ChatFormat
from tinker_local_backend.server.errors import Refused
from tinker_local_backend.server.openai_schemas import ChatBody, OpenAIBody, Tool

Fields = dict[str, Any]
"""Fields of a Constraint (constraint.py)."""


def may_constrain(body: OpenAIBody) -> bool:
    """Whether the body has a field that `constraint_of` reads."""
    fields = (body.response_format, body.structured_outputs, body.tool_choice if isinstance(body, ChatBody) else None)
    return any(field is not None for field in fields)


def constraint_of(body: OpenAIBody, chat_format: ChatFormat | None = None) -> Fields | None:
    """The constraint of a body; None: the reply may be any text. `chat_format`: the request's, if it is a chat.

    Raises Refused, or RequestError for the values of a constraint, naming the field that is invalid or not supported.
    """
    asked = {"response_format": _response_format(body.response_format)}
    asked["structured_outputs"] = _structured_outputs(body.structured_outputs)
    if isinstance(body, ChatBody) and chat_format is not None:
        asked["tool_choice"] = _tool_choice(body, chat_format)
    given = {name: fields for name, fields in asked.items() if fields is not None}
    if len(given) > 1:
        raise Refused(400, f"{' and '.join(given)} each constrain the reply; leave out all but one")
    fields = next(iter(given.values()), None)
    return None if fields is None else Constraint(**fields).as_json()


def _response_format(value: Mapping[str, Any] | None) -> Fields | None:
    kind = None if value is None else value.get("type")
    if value is None or kind == "text":
        return None
    if kind == "json_object":
        return {"json_schema": {"type": "object"}}
    if kind == "json_schema":
        described = value.get("json_schema")
        schema = described.get("schema") if isinstance(described, dict) else None
        if not isinstance(schema, dict):
            raise Refused(400, "response_format.json_schema.schema is missing; it must be a JSON schema")
        return {"json_schema": schema}
    raise Refused(400, f"response_format.type={kind!r:.100} is not supported; use text, json_object or json_schema")


def _structured_outputs(value: Mapping[str, Any] | None) -> Fields | None:
    given = {key: one for key, one in (value or {}).items() if one not in (None, False)}
    if not given:
        return None
    names = {"json": "json_schema", "regex": "regex", "choice": "choices", "grammar": "grammar"}
    if unknown := sorted(given.keys() - names.keys() - {"json_object"}):
        raise Refused(400, f"structured_outputs.{unknown[0]:.100} is not supported here; leave it out")
    if len(given) > 1:
        raise Refused(400, f"structured_outputs has {' and '.join(given)}; give exactly one of them")
    ((key, one),) = given.items()
    if key == "json_object":
        return {"json_schema": {"type": "object"}}
    if key == "json" and isinstance(one, str):
        try:
            one = json.loads(one)
        except ValueError:
            raise Refused(400, "structured_outputs.json is a text that is not JSON") from None
    return {names[key]: one}


def _tool_choice(body: ChatBody, chat_format: ChatFormat) -> Fields | None:
    choice = body.tool_choice
    if choice in (None, "auto", "none"):
        return None
    named = choice.get("function", {}).get("name") if isinstance(choice, dict) else None
    if choice != "required" and not isinstance(named, str):
        raise Refused(
            400, 'tool_choice must be none, auto, required or {"type": "function", "function": {"name": ...}}'
        )
    tools = [tool for tool in body.tools or () if named is None or tool.function.get("name") == named]
    if not tools:
        what = "there are no tools" if named is None else f"no tool has the name {named!r:.100}"
        raise Refused(400, f"tool_choice: {what}; give it in tools")
    return {"grammar": _tool_call_grammar(tools, chat_format)}


def _tool_call_grammar(tools: Sequence[Tool], chat_format: ChatFormat) -> str:
    """A Lark grammar of one call of one of the tools, as the model's chat format writes it.

    Raises Refused if the format has no JSON of arguments between fixed texts.
    """
    rules = [f"start: {' | '.join(f'call_{i}' for i in range(len(tools)))}"]
    for i, tool in enumerate(tools):
        name, parameters = tool.function.get("name"), tool.function.get("parameters") or {"type": "object"}
        if not isinstance(name, str) or not isinstance(parameters, dict):
            raise Refused(400, f"tools[{i}].function needs a name, and an object as parameters")
        try:
            row = chat_format.forced_call(name)
        except ValueError as error:
            raise Refused(400, f"tool_choice: {error}; use tool_choice=auto") from None
        schema = json.dumps({"x-guidance": ONE_LINE, **parameters})
        rules += [f"call_{i}: {' '.join(_terminal(piece, i) for piece in row)}", f"arguments_{i}: %json {schema}"]
    return "\n".join(rules)


def _terminal(piece: CallPiece, at: int) -> str:
    """A piece of a call in Lark, in which texts are written as in JSON."""
    if piece is None:
        return f"arguments_{at}"
    if isinstance(piece, re.Pattern):
        return f"/{piece.pattern}/"
    return json.dumps(piece) if isinstance(piece, str) else f"<[{piece}]>"
