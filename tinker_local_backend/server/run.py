"""Start and stop the server."""

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
from tinker_local_backend.server.chat_format import ChatFormats, format_name
from tinker_local_backend.server.config import ServerConfig, check_config
from tinker_local_backend.server.gateway import Gateway
from tinker_local_backend.server.home_lock import one_server
from tinker_local_backend.server.link import EngineLink
from tinker_local_backend.server.metrics import Metrics
from tinker_local_backend.server.protocol import http_protocol
from tinker_local_backend.server.requests import all_set
from tinker_local_backend.server.service import Service

logger = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 75
KEYS_SECONDS = 1.0
"""time between two checks of the keys file"""
BACKLOG = 2048
OTHER_FILES = 256
TICKS_PER_CHECK = 10
"""uvicorn ticks ten times a second"""
LAST_RESPONSE_SECONDS = 5.0
"""time for a slow client to read its last response, after everything else has ended"""


def serve(config: ServerConfig, formats: ChatFormats | None = None) -> None:
    """Run until SIGINT or SIGTERM. `formats`: chat formats; None: the chat templates of the models' tokenizers.
    Raises LocalBackendError if the start fails, and EngineClosedError if the engine dies."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s server %(levelname)s %(message)s")
    access = Access(read_keys(config.api_keys_file, os.environ), config.home_path)
    check_config(config, access.has_keys)
    log = AccessLog(config.access_log)
    _allow_connections(config)
    # uvicorn uses uvloop and httptools if they are installed: together they halve the cost of a request.
    with (
        closing(log),
        one_server(config.home_path),
        asyncio.Runner(loop_factory=uvicorn.Config("", loop="auto").get_loop_factory()) as runner,
    ):
        runner.run(_serve(config, access, log, formats))


def _allow_connections(config: ServerConfig) -> None:
    """Raise the limit on open files: every connection needs one, and the usual limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = config.max_connections + OTHER_FILES
    if hard != resource.RLIM_INFINITY and wanted > hard:
        logger.warning(
            "the system allows %d open files, but max_connections=%d needs more", hard, config.max_connections
        )
        wanted = hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


async def _serve(config: ServerConfig, access: Access, log: AccessLog, formats: ChatFormats | None) -> None:
    sock = _bind(config)
    gateway = Gateway(log)
    server = _Server(_uvicorn_config(config, gateway), config)
    sock.listen(BACKLOG)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    print(f"Loading {', '.join(config.model_names)} ... ({_url(config, sock)}/ready tells when it is done)", flush=True)
    link = await _load(config, server, serving)
    if link is None:
        return
    metrics = Metrics()
    server.service = service = Service(config, link, metrics, log, access, formats)
    metrics.watch(lambda: service.live)
    metrics.watch_tenants(lambda: service.tenants)
    metrics.set_executions({model.name: model.execution for model in link.models})
    gateway.open(service, access)
    _announce(config, access, sock, link, formats)
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
        raise EngineClosedError("the engine's process ended by itself; see its output above. Start the server again")


async def _follow_keys(config: ServerConfig, access: Access, service: Service) -> None:
    """Apply changes of the keys file within a second, until cancelled."""
    if config.api_keys_file is None:
        return
    file = KeysFile(config.api_keys_file)
    while True:
        await asyncio.sleep(KEYS_SECONDS)
        try:
            keys = await asyncio.to_thread(file.changed)
        except RequestError as error:
            logger.error("the keys are unchanged: %s", error)
            continue
        if keys is not None:
            access.change(keys)
            service.end_tenants(access.knows)
            logger.info("the keys were reloaded: %d tenants", len(keys))


async def _load(config: ServerConfig, server: _Server, serving: asyncio.Task[None]) -> EngineLink | None:
    """Start the engine and load its models; None if the server is stopped before that. Raises ModelLoadError."""
    loading = asyncio.create_task(EngineLink.start(config.model_names, config.max_sequence_tokens))
    await asyncio.wait([serving, loading], return_when=asyncio.FIRST_COMPLETED)
    is_stopping = server.should_exit
    if is_stopping:
        loading.cancel()
    (link,) = await asyncio.gather(loading, return_exceptions=True)
    if isinstance(link, EngineLink) and not is_stopping:
        return link
    if isinstance(link, EngineLink):
        await link.close()
    server.should_exit = True
    await serving
    if isinstance(link, BaseException) and not is_stopping:
        raise link
    return None


def _bind(config: ServerConfig) -> socket.socket:
    """Bind the port, before the models are loaded, so that a port in use is reported at once. Raises RequestError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        # asyncio disables Nagle's algorithm only if the protocol is given; with it, a response in two pieces takes 40 ms more.
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
    """uvicorn that drains the service before it closes its sockets, and closes slow connections."""

    def __init__(self, config: uvicorn.Config, limits: ServerConfig):
        super().__init__(config)
        self._limits = limits
        self.service: Service | None = None
        """set when the models are loaded"""
        self._waiting: dict[Any, float] = {}
        """connection without a complete request -> when it was first seen"""

    async def on_tick(self, counter: int) -> bool:
        if counter % TICKS_PER_CHECK == 0:
            self.close_slow(time.monotonic())
        return await super().on_tick(counter)

    def close_slow(self, now: float) -> None:
        """Close connections that have no request in progress and do not complete the next request's headers within
        `body_seconds`. uvicorn itself limits only the silence between requests; the gateway limits bodies."""
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
        """Unlike uvicorn's, does not raise the signal again at the end: the engine must still be closed."""
        loop = asyncio.get_running_loop()
        for sign in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(sign, self.handle_exit, sign, None)
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal finishes queued requests; the second stops without waiting for them."""
        if self.should_exit and self.service is not None:
            self.service.stop_now.set()
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.service is not None:
            if self.service.link.died.is_set():
                self.service.stop_now.set()
            await drain(self.service)
        # Abort unfinished responses: uvicorn would wait forever, or report them as errors of the application.
        asyncio.get_running_loop().call_later(LAST_RESPONSE_SECONDS, self._cut_off)
        await super().shutdown(sockets)

    def _cut_off(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # pyright: ignore[reportAttributeAccessIssue]

    async def stop_when_the_engine_died(self, link: EngineLink) -> None:
        await link.died.wait()
        logger.error("the engine's process has ended; shutting down")
        self.should_exit = True


async def drain(service: Service) -> None:
    """Finish accepted requests, then wait for live clients to fetch results, until `service.stop_now` is set.
    The first takes at most `shutdown_seconds`, after which the rest fails; the second at most `fetch_seconds`."""
    config = service.config
    service.requests.closing = True
    waiting = service.requests.waiting()
    if waiting:
        logger.info(
            "finishing %d requests, for at most %g s; stop again to fail them", len(waiting), config.shutdown_seconds
        )
        await all_set([request.done for request in waiting], service.stop_now.wait(), config.shutdown_seconds)
    for request in waiting:
        request.fail("the server was shut down before this request was executed", "server")
    # The client of a silent session fetches nothing; the default session (seen: infinity) has no results to fetch.
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
        await all_set([request.fetched_event for request in unfetched], service.stop_now.wait(), config.fetch_seconds)


def _url(config: ServerConfig, sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"{config.scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _announce(
    config: ServerConfig, access: Access, sock: socket.socket, link: EngineLink, formats: ChatFormats | None
) -> None:
    url = _url(config, sock)
    print(f"Serving on {url}, checkpoints under {config.home_path}:")
    for model in link.models:
        chat = format_name(formats, model.name, {})
        print(f"  {model.name}  ({model.arch}, context of {model.context_length} tokens, chat format: {chat})")
    print("A client needs:")
    print(f"  export TINKER_BASE_URL={url}")
    key = "one of the server's keys" if access.has_keys else "tml-local-anything"
    print(f"  export TINKER_API_KEY={key}", flush=True)
