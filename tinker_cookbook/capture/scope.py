"""Tags for a block of code: key-value pairs that an asyncio task inherits from its creator."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, Token
from types import MappingProxyType
from typing import TypeAlias

from tinker_cookbook.utils.wrapping import F, in_context

ScopeValue: TypeAlias = str | int | float | bool | None
"""A tag's value: a JSON scalar."""

RESERVED_KEYS = frozenset({"run_id", "run_attempt", "split", "iteration", "group_idx", "traj_idx", "purpose"})
"""Tags with a fixed meaning; others are allowed too."""

_current: ContextVar[Mapping[str, ScopeValue]] = ContextVar("capture_scope", default=MappingProxyType({}))


def current_scope() -> Mapping[str, ScopeValue]:
    """The current tags, read-only; copy them with `dict(...)` to keep them after the block."""
    return _current.get()


def _checked(pairs: Mapping[str, object]) -> Mapping[str, ScopeValue]:
    checked: dict[str, ScopeValue] = {}
    for key, value in pairs.items():
        if value is not None and not isinstance(value, str | int | float | bool):
            kind = type(value).__name__
            raise TypeError(f"capture: {key} must be a text, a number, true, false or None, got {kind}; give its text")
        checked[key] = value
    return MappingProxyType(checked)


class capture:
    """Add tags for a block, or for each call of a function or coroutine function; inner ones win.

        with capture(split="train", iteration=3): ...

        @capture(purpose="eval")
        async def evaluate(): ...

    Several tasks and threads may enter one object concurrently.

    Raises:
        TypeError: a value is not text, number, bool or None.
    """

    def __init__(self, **pairs: ScopeValue) -> None:
        self._pairs = _checked(pairs)
        # A token is only valid in its own context, so each context has its own.
        self._entered: ContextVar[tuple[Token[Mapping[str, ScopeValue]], ...]] = ContextVar("entered", default=())

    def __enter__(self) -> Mapping[str, ScopeValue]:
        merged = MappingProxyType({**current_scope(), **self._pairs})
        self._entered.set((*self._entered.get(), _current.set(merged)))
        return merged

    def __exit__(self, *_: object) -> None:
        *outer, token = self._entered.get()
        self._entered.set(tuple(outer))
        _current.reset(token)

    def __call__(self, function: F) -> F:
        return in_context(function, lambda: self)


@contextmanager
def replace_scope(pairs: Mapping[str, ScopeValue]) -> Generator[Mapping[str, ScopeValue]]:
    """Use exactly these tags for a block: for tags from another thread or process. Raises as `capture`."""
    token = _current.set(_checked(pairs))
    try:
        yield current_scope()
    finally:
        _current.reset(token)
