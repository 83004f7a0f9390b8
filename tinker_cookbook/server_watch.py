"""Report a server that does not answer within seconds, and repeatedly while it stays silent.

The SDK retries for minutes without a message. A `ServerWatch` polls the server's health route in parallel and logs the
result: address, problem, duration, and number of attempts. The SDK decides whether to give up a request;
`ended_when_lost` decides whether a run keeps waiting.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from http.client import HTTPException
from math import inf, isinf

from tinker_cookbook.exceptions import ConfigurationError, ServerLostError

logger = logging.getLogger(__name__)

HEALTH_ROUTE = "/api/v1/healthz"
GUARDED_ROUTE = "/api/v1/get_server_capabilities"
"""A route that requires a key."""
CANCEL_AGAIN_SECONDS = 2.0
"""Cancel again after so long: cleanup may call the lost server once more."""
INTERVAL_SECONDS, ANSWER_SECONDS = 2.0, 2.5
"""Polling interval and timeout: together below 5 s, the time until a dead server is reported."""
FIRST_REPEAT_SECONDS, LAST_REPEAT_SECONDS = 10.0, 60.0
"""Seconds between two reports of the same outage; doubles each time."""


def server_address(base_url: str | None) -> tuple[str, str]:
    """The address that the SDK uses, and the user's name for it."""
    # tinker.lib has no __init__.py, so tinker's py.typed does not count for it.
    from tinker.lib.base_url import DEFAULT_BASE_URL  # pyright: ignore[reportMissingTypeStubs]

    variable = os.environ.get("TINKER_BASE_URL")
    address = (base_url or variable or DEFAULT_BASE_URL).rstrip("/")
    if base_url:
        return address, f"base_url={base_url}"
    return address, f"TINKER_BASE_URL={variable}" if variable else f"the hosted service ({address})"


def ask(address: str) -> tuple[str | None, bool]:
    """Poll the server at this address: its problem (None: none), and whether it answered at all."""
    try:
        request = urllib.request.Request(address + HEALTH_ROUTE, headers={"User-Agent": "tinker-cookbook-local"})
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            json.loads(answer.read(1 << 16))
        return None, True
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):  # this route needs a key too; requests will show whether the key is right
            return None, True
        return f"HTTP {error.code} from {HEALTH_ROUTE}", error.code < 500
    except (urllib.error.URLError, HTTPException, OSError) as error:
        reason = getattr(error, "reason", None) or error
        return f"{type(reason).__name__}: {reason}" if isinstance(reason, Exception) else str(reason), False
    except ValueError:
        return f"{HEALTH_ROUTE} does not answer with JSON", True


def check_key(address: str, name: str, key: str) -> None:
    """Raise ConfigurationError when the server is reachable and rejects this key. Ignores an unreachable server."""
    headers = {"User-Agent": "tinker-cookbook-local", "X-API-Key": key}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(address + GUARDED_ROUTE, headers=headers), timeout=ANSWER_SECONDS
        ):
            pass
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            raise ConfigurationError(
                f"{name} rejects the key in TINKER_API_KEY (HTTP {error.code}); export a key of that server"
            ) from None
    except (urllib.error.URLError, HTTPException, OSError):
        return


_watches: weakref.WeakSet[ServerWatch] = weakref.WeakSet()


def _watch_of(client: object) -> ServerWatch | None:
    return next((watch for watch in list(_watches) if watch.is_for(client)), None)


def is_silent(client: object) -> bool:
    """Whether this client's server did not answer the last poll."""
    watch = _watch_of(client)
    return watch is not None and watch.is_silent


@asynccontextmanager
async def ended_when_lost(client: object, limit_seconds: float) -> AsyncGenerator[None]:
    """Run the body, and cancel it when the server of a watched client has not answered for longer than the limit.

    Raises:
        ServerLostError: the body was cancelled for that reason.
    """
    watch = _watch_of(client)
    if watch is None:
        yield
        return
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    cancelled = 0
    again: asyncio.TimerHandle | None = None

    def cancel() -> None:
        nonlocal cancelled, again
        cancelled += 1
        task.cancel()
        again = loop.call_later(CANCEL_AGAIN_SECONDS, cancel)

    def lost() -> None:
        loop.call_soon_threadsafe(cancel)

    watch.limit_seconds, watch.on_lost = limit_seconds, lost
    try:
        yield
    except BaseException as error:
        if not cancelled:
            raise
        # Whatever the body raised on cancellation, this is the cause.
        raise ServerLostError(
            f"{watch.name} has not answered for server_timeout_seconds={limit_seconds:g}. What was saved is on the server; start "
            "it again, and the run with the same command (behavior_if_log_dir_exists=resume)"
        ) from (None if isinstance(error, asyncio.CancelledError) else error)
    finally:
        watch.on_lost = None
        if again is not None:
            again.cancel()
        for _ in range(cancelled):
            task.uncancel()


class ServerWatch:
    """Polls in a thread for as long as the client or a session that it opened is in use.

    A server that does not answer like a Tinker server is reported until it answers correctly once.
    """

    def __init__(self, address: str, name: str, client: object):
        self._address, self.name = address, name
        self.limit_seconds = inf
        self.on_lost: Callable[[], None] | None = None
        """called once, on the watch's thread, when the server has not answered for `limit_seconds`"""
        _watches.add(self)
        self._users = [weakref.ref(client)]
        self._is_known = False
        self._since: float | None = None
        self._tries = 0
        self._next_report, self._pause = float("-inf"), FIRST_REPEAT_SECONDS
        threading.Thread(target=self._run, name="server-watch", daemon=True).start()

    @property
    def is_silent(self) -> bool:
        return self._since is not None

    def is_for(self, client: object) -> bool:
        """Whether it watches this client."""
        return self._users[0]() is client

    def _run(self) -> None:
        while self._in_use():
            asked = time.monotonic()
            problem, answered = ask(self._address)
            self._is_known = self._is_known or problem is None
            if problem is None or (answered and self._is_known):
                self._on_success()
            else:
                self._on_failure(problem, answered, asked)
                self._give_up()
            time.sleep(INTERVAL_SECONDS)

    def _give_up(self) -> None:
        since, on_lost = self._since, self.on_lost
        if on_lost is not None and since is not None and time.monotonic() - since >= self.limit_seconds:
            self.on_lost = None
            logger.error("%s: gave up after %.0f s without an answer", self.name, time.monotonic() - since)
            on_lost()

    def _in_use(self) -> bool:
        # The SDK opens sessions late, and training and sampling clients keep them after the service client is gone.
        client = self._users[0]()
        for held in ("_session_holder", "_rest_holder"):
            session = getattr(client, held, None)
            if session is not None and all(user() is not session for user in self._users):
                self._users.append(weakref.ref(session))
        return any(user() is not None for user in self._users)

    def _on_success(self) -> None:
        if self._since is not None:
            logger.warning("%s answers again after %.0f s", self.name, time.monotonic() - self._since)
        self._since, self._tries = None, 0
        self._next_report, self._pause = float("-inf"), FIRST_REPEAT_SECONDS

    def _on_failure(self, problem: str, answered: bool, asked: float) -> None:
        self._since = asked if self._since is None else self._since
        self._tries += 1
        now = time.monotonic()
        if now < self._next_report:
            return
        self._next_report, self._pause = now + self._pause, min(2 * self._pause, LAST_REPEAT_SECONDS)
        logger.warning(
            "%s %s (%s): asked %d times in %.0f s. Requests are retried%s; correct the address, start the server, or press "
            "Ctrl-C",
            self.name,
            "is not a server of the Tinker protocol" if answered else "does not answer",
            problem,
            self._tries,
            now - self._since,
            "" if isinf(self.limit_seconds) else f" until server_timeout_seconds={self.limit_seconds:g} have passed",
        )
