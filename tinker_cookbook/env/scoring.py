"""Rubrics of the `load_environment` contract: weighted reward functions, called by parameter name.

A function takes any of prompt, completion, answer, task, state and info, and scores one reply. One that takes the
plural names (prompts, completions, ...) is called once per group, when all replies have arrived.

A prompt and a completion are lists of messages, `[{"role": ..., "content": ...}]`; the reply is
`completion[-1]["content"]`. A parameter annotated with `str` (`list[str]` for a plural name) gets the text of the last
message instead.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, get_args

from tinker_cookbook.env.rewards import Call, read_value, weighted_sum
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.renderers import Message, get_text_content
from tinker_cookbook.rl.types import Metrics
from tinker_cookbook.utils.narrowing import is_mapping, is_sequence

CONVERSATIONS = ("prompt", "completion")
FIELDS = (*CONVERSATIONS, "answer", "task", "state", "info")
"""Arguments of a function of one reply."""
GROUP_FIELDS = tuple(f"{name}s" for name in FIELDS)
"""Arguments of a function of a whole group: lists, in the order of the members."""


class Messages(list[Message]):
    """Messages that refuse to be used as a text: `answer in completion` would always be false."""

    def __contains__(self, item: object) -> bool:
        return super().__contains__(item) if not isinstance(item, str) else self._refuse("in")

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other) if not isinstance(other, str) else self._refuse("==")

    def __ne__(self, other: object) -> bool:
        return super().__ne__(other) if not isinstance(other, str) else self._refuse("!=")

    __hash__ = None  # type: ignore[assignment]

    def _refuse(self, operator: str) -> NoReturn:
        raise TypeError(
            f"a text {operator} a list of messages is always a mistake; annotate the parameter as `str` to get the "
            'text of the last message, or read [-1]["content"]'
        )


@dataclass(frozen=True)
class Rubric:
    """Reward functions and their weights; the reward is the weighted sum.

    Args:
        funcs: sync or async; each returns a number, or (number, metrics). A group function returns a list of these.
        weights: of the same length; None: 1 each. A function with weight 0 is only a metric.
    """

    funcs: Sequence[Callable[..., Any]]
    weights: Sequence[float] | None = None


@dataclass(frozen=True)
class _Scorer:
    name: str
    weight: float
    call: Call
    as_text: frozenset[str]
    """those of these that are conversations and are passed as text"""


@dataclass(frozen=True)
class Scoring:
    """A checked rubric."""

    of_reply: tuple[_Scorer, ...]
    of_group: tuple[_Scorer, ...]
    owner: str
    """the environment's name in errors"""
    own: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """objects of the rubric that its functions may take by name, such as a parser"""

    @classmethod
    def of(cls, rubric: Any, owner: str) -> Scoring:
        """Read an object with `funcs` and `weights`, or a mapping; `class_objects`, if present, are passed by name.

        Raises ConfigurationError; the message begins with `owner`.
        """
        has: Callable[..., Any] = rubric.get if is_mapping(rubric) else partial(getattr, rubric)
        funcs, weights = has("funcs", None), has("weights", None)
        if not funcs:
            raise ConfigurationError(
                f"{owner}.rubric, a {type(rubric).__name__}, has no funcs: give at least one function, as Rubric([function])"
            )
        funcs, weights = list(funcs), [1.0] * len(funcs) if weights is None else list(weights)
        if len(weights) != len(funcs):
            raise ConfigurationError(f"{owner}.rubric: {len(funcs)} funcs need as many weights, got {len(weights)}")
        objects: dict[str, Any] = dict(has("class_objects", None) or {})
        scorers = [
            _scorer(function, weight, owner, tuple(objects)) for function, weight in zip(funcs, weights, strict=True)
        ]
        if twice := {scorer.name for scorer in scorers if [s.name for s in scorers].count(scorer.name) > 1}:
            raise ConfigurationError(f"{owner}.rubric has two funcs called {min(twice)}, whose metrics would be one")
        of_group = tuple(scorer for scorer in scorers if set(scorer.call.by_name) & set(GROUP_FIELDS))
        return cls(tuple(scorer for scorer in scorers if scorer not in of_group), of_group, owner, objects)

    async def score(self, fields: Mapping[str, Any]) -> tuple[float, Metrics]:
        """The reward of one reply, with each function's value as the metric reward/<name>.

        Raises RewardError for a function that fails, DataValidationError for a result other than finite numbers.
        """
        values: list[tuple[float, float]] = []
        metrics: Metrics = {}
        for scorer in self.of_reply:
            value, extra = _read(scorer, await self._call(scorer, fields))
            values.append((scorer.weight, value))
            metrics |= extra
        return weighted_sum(values), metrics

    async def score_group(self, fields_G: Sequence[Mapping[str, Any]]) -> list[tuple[float, Metrics]]:
        """The contribution of the group functions to each member's reward."""
        plural = {f"{name}s": [fields[name] for fields in fields_G] for name in FIELDS}
        values_G: list[list[tuple[float, float]]] = [[] for _ in fields_G]
        metrics_G: list[Metrics] = [{} for _ in fields_G]
        for scorer in self.of_group:
            returned = await self._call(scorer, plural)
            if not is_sequence(returned) or isinstance(returned, str) or len(returned) != len(fields_G):
                raise DataValidationError(
                    f"rubric function {scorer.name} gave {returned!r:.200}; a function of a group gives a list of one number "
                    f"for each of its {len(fields_G)} members"
                )
            for values, metrics, one in zip(values_G, metrics_G, returned, strict=True):
                value, extra = _read(scorer, one)
                values.append((scorer.weight, value))
                metrics |= extra
        return [(weighted_sum(values), metrics) for values, metrics in zip(values_G, metrics_G, strict=True)]

    async def _call(self, scorer: _Scorer, fields: Mapping[str, Any]) -> Any:
        objects = {name: value for name, value in self.own.items() if name in scorer.call.by_name}
        given = {name: _as_taken(name, fields[name], scorer) for name in scorer.call.by_name if name not in objects}
        return await scorer.call(f"rubric function {scorer.name} of {self.owner}", given | objects)


def _as_taken(name: str, value: Any, scorer: _Scorer) -> Any:
    """A field in the form that a function takes. Messages are copied."""
    if name in scorer.as_text:
        return [_text(messages) for messages in value] if name in GROUP_FIELDS else _text(value)
    if name in CONVERSATIONS:
        return Messages(copy.deepcopy(value))
    return [Messages(copy.deepcopy(one)) for one in value] if name.removesuffix("s") in CONVERSATIONS else value


def _text(messages: Sequence[Message]) -> str:
    return get_text_content(messages[-1])


def _scorer(function: Any, weight: Any, owner: str, objects: Sequence[str]) -> _Scorer:
    name = getattr(function, "__name__", type(function).__name__)
    if not callable(function):
        raise ConfigurationError(f"{owner}.rubric: {function!r} in funcs is not a function")
    if not isinstance(weight, int | float) or not math.isfinite(weight):
        raise ConfigurationError(f"{owner}.rubric: the weight of {name} must be a finite number, got {weight!r}")
    parameters = _signature(function).parameters.values()
    known = (*FIELDS, *GROUP_FIELDS, *objects)
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes = tuple(p.name for p in named if p.name in known)
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        takes = (*FIELDS, *objects) if not set(takes) & set(GROUP_FIELDS) else (*GROUP_FIELDS, *objects)
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
    unknown = positional + [p.name for p in named if p.name not in known and p.default is p.empty]
    if unknown:
        also = f"{', '.join(objects)}, " if objects else ""
        raise ConfigurationError(
            f"{owner}.rubric: {name} takes {unknown[0]}, which is not available; parameters are called {', '.join(FIELDS)}, "
            f"{also}or, for a function of a whole group, {', '.join(GROUP_FIELDS)}"
        )
    if {p.name for p in named} & set(FIELDS) and {p.name for p in named} & set(GROUP_FIELDS):
        raise ConfigurationError(
            f"{owner}.rubric: {name} takes {', '.join(takes)}: either one reply's fields or those of a group"
        )
    as_text = frozenset(p.name for p in named if p.name in takes and _wants_text(p))
    return _Scorer(name, float(weight), Call(function, by_name=takes), as_text)


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function, eval_str=True)
    except Exception:  # an annotation that only a type checker can read stays a string
        return inspect.signature(function)


def _wants_text(parameter: inspect.Parameter) -> bool:
    """Whether the annotation is `str`, or `list[str]` for a plural name."""
    annotation = parameter.annotation
    if parameter.name in CONVERSATIONS:
        return annotation in (str, "str")
    is_conversation = parameter.name.removesuffix("s") in CONVERSATIONS
    return is_conversation and (get_args(annotation) == (str,) or annotation in ("list[str]", "Sequence[str]"))


def _read(scorer: _Scorer, returned: Any) -> tuple[float, Metrics]:
    value, metrics = read_value(f"rubric function {scorer.name}", f"reward/{scorer.name}", returned)
    return value, {**metrics}
