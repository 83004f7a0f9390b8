"""The weighted sum of named functions, used by all rewards.

A task's `reward_fn=compression:0.5,my.py:score`, a debate's `debate_reward=judge:0.5,task:0.5`, an environment's
rubric and a language model's rubric all use this module: to parse names and weights, to call the functions, and to
read their results.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.plugin_errors import plugin_errors
from tinker_cookbook.plugins import Registry
from tinker_cookbook.utils.narrowing import is_mapping, is_tuple
from tinker_cookbook.utils.reward_threads import call_reward

T = TypeVar("T")
Value = tuple[float, dict[str, float]]
"""The value of a function, and its metrics: the value under its name, others that it returned as `<name>/<key>`."""


@dataclass(frozen=True)
class Weighted(Generic[T]):
    """A function (or a criterion) of a sum, with its name in metrics and errors."""

    name: str
    weight: float
    function: T


@dataclass(frozen=True)
class Call:
    """The arguments for calling a function.

    Attributes:
        by_position, by_name: the values that it takes, by their names.
    """

    function: Any
    by_position: tuple[str, ...] = ()
    by_name: tuple[str, ...] = ()

    async def __call__(self, what: str, values: Mapping[str, Any]) -> Any:
        """The function's result, sync or async.

        Raises RewardError if it fails: with `what`, the failing line, and the arguments.
        """
        with plugin_errors(what, self.function, self._taken(values)):
            return await call_reward(self._bound(values))

    def now(self, what: str, values: Mapping[str, Any]) -> Any:
        """The same for a function that is not async."""
        with plugin_errors(what, self.function, self._taken(values)):
            return self._bound(values)()

    def _taken(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: values[name] for name in (*self.by_position, *self.by_name)}

    def _bound(self, values: Mapping[str, Any]) -> partial[Any]:
        by_name = {name: values[name] for name in self.by_name}
        return partial(self.function, *(values[name] for name in self.by_position), **by_name)


def parse_weighted(
    spec: str, registry: Registry[T], of_owner: Mapping[str, T] = MappingProxyType({}), noun: str = "function"
) -> tuple[Weighted[T], ...]:
    """Parse the functions of `name:weight,name:weight` (the default weight is 1).

    A name is one of `of_owner`, one of the registry, `package.module:function` or `path/file.py:function`.

    Raises ConfigurationError: an unknown name, a function that does not fit the registry, a bad weight, a duplicate
    name.
    """
    terms = tuple(_read(part.strip(), registry, of_owner) for part in spec.split(","))
    if len({one.name for one in terms}) < len(terms):
        raise ConfigurationError(f"{registry.kind.key}={spec!r} names a {noun} twice")
    return terms


def _read(part: str, registry: Registry[T], of_owner: Mapping[str, T]) -> Weighted[T]:
    key, (name, colon, number) = registry.kind.key, part.rpartition(":")
    try:
        weight = float(number) if colon else None
    except ValueError:
        weight = None
    if weight is None:
        if name in registry or name in of_owner:
            raise ConfigurationError(f"{key}={part!r}: {number!r} is not a weight; write {name}:0.5")
        name, weight = part, 1.0  # a colon in it belongs to module:function
    if not 0 < weight < math.inf:
        raise ConfigurationError(f"{key}={part!r}: the weight of {name} must be positive, got {weight}")
    function = of_owner[name] if name in of_owner else registry.resolve(name, also=of_owner)
    return Weighted(name.rpartition(":")[2], weight, function)


def weighted_sum(values: Iterable[tuple[float, float]]) -> float:
    """The sum of weight * value over (weight, value)."""
    return sum((weight * value for weight, value in values), 0.0)


def weighted_mean(values: Iterable[tuple[float, float]]) -> float:
    """The mean over (weight, value); the weights add up to more than 0."""
    values = list(values)
    return weighted_sum(values) / sum(weight for weight, _ in values)


def read_value(what: str, name: str, returned: Any) -> Value:
    """A function's result: a number, or a number and metrics. Raises DataValidationError for anything else."""
    is_pair = is_tuple(returned) and len(returned) == 2 and is_mapping(returned[1])
    metrics: dict[str, Any] = dict(returned[1]) if is_pair else {}
    named: dict[str, Any] = {name: returned[0] if is_pair else returned}
    named |= {f"{name}/{key}": number for key, number in metrics.items()}
    numbers = {key: finite_number(number, f"{what}: {key}") for key, number in named.items()}
    return numbers[name], numbers


def finite_number(value: Any, what: str) -> float:
    """The value as float. Raises DataValidationError for a text, None, or a number that is not finite."""
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise DataValidationError(f"{what} is {value!r:.200}; it must be a finite number")
    return number
