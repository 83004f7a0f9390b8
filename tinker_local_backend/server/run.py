"""From keys to a running server, and back down."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from types import FrameType
from typing import Any

import uvicorn

from tinker_local_backend.errors import EngineClosedError, RequestError
from tinker_local_backend.server.access import Access, KeysFile, read_keys
from tinker_local_backend.server.access_log import AccessLog
from tinker_local_backend.server.config import ServerConfig, check_config
from tinker_local_backend.server.door import Door
from tinker_local_backend.server.home_lock import one_server
from tinker_local_backend.server.link import EngineLink
from tinker_local_backend.server.metrics import Metrics
from tinker_local_backend.server.protocol import http_protocol
from tinker_local_backend.server.requests import all_set
from tinker_local_backend.server.service import Service

logger = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 75
KEYS_SECONDS = 1.0
"""between two looks whether the file of keys has changed"""
BACKLOG = 2048
FILES_BESIDES = 256
TICKS_PER_LOOK = 10
"""uvicorn ticks ten times a second"""
LAST_WORDS_SECONDS = 5.0
"""What a client that reads slowly has for the answer it is at, once everything else has ended"""


def serve(config: ServerConfig) -> None:
    """Run until SIGINT or SIGTERM. Raises LocalBackendError for what prevents a start, and EngineClosedError when the engine
    dies."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s server %(levelname)s %(message)s")
    access = Access(read_keys(config.api_keys_file, os.environ), config.home_path)
    check_config(config, access.has_keys)
    log = AccessLog(config.access_log)
    _allow_connections(config)
    # uvloop where it is installed, as uvicorn's parser is httptools: together they halve what a request costs.
    with (
        closing(log),
        one_server(config.home_path),
        asyncio.Runner(loop_factory=uvicorn.Config("", loop="auto").get_loop_factory()) as runner,
    ):
        runner.run(_serve(config, access, log))


def _allow_connections(config: ServerConfig) -> None:
    """Every connection is an open file; the usual limit of 1,024 is for programs that have few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = config.max_connections + FILES_BESIDES
    if hard != resource.RLIM_INFINITY and wanted > hard:
        logger.warning(
            "the system allows %d open files, fewer than max_connections=%d needs", hard, config.max_connections
        )
        wanted = hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


async def _serve(config: ServerConfig, access: Access, log: AccessLog) -> None:
    sock = _bind(config)
    door = Door(log)
    server = _Server(_uvicorn_config(config, door), config)
    sock.listen(BACKLOG)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    print(f"Loading {', '.join(config.model_names)} ... ({_url(config, sock)}/ready tells when it is done)", flush=True)
    link = await _load(config, server, serving)
    if link is None:
        return
    metrics = Metrics()
    server.service = service = Service(config, link, metrics, log, access)
    metrics.watch(lambda: service.live)
    metrics.watch_tenants(lambda: service.tenants)
    metrics.serves({model.name: model.execution for model in link.models})
    door.open(service, access)
    _announce(config, access, sock, link)
    chores = (service.sweep(), _follow_keys(config, access, service), server.stop_when_the_engine_died(link))
    tasks = [asyncio.create_task(chore) for chore in chores]
    try:
        await serving
    finally:
        for task in tasks:
            task.cancel()
        engine_died = link.died.is_set()
        await link.close()
    if engine_died:
        raise EngineClosedError(
            "the engine's process ended by itself; its last words are above. Start the server again"
        )


async def _follow_keys(config: ServerConfig, access: Access, service: Service) -> None:
    """Until cancelled: what is changed in the file of keys holds from the next second on."""
    if config.api_keys_file is None:
        return
    file = KeysFile(config.api_keys_file)
    while True:
        await asyncio.sleep(KEYS_SECONDS)
        try:
            keys = await asyncio.to_thread(file.changed)
        except RequestError as error:
            logger.error("the keys stay as they were: %s", error)
            continue
        if keys is not None:
            access.change(keys)
            service.end_tenants(access.knows)
            logger.info("the keys were read again: %d tenants", len(keys))


async def _load(config: ServerConfig, server: _Server, serving: asyncio.Task[None]) -> EngineLink | None:
    """The engine with its models; None when the server was told to stop before they were loaded. Raises ModelLoadError."""
    loading = asyncio.create_task(EngineLink.start(config.model_names, config.max_sequence_tokens))
    await asyncio.wait([serving, loading], return_when=asyncio.FIRST_COMPLETED)
    told_to_stop = server.should_exit
    if told_to_stop:
        loading.cancel()
    (link,) = await asyncio.gather(loading, return_exceptions=True)
    if isinstance(link, EngineLink) and not told_to_stop:
        return link
    if isinstance(link, EngineLink):
        await link.close()
    server.should_exit = True
    await serving
    if isinstance(link, BaseException) and not told_to_stop:
        raise link
    return None


def _bind(config: ServerConfig) -> socket.socket:
    """Before the models are loaded: a port that is taken is told in the first second."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        # With its protocol named, asyncio turns Nagle's algorithm off; with it on, each answer in two pieces takes 40 ms.
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        raise RequestError(f"cannot bind host={config.host!r} port={config.port}: {error}") from None
    return sock


def _uvicorn_config(config: ServerConfig, app: object) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # pyright: ignore[reportArgumentType]
        http=http_protocol(),
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        limit_concurrency=config.max_connections,
        ssl_certfile=config.tls_certfile,
        ssl_keyfile=config.tls_keyfile,
        server_header=False,
        backlog=BACKLOG,
    )


class _Server(uvicorn.Server):
    """uvicorn, which before it closes its sockets lets the service end what it has begun."""

    def __init__(self, config: uvicorn.Config, limits: ServerConfig):
        super().__init__(config)
        self._limits = limits
        self.service: Service | None = None
        """once the models are loaded"""
        self._waiting: dict[Any, float] = {}
        """connections that have begun no request, and since when"""

    async def on_tick(self, counter: int) -> bool:
        if counter % TICKS_PER_LOOK == 0:
            self.close_slow(time.monotonic())
        return await super().on_tick(counter)

    def close_slow(self, now: float) -> None:
        """Close connections on which no request is under way and the headers of the next one do not come to an end.

        uvicorn itself bounds only how long a connection is silent between requests. Bodies are the guard's business.
        """
        waiting: dict[Any, float] = {}
        for connection in list(self.server_state.connections):
            cycle = getattr(connection, "cycle", None)
            is_between = cycle is None or cycle.response_complete
            if is_between and getattr(connection, "timeout_keep_alive_task", None) is None:
                waiting[connection] = self._waiting.get(connection, now)
        self._waiting = waiting
        for connection, since in waiting.items():
            if now - since > self._limits.body_seconds:
                connection.transport.close()  # pyright: ignore[reportAttributeAccessIssue]

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Unlike uvicorn's own, does not raise the signal again afterwards: there is still the engine to end."""
        loop = asyncio.get_running_loop()
        for sign in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(sign, self.handle_exit, sign, None)
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal lets what is queued end; the second does not."""
        if self.should_exit and self.service is not None:
            self.service.hurry.set()
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.service is not None:
            if self.service.link.died.is_set():
                self.service.hurry.set()
            await drain(self.service)
        # What is still being sent then is cut off here: uvicorn would wait for ever, or tell it as an error of the application.
        asyncio.get_running_loop().call_later(LAST_WORDS_SECONDS, self._cut_off)
        await super().shutdown(sockets)

    def _cut_off(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # pyright: ignore[reportAttributeAccessIssue]

    async def stop_when_the_engine_died(self, link: EngineLink) -> None:
        await link.died.wait()
        logger.error("the engine's process has ended; shutting down")
        self.should_exit = True


async def drain(service: Service) -> None:
    """The end: let what was accepted end and fail the rest; then wait for clients that are alive to fetch their results.

    The first takes at most `shutdown_seconds`, the second `fetch_seconds`; neither goes on once `service.hurry` is set.
    """
    config = service.config
    service.requests.closing = True
    waiting = service.requests.waiting()
    if waiting:
        logger.info(
            "finishing %d requests, for at most %g s; stop again to fail them", len(waiting), config.shutdown_seconds
        )
        await all_set([request.done for request in waiting], service.hurry.wait(), config.shutdown_seconds)
    for request in waiting:
        request.fail("the server was shut down before this request was carried out", "server")
    # A session whose client is gone fetches nothing any more; one without a client (seen: for ever) holds no result.
    now = time.monotonic()
    unfetched = [
        request
        for request in service.requests.unfetched()
        if service.sessions.is_live(request.session) and 0 <= now - request.session.seen <= config.silent_seconds
    ]
    if unfetched:
        logger.info(
            "keeping %d results for at most %g s until they are fetched; stop again to drop them",
            len(unfetched),
            config.fetch_seconds,
        )
        await all_set([request.taken for request in unfetched], service.hurry.wait(), config.fetch_seconds)


def _url(config: ServerConfig, sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"{config.scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _announce(config: ServerConfig, access: Access, sock: socket.socket, link: EngineLink) -> None:
    url = _url(config, sock)
    print(f"Serving on {url}, checkpoints under {config.home_path}:")
    for model in link.models:
        print(f"  {model.name}  ({model.arch}, context of {model.context_length} tokens)")
    print("A client needs:")
    print(f"  export TINKER_BASE_URL={url}")
    key = "one of the server's keys" if access.has_keys else "tml-local-anything"
    print(f"  export TINKER_API_KEY={key}", flush=True)
