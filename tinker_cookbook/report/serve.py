"""Serve the report on this machine: the same page, also for live runs, with every rollout on disk and a chat.

It listens on the loopback interface and writes nothing. A request identifies runs, steps and groups by number and
checkpoints by name, never by path. It is answered only if it was addressed to this machine by name. A request to
sample must also be JSON from the page itself, so that no page of another site can read or sample through the browser.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tinker_cookbook.exceptions import ConfigurationError, TinkerCookbookError
from tinker_cookbook.report import page, result, rollouts
from tinker_cookbook.report.chat import Chats
from tinker_cookbook.report.runs import RunData, open_runs, read_run
from tinker_cookbook.stores.folder import LOCK_BASE_NAME
from tinker_cookbook.stores.registry import RunRegistry
from tinker_cookbook.stores.storage import LocalStorage
from tinker_cookbook.stores.training_store import (
    CHECKPOINTS_BASE_NAME,
    CONFIG_BASE_NAME,
    METRICS_BASE_NAME,
    rollouts_path,
)
from tinker_cookbook.utils.secrets import redact

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
NAMES = (HOST, "localhost")
TEXT = "text/plain; charset=utf-8"
MOST_STEPS = 200
"""in one request"""

MOST_BODY = 1_000_000
"""bytes of a conversation"""

_WATCHED = (METRICS_BASE_NAME, CHECKPOINTS_BASE_NAME, CONFIG_BASE_NAME, LOCK_BASE_NAME)


class _NotFound(Exception):
    """There is no such run, step or address."""


class Reports:
    """Answers the page's requests about the runs in some folders.

    Args:
        paths: as in `report.runs.open_runs`.

    Raises:
        ConfigurationError, DataFormatError: as `open_runs`.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = list(paths)
        self._lock = threading.Lock()
        self._runs = open_runs(paths)
        self._indices: dict[tuple[str, int], tuple[Any, dict[str, list[Any]]]] = {}
        self._chats = Chats()
        self._words = lru_cache(maxsize=8)(self._read_words)

    def summary(self) -> dict[str, Any]:
        """Everything except the rollouts, for the current runs."""
        with self._lock:
            self._look()
            return page.summary(self._runs)

    def state(self) -> list[Any]:
        """A value per run that changes whenever the run does."""
        with self._lock:
            return [self._state(run) for run in self._runs]

    def run(self, number: int) -> dict[str, Any]:
        """One run in the form of `summary`, read again."""
        with self._lock:
            run = self._at(number)
            self._refresh(run)
            read_run(run)
            return page.summary(self._runs)["runs"][number]

    def ranking(self) -> dict[str, Any] | None:
        """The ranking of the runs at their last read."""
        with self._lock:
            return redact(result.ranking(self._runs))

    def steps(self, number: int) -> list[int]:
        """The steps of a run that have records."""
        return self._at(number).steps()

    def index(self, number: int, steps: Sequence[int]) -> dict[int, dict[str, list[Any]]]:
        """`rollouts.index_step` of some steps."""
        run = self._at(number)
        return {step: self._index(run, step) for step in steps}

    def group(self, number: int, step: int, group: int) -> list[dict[str, Any]] | None:
        """The members of a group with their tokens; None: there is none."""
        run = self._at(number)
        groups = rollouts.step_groups(run, step, self._words(str(run.folder)), [group])
        return redact(groups.get(group))

    def search(self, number: int, text: str, steps: Sequence[int]) -> dict[int, list[tuple[int, int]]]:
        """`rollouts.search` of some steps."""
        run = self._at(number)
        return dict(rollouts.search(run, self._words(str(run.folder)), text, steps))

    def chats(self, number: int) -> dict[str, Any]:
        """The policies of a run for the chat, as in `Chats.described`."""
        return redact(self._chats.described(self._at(number)))

    def reply(self, number: int, asked: Any) -> dict[str, Any]:
        """A checkpoint's next reply, as in `Chats.reply`; raises its errors."""
        return self._chats.reply(self._at(number), asked)

    def close(self) -> None:
        """Release the loaded checkpoints."""
        self._chats.close()

    def _index(self, run: RunData, step: int) -> dict[str, list[Any]]:
        version, key = run.store.stat(rollouts_path(step)), (str(run.folder), step)
        if version is None:
            raise _NotFound(f"step {step} has no rollouts")
        if key not in self._indices or self._indices[key][0] != version:
            self._indices[key] = (version, rollouts.index_step(run, step, self._words(str(run.folder))))
        return self._indices[key][1]

    def _at(self, number: int) -> RunData:
        if not 0 <= number < len(self._runs):
            raise _NotFound(f"run {number}: there are {len(self._runs)}")
        return self._runs[number]

    def _read_words(self, folder: str) -> rollouts.Words:
        return rollouts.words_of(self._of_folder(folder))

    def _of_folder(self, folder: str) -> RunData:
        return next(run for run in self._runs if str(run.folder) == folder)

    def _state(self, run: RunData) -> list[Any]:
        stats = [run.store.stat(name) for name in _WATCHED]
        return [None if stat is None else [stat.mtime, stat.size] for stat in stats]

    def _refresh(self, run: RunData) -> None:
        registry = RunRegistry([LocalStorage(run.folder)])
        if infos := registry.refresh():
            run.info = infos[0]

    def _look(self) -> None:
        """Also adds runs that have started since, after the others."""
        known = {run.folder: run for run in self._runs}
        fresh = {run.folder: run for run in open_runs(self._paths)}
        self._runs = [fresh.pop(folder, run) for folder, run in known.items()] + list(fresh.values())


class _Handler(BaseHTTPRequestHandler):
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        def answer() -> None:
            path = urlsplit(self.path)
            if path.path == "/":
                self._answer(HTTPStatus.OK, self.server.shell, "text/html; charset=utf-8")
            else:
                self._json(self._api(path.path.strip("/").split("/"), parse_qs(path.query)))

        self._guarded(answer)

    def do_POST(self) -> None:
        def answer() -> None:
            match self.path.strip("/").split("/"):
                case ["api", "chat", number]:
                    self._json(self.server.reports.reply(_number(number), self._body()))
                case _:
                    raise _NotFound("there is nothing to ask at this address")

        self._guarded(answer)

    def _guarded(self, answer: Callable[[], None]) -> None:
        try:
            if (self.headers.get("Host") or "").rsplit(":", 1)[0] not in NAMES:
                raise _NotFound("this report answers at 127.0.0.1 and localhost")
            answer()
        except _NotFound as error:
            self._answer(HTTPStatus.NOT_FOUND, str(error).encode(), TEXT)
        except ConfigurationError as error:
            self._answer(HTTPStatus.BAD_REQUEST, str(redact(str(error))).encode(), TEXT)
        except TinkerCookbookError as error:
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, str(error).encode(), TEXT)
        except (BrokenPipeError, ConnectionResetError):
            return  # the client has disconnected
        except Exception as error:
            logger.exception("%s could not be answered", self.path)
            reason = f"{type(error).__name__}; the terminal has it"
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, reason.encode(), TEXT)

    def _body(self) -> Any:
        """The JSON of a request. A page of another site cannot send any: its browser asks first, and gets no
        permission.
        """
        origin = self.headers.get("Origin")
        if origin is not None and origin not in [f"http://{name}:{self.server.server_port}" for name in NAMES]:
            raise _NotFound("only the page itself may ask")
        if (self.headers.get("Content-Type") or "").partition(";")[0].strip() != "application/json":
            raise ConfigurationError("Content-Type: must be application/json")
        length = self.headers.get("Content-Length") or ""
        if not length.isdecimal() or int(length) > MOST_BODY:
            raise ConfigurationError(f"Content-Length: must be a number of at most {MOST_BODY}")
        try:
            return json.loads(self.rfile.read(int(length)))
        except ValueError as error:
            raise ConfigurationError(f"the request is not JSON ({error})") from error

    def _json(self, value: Any) -> None:
        self._answer(HTTPStatus.OK, json.dumps(value, allow_nan=False).encode(), "application/json")

    def _api(self, parts: list[str], query: Mapping[str, list[str]]) -> Any:
        reports = self.server.reports
        try:
            match parts:
                case ["api", "summary"]:
                    return reports.summary()
                case ["api", "state"]:
                    return reports.state()
                case ["api", "ranking"]:
                    return reports.ranking()
                case ["api", "run", number]:
                    return reports.run(int(number))
                case ["api", "steps", number]:
                    return reports.steps(int(number))
                case ["api", "index", number]:
                    return reports.index(int(number), _steps(query))
                case ["api", "group", number, step, group]:
                    return reports.group(int(number), int(step), int(group))
                case ["api", "chats", number]:
                    return reports.chats(int(number))
                case ["api", "search", number]:
                    return reports.search(int(number), query.get("text", [""])[0], _steps(query))
                case _:
                    raise _NotFound("there is nothing at this address")
        except TinkerCookbookError:
            raise
        except ValueError as error:
            raise _NotFound(f"no number: {error}") from None

    def _answer(self, status: HTTPStatus, content: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log: there is a request every second."""


def _number(text: str) -> int:
    if not text.isdecimal():
        raise _NotFound(f"{text}: no number of a run")
    return int(text)


def _steps(query: Mapping[str, list[str]]) -> list[int]:
    steps = [int(step) for step in query.get("steps", [""])[0].split(",") if step]
    if len(steps) > MOST_STEPS:
        raise _NotFound(f"{len(steps)} steps: at most {MOST_STEPS} at a time")
    return steps


class Server(ThreadingHTTPServer):
    """Serves the report of runs on the loopback interface.

    Args:
        reports: answers the requests.
        title: of the page.
        port: 0 picks a free one, see `url`.

    Raises:
        ConfigurationError: the port is taken.
    """

    daemon_threads = True

    def __init__(self, reports: Reports, title: str, port: int = 0) -> None:
        self.reports, self.shell = reports, page.shell(title)
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise ConfigurationError(f"port={port}: {error.strerror}; give another, or 0 for any") from error

    def server_close(self) -> None:
        super().server_close()
        self.reports.close()

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{HOST}:{self.server_port}/"


def serve(paths: Sequence[str], title: str, port: int, ready: Callable[[str], None]) -> None:
    """Serve until the process is interrupted. `ready` is called with the page's address. Raises as in Reports and
    Server.
    """
    with Server(Reports(paths), title, port) as server:
        ready(server.url)
        server.serve_forever()
