"""Small helpers shared by several loops: timing, waiting for many tasks, and functions on lists and dicts."""

import asyncio
import importlib
import inspect
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, cast

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.utils.trace import add_span, scope_span_sync

T = TypeVar("T")


@contextmanager
def timed(key: str, metrics: dict[str, Any]) -> Generator[None]:
    """Add the duration of the body in seconds to `metrics`, even when it raises; and a span to the trace, if there is
    one.

    The metric is `time/<key>`, or several if the key has more than one span (`trace.add_span`).
    """
    start = time.perf_counter()
    try:
        with scope_span_sync(key):
            yield
    finally:
        add_span(f"time/{key}", time.perf_counter() - start, metrics)


def safezip(*iterables: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """`zip` that raises ValueError immediately if the lengths differ."""
    lists = [list(iterable) for iterable in iterables]
    if not all_same([len(items) for items in lists]):
        raise ValueError(f"safezip: lengths differ: {[len(items) for items in lists]}")
    return zip(*lists, strict=True)


def dict_mean(list_of_dicts: Sequence[Mapping[str, float | int | None]]) -> dict[str, float]:
    """The mean of each key over the dicts that have it, keys in order of first appearance. None counts as absent."""
    values: dict[str, list[float | int]] = {}
    for row in list_of_dicts:
        for key, value in row.items():
            if value is not None:
                values.setdefault(key, []).append(value)
    return {key: sum(numbers) / len(numbers) for key, numbers in values.items()}


def all_same(xs: Sequence[Any]) -> bool:
    """Whether all items are equal; true for none and for one."""
    return all(item == xs[0] for item in xs)


def lookup_func(path_to_func: str, default_module: str | None = None) -> Any:
    """The object named by `package.module:name`, or `name` alone in the default module. Raises ConfigurationError for
    other forms.

    Raises ImportError and AttributeError if there is no such module, or no such name in it.
    """
    module, colon, name = path_to_func.rpartition(":")
    module = module if colon else default_module or ""
    if not module or not name or ":" in module:
        raise ConfigurationError(
            f"path_to_func={path_to_func!r}: must be package.module:name, or a name of a known module"
        )
    return getattr(importlib.import_module(module), name)


def iteration_name(step: int) -> str:
    """The name of a step's folder."""
    return f"iteration_{step:06d}"


def iteration_dir(log_path: str | Path | None, step: int) -> Path | None:
    """The folder of a step; None if the run has no folder."""
    return Path(log_path, iteration_name(step)) if log_path else None


def split_list(lst: Sequence[T], num_splits: int) -> list[list[T]]:
    """Split into consecutive nonempty parts; lengths differ by at most one, longer ones first.

    Raises:
        ConfigurationError: `num_splits` is below 1 or above the number of items.
    """
    if not 1 <= num_splits <= len(lst):
        raise ConfigurationError(f"num_splits={num_splits}: must be between 1 and the number of items, {len(lst)}")
    quotient, remainder = divmod(len(lst), num_splits)
    ends = [(i + 1) * quotient + min(i + 1, remainder) for i in range(num_splits)]
    return [list(lst[start:end]) for start, end in pairwise([0, *ends])]


def concat_lists(list_of_lists: Iterable[Sequence[T]]) -> list[T]:
    """Concatenate lists."""
    return [item for items in list_of_lists for item in items]


def shared_value(values: Iterable[T]) -> T | None:
    """The common value of all items; None if they differ, or there are none."""
    values = iter(values)
    first = next(values, None)
    return first if all(value == first for value in values) else None


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose first row is its header."""
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in [cells[0], ["---"] * len(cells[0]), *cells[1:]])


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its name."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def not_none(x: T | None) -> T:
    """The value, with a check that it is not None.

    Raises:
        ValueError: it is None.
    """
    if x is None:
        raise ValueError("expected a value, got None")
    return x


async def resolved(value: T | Awaitable[T]) -> T:
    """The value itself, or its awaited result: for user functions, which may be sync or async."""
    return await cast(Awaitable[T], value) if inspect.isawaitable(value) else cast(T, value)


async def await_uncancelled(submitted: Awaitable[T], on_cancel: Callable[[], None]) -> T:
    """Await work that cannot be cancelled. A cancellation only calls `on_cancel`; the caller handles it later."""
    task = asyncio.ensure_future(submitted)
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.cancelled():
                on_cancel()
    return task.result()


async def with_tasks(body: Callable[[asyncio.TaskGroup], Awaitable[T]]) -> T:
    """Run `body(tasks)`; tasks that it starts end with it.

    The first failure, of the body or of a task, cancels the others and is raised, with its original causes. Errors of
    other tasks that follow from the cancellation are dropped.
    """
    result: list[T] = []
    first: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            result.append(await body(tasks))
    except BaseExceptionGroup as failures:
        # Tasks that end before the body does come before it in the group.
        roots = [error for error in failures.exceptions if not _follows_cancellation(error)]
        first = (roots or failures.exceptions)[0]
    if first is not None:
        raise first  # not within `except`, which would replace its context by the group
    return result[0]


def _follows_cancellation(error: BaseException) -> bool:
    """Whether an error was raised while a cancellation was being handled. A timeout is a separate error."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, asyncio.CancelledError | TimeoutError):
        seen = seen.__cause__ or seen.__context__
    return isinstance(seen, asyncio.CancelledError)


def run_limited(
    tasks: asyncio.TaskGroup, coroutines: Iterable[Coroutine[Any, Any, T]], count: int, at_once: int
) -> list[asyncio.Future[T]]:
    """Run many coroutines as tasks of the group, at most `at_once` at a time, started in order.

    A generator creates each when it starts, so that waiting ones cost almost nothing. After a failure no more are
    started.

    Returns:
        Futures of the results, in the order of the coroutines; that of a failed one never completes, because the group
        ends.
    """
    waiting = iter(coroutines)
    futures: list[asyncio.Future[T]] = [asyncio.get_running_loop().create_future() for _ in range(count)]
    left = iter(futures)

    def start() -> None:
        if (future := next(left, None)) is not None:
            tasks.create_task(next(waiting)).add_done_callback(partial(ended, future))

    def ended(future: asyncio.Future[T], task: asyncio.Task[T]) -> None:
        if task.cancelled():
            future.cancel()
        elif task.exception() is None:
            if not future.done():
                future.set_result(task.result())
            start()

    for _ in range(min(at_once, count)):
        start()
    return futures


async def gather_all(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all concurrently and return their results in order. The first failure cancels the others and is raised."""

    async def start(tasks: asyncio.TaskGroup) -> list[asyncio.Task[T]]:
        return [tasks.create_task(coroutine) for coroutine in coroutines]

    return [task.result() for task in await with_tasks(start)]


async def gather_limited(coroutines: Iterable[Coroutine[Any, Any, T]], count: int, at_once: int) -> list[T]:
    """`gather_all` with at most `at_once` coroutines at a time (see `run_limited`)."""

    async def start(tasks: asyncio.TaskGroup) -> list[T]:
        return [await future for future in run_limited(tasks, coroutines, count, at_once)]

    return await with_tasks(start)
