"""What a tool is: a name, a declaration for the model, and a call. Typed Python functions become tools as they are.

    @function_tool
    def add(a: int, b: Annotated[int, "the second summand"]) -> str:
        \"""Add two numbers.\"""
        return str(a + b)

A call that cannot be made (no such tool, arguments that do not fit, a ToolError) is answered with what is wrong. So is any other
exception of a tool, which is logged too, since it may be a bug in the tool. A ConfigurationError ends the run.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple, Protocol, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Message, ToolCall, ToolSpec
from tinker_cookbook.rl.rollout_limits import ToolExecution
from tinker_cookbook.utils.misc_utils import gather_all

logger = logging.getLogger(__name__)

ERROR_PREFIX = "Error: "


class ToolError(Exception):
    """A call cannot be answered; the text goes to the model, and should say how to do better."""


class ToolAnswer(NamedTuple):
    """What came of a call."""

    message: Message
    error: Exception | None = None
    """a ToolError for what the model did wrong; another one was raised inside the tool"""


class Tool(Protocol):
    """Anything with a declaration and a call."""

    spec: ToolSpec
    """name, description and JSON schema of the parameters, as shown to the model"""

    async def __call__(self, arguments: dict[str, Any]) -> str:
        """The result as text. Raises ToolError for what the model can do better."""
        ...


class FunctionTool:
    """A tool of a function, plain or async, that returns a string: its docstring describes it, its annotations are the schema.

    `Annotated[int, "what it means"]` describes a parameter. Arguments are checked strictly: "3" is no int, an int may stand
    for a float, and unknown arguments are refused.

    Raises:
        ConfigurationError: no docstring, a parameter without an annotation, or *args or **kwargs.
    """

    def __init__(self, function: Callable[..., Any], name: str | None = None):
        self.function = function
        self.name = name or getattr(function, "__name__", "")
        self._parameters = _parameters_model(function, self.name)
        self.spec = ToolSpec(
            name=self.name,
            description=inspect.cleandoc(function.__doc__ or ""),
            parameters=_without_titles(self._parameters.model_json_schema()),
        )

    async def __call__(self, arguments: dict[str, Any]) -> str:
        try:
            checked = self._parameters.model_validate(arguments)
        except ValidationError as error:
            raise ToolError(_explain(error, self.name, list(self._parameters.model_fields))) from None
        result = self.function(**{name: getattr(checked, name) for name in self._parameters.model_fields})
        if inspect.isawaitable(result):
            result = await result
        if not isinstance(result, str):
            raise TypeError(f"tool {self.name!r} returned {type(result).__name__}; a tool returns a string")
        return result


function_tool = FunctionTool
"""The decorator."""


class ToolRegistry:
    """The tools of an environment, by name.

    Raises:
        ConfigurationError: two tools of one name, or none at all.
    """

    def __init__(self, tools: Sequence[Tool]):
        if not tools:
            raise ConfigurationError("tools is empty: give at least one tool")
        self._tools: dict[str, Tool] = {}
        for tool in tools:
            name = tool.spec["name"]
            if name in self._tools:
                raise ConfigurationError(f"tools has two tools named {name!r}; rename one of them")
            self._tools[name] = tool

    @property
    def specs(self) -> list[ToolSpec]:
        return [tool.spec for tool in self._tools.values()]

    async def call(self, call: ToolCall) -> ToolAnswer:
        """The `tool` message that answers a call."""
        name = call.function.name
        try:
            if name not in self._tools:
                raise ToolError(f"there is no tool {name!r}; the tools are {', '.join(sorted(self._tools))}")
            content = await self._tools[name](_parse_arguments(name, call.function.arguments))
            return ToolAnswer(tool_message(content, name, call.id))
        except ConfigurationError:
            raise
        except ToolError as error:
            return ToolAnswer(tool_message(f"{ERROR_PREFIX}{error}", name, call.id), error)
        except Exception as error:
            logger.warning("tool %s failed on %s", name, call.function.arguments, exc_info=error)
            told = f"{ERROR_PREFIX}{name} failed: {type(error).__name__}: {error}"
            return ToolAnswer(tool_message(told, name, call.id), error)

    async def call_all(self, calls: Sequence[ToolCall], execution: ToolExecution = "parallel") -> list[ToolAnswer]:
        """Answers in the order of the calls, whether these run at once or one after the other."""
        if execution == "sequential":
            return [await self.call(call) for call in calls]
        return await gather_all(self.call(call) for call in calls)


def tool_message(content: str, name: str, call_id: str | None = None) -> Message:
    """A message of the role `tool`."""
    message: Message = {"role": "tool", "content": content, "name": name}
    return message if call_id is None else {**message, "tool_call_id": call_id}


def _parse_arguments(name: str, arguments: str) -> dict[str, Any]:
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError) as error:
        raise ToolError(f"the arguments of {name} are not valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ToolError(f"the arguments of {name} must be a JSON object, such as {{}}")
    return parsed


def _parameters_model(function: Callable[..., Any], name: str) -> type[BaseModel]:
    if not inspect.getdoc(function):
        raise ConfigurationError(f"tool {name!r} has no docstring; the model is told there what the tool does")
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigurationError(
                f"tool {name!r}: parameter {parameter.name} must be one that is given by name, not {parameter.kind.description}"
            )
        if parameter.name not in hints:
            raise ConfigurationError(f"tool {name!r}: parameter {parameter.name} has no type annotation")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = _field(hints[parameter.name], default)
    return create_model(name, __config__=ConfigDict(extra="forbid", strict=True), **fields)


def _field(hint: Any, default: Any) -> tuple[Any, Any]:
    if get_origin(hint) is not Annotated:
        return hint, Field(default)
    kind, *notes = get_args(hint)
    texts = [note for note in notes if isinstance(note, str)]
    others = tuple(note for note in notes if not isinstance(note, str))
    return (Annotated[(kind, *others)] if others else kind), Field(default, description=" ".join(texts) or None)


def _without_titles(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without the titles that pydantic makes of the names; a property may well be called title."""
    cleaned = {key: value for key, value in schema.items() if key != "title" or not isinstance(value, str)}
    for key in ("properties", "$defs"):
        if key in cleaned:
            cleaned[key] = {name: _without_titles(part) for name, part in cleaned[key].items()}
    return cleaned


def _explain(error: ValidationError, name: str, parameters: list[str]) -> str:
    problems = [
        f"{'.'.join(str(part) for part in problem['loc']) or 'arguments'}: {problem['msg']}"
        for problem in error.errors(include_url=False)
    ]
    return f"{name} takes {', '.join(parameters) or 'no arguments'}. {'; '.join(problems)}"
