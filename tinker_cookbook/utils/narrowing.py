"""Type guards for values of any type, such as parsed JSON.

After `isinstance(value, dict)` the types of keys and values are unknown; after `is_object(value)` the keys are text, as
in JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import torch
    from typing_extensions import TypeIs


def is_object(value: object) -> TypeIs[dict[str, Any]]:
    return isinstance(value, dict)


def is_mapping(value: object) -> TypeIs[Mapping[str, Any]]:
    return isinstance(value, Mapping)


def is_list(value: object) -> TypeIs[list[Any]]:
    return isinstance(value, list)


def is_tuple(value: object) -> TypeIs[tuple[Any, ...]]:
    return isinstance(value, tuple)


def is_sequence(value: object) -> TypeIs[Sequence[Any]]:
    return isinstance(value, Sequence)


def is_class(value: object) -> TypeIs[type[Any]]:
    return isinstance(value, type)


def is_list_or_tuple(value: object) -> TypeIs[list[Any] | tuple[Any, ...]]:
    return isinstance(value, list | tuple)


def is_exception_group(error: BaseException) -> TypeIs[BaseExceptionGroup[BaseException]]:
    return isinstance(error, BaseExceptionGroup)


def to_list(tensor: torch.Tensor) -> list[Any]:
    """`tensor.tolist()`, whose type torch leaves open: numbers, or lists of them for more than one dimension."""
    return cast(Any, tensor).tolist()
