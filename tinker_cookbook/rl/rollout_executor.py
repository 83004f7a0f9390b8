"""Run groups of rollouts in other threads or processes, for envs that compute a lot or block.

    set_rollout_executor(ProcessPoolExecutor(8, mp_context=multiprocessing.get_context("spawn")))

Every group then runs there, in its own event loop. The builder is pickled, and so is a policy that can be, such as a
sampling client: a local one calls the engine in this process from there. Any other policy stays in this process and is called
over a socket of this machine, or, from a thread, on its event loop. Seeds are the same as without an executor; with
the local engine the last bit of a logprob may differ, because timing decides which requests are batched together. A
group that is cancelled in this process continues there until it calls its policy or is done.
"""

from __future__ import annotations

import asyncio
import pickle
import tempfile
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from tinker_cookbook.completers import StopCondition, TokenCompleter, TokensWithLogprobs
from tinker_cookbook.exceptions import ConfigurationError, TrainingError
from tinker_cookbook.rl.rollout_runner import call_policy
from tinker_cookbook.rl.types import EnvGroupBuilder
from tinker_cookbook.utils.lazy import tinker

T = TypeVar("T")
Play: TypeAlias = Callable[[EnvGroupBuilder, TokenCompleter], Coroutine[Any, Any, T]]

_executor: Executor | None = None


def set_rollout_executor(executor: Executor | None) -> None:
    """Run groups in `executor`, which the caller shuts down; None: in the caller's event loop.

    Raises:
        ConfigurationError: a process pool that uses fork; forking a process with threads, which every engine has, may
            hang.
    """
    global _executor
    context = getattr(executor, "_mp_context", None) if isinstance(executor, ProcessPoolExecutor) else None
    if context is not None and context.get_start_method() == "fork":
        raise ConfigurationError(
            "rollout executor: a ProcessPoolExecutor that forks copies locks that other threads hold, and hangs; make it "
            'with mp_context=multiprocessing.get_context("spawn") (or "forkserver")'
        )
    _executor = executor


def get_rollout_executor() -> Executor | None:
    """The executor that runs groups; None: they run in the caller's event loop."""
    return _executor


@contextmanager
def rollouts_in(executor: Executor | None) -> Generator[None]:
    """Within the body, groups run in `executor`, which the caller shuts down; None: in the one that is set."""
    before = _executor
    if executor is not None:
        set_rollout_executor(executor)
    try:
        yield
    finally:
        set_rollout_executor(before)


def leaves_process(executor: Executor) -> bool:
    """Whether groups run in another process, so that everything they need must be picklable."""
    return not isinstance(executor, ThreadPoolExecutor)


async def run_in_executor(executor: Executor, play: Play[T], builder: EnvGroupBuilder, policy: TokenCompleter) -> T:
    """Run `await play(builder, policy)` in the executor. Except in a thread pool, everything is pickled.

    Raises:
        ConfigurationError: the builder cannot be pickled.
        Exception: what `play` raised; BrokenExecutor when a worker died.
    """
    loop = asyncio.get_running_loop()
    if not leaves_process(executor):
        return await loop.run_in_executor(executor, _run, play, builder, _PolicyOnLoop(policy, loop))
    if error := _pickle_error(builder):
        raise ConfigurationError(
            f"rollout executor: {type(builder).__name__} cannot be pickled ({error}), so it cannot go to another process; "
            "keep only picklable objects in it, and open the rest in make_envs, or use a ThreadPoolExecutor"
        )
    if _pickle_error(policy) is None:
        return await loop.run_in_executor(executor, _run_away, play, builder, policy)
    async with _serve(policy) as address:
        return await loop.run_in_executor(executor, _run_away, play, builder, _RemotePolicy(address))


def _run(play: Play[T], builder: EnvGroupBuilder, policy: TokenCompleter) -> T:
    return asyncio.run(play(builder, policy))


def _run_away(play: Play[T], builder: EnvGroupBuilder, policy: TokenCompleter) -> T:
    try:
        return _run(play, builder, policy)
    except Exception as error:
        if (portable := _portable(error)) is error:
            raise
        raise portable from error


def _portable(error: Exception) -> Exception:
    """The error, or an equivalent one if it cannot be pickled: an error that cannot be unpickled breaks a process pool."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        portable = TrainingError(f"{type(error).__name__}: {error}")
        for note in getattr(error, "__notes__", []):
            portable.add_note(note)
        return portable


def _pickle_error(thing: object) -> str | None:
    try:
        pickle.dumps(thing)
        return None
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class _PolicyOnLoop(TokenCompleter):
    """A policy that is called from another thread and runs on the event loop it belongs to."""

    _policy: TokenCompleter
    _loop: asyncio.AbstractEventLoop

    async def __call__(
        self, model_input: tinker.ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        call = call_policy(self._policy, model_input, stop, max_tokens)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._loop))

    def fork(self, *key: int | str) -> _PolicyOnLoop:
        return _PolicyOnLoop(self._policy.fork(*key), self._loop)


class _RemotePolicy(TokenCompleter):
    """A policy in another process of this machine, called over a Unix socket with one connection per call."""

    def __init__(self, address: str, forks: tuple[tuple[int | str, ...], ...] = ()):
        self._address, self._forks = address, forks
        self._identity = uuid.uuid4().hex  # a fork counts its calls, so the server keeps one fork for each of ours

    async def __call__(
        self, model_input: tinker.ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        try:
            reader, writer = await asyncio.open_unix_connection(self._address)
        except OSError as error:
            raise TrainingError(
                f"a rollout in another process cannot reach its policy at {self._address} ({error}): the process of the "
                "policy has ended, or the executor is on another machine, where only a policy that pickles can go"
            ) from error
        try:
            await _send(writer, (self._forks, self._identity, model_input, stop, max_tokens))
            answer = await _receive(reader)
        finally:
            writer.close()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def fork(self, *key: int | str) -> _RemotePolicy:
        return _RemotePolicy(self._address, (*self._forks, key))


@asynccontextmanager
async def _serve(policy: TokenCompleter) -> AsyncGenerator[str]:
    """Serve this policy; returns the address for a _RemotePolicy."""
    forked: dict[str, TokenCompleter] = {}

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):  # the caller gave up
            try:
                forks, identity, *call = await _receive(reader)
                if identity not in forked:
                    forked[identity] = policy
                    for key in forks:
                        forked[identity] = forked[identity].fork(*key)
                await _send(writer, await call_policy(forked[identity], *call))
            except (ConnectionError, asyncio.IncompleteReadError):
                raise
            except Exception as error:
                await _send(writer, _portable(error))
        writer.close()

    with tempfile.TemporaryDirectory(prefix="policy-") as folder:  # readable only by this user
        address = str(Path(folder) / "socket")
        async with await asyncio.start_unix_server(answer, address):
            yield address


async def _send(writer: asyncio.StreamWriter, thing: object) -> None:
    content = pickle.dumps(thing)
    writer.write(len(content).to_bytes(8, "big") + content)
    await writer.drain()


async def _receive(reader: asyncio.StreamReader) -> Any:
    length = int.from_bytes(await reader.readexactly(8), "big")
    return pickle.loads(await reader.readexactly(length))
