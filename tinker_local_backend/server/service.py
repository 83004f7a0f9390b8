"""Server state and housekeeping, independent of the protocol."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from tinker_local_backend.server.access import Access, Tenant
from tinker_local_backend.server.access_log import AccessLog
from tinker_local_backend.server.adapters import COPIES_IN_TRAINING, TENANT_FULL, Adapters
from tinker_local_backend.server.budget import MemoryBudget
from tinker_local_backend.server.chat_format import ChatFormats
from tinker_local_backend.server.chat_text import Texts
from tinker_local_backend.server.config import MIB, ServerConfig
from tinker_local_backend.server.errors import Refused
from tinker_local_backend.server.link import EngineLink
from tinker_local_backend.server.metrics import Metrics
from tinker_local_backend.server.pool import Pool
from tinker_local_backend.server.quotas import Disk
from tinker_local_backend.server.requests import Requests
from tinker_local_backend.server.samplers import Samplers
from tinker_local_backend.server.sessions import Model, Request, Session, Sessions, not_found_message
from tinker_local_backend.server.signed_urls import SignedUrls
from tinker_local_backend.storage import registry
from tinker_local_backend.wire.frames import Frame

logger = logging.getLogger(__name__)

SWEEP_SECONDS = 1.0
ROOM_SECONDS = 0.25
"""time between two checks for capacity"""

_ROW_BYTES = 4096
"""A registry row without its metadata: one page of the file."""


class Service:
    """All state of the HTTP process. Belongs to one event loop."""

    def __init__(
        self,
        config: ServerConfig,
        link: EngineLink,
        metrics: Metrics,
        log: AccessLog,
        access: Access,
        formats: ChatFormats | None = None,
    ):
        self.config = config
        self.link = link
        self.metrics = metrics
        self.sessions = Sessions()
        self.requests = Requests(link, metrics, log)
        self.memory = MemoryBudget(config, access)
        self.disk = Disk()
        self.parsing = Pool("parsing", threads=2, waiting=1024)
        self.listing = Pool("listing", threads=2, waiting=256)
        self.copying = Pool("copying", threads=1, waiting=64)
        self.texts = Texts(config)
        self.formats = formats
        """chat formats; None: the templates of the tokenizers"""
        self.signed_urls = SignedUrls()
        self.adapters = Adapters(config, link, access, self.sessions)
        self.samplers = Samplers(config, link, self.sessions, self.requests, self.memory, self.adapters)
        self.stop_now = asyncio.Event()
        """set to stop without waiting for running requests"""

    # Sessions

    async def create_session(
        self, tenant: Tenant, user_metadata: Mapping[str, str], display_name: str | None
    ) -> Session:
        self.requests.check_open()
        limit = self.config.max_sessions
        if not self._make_room(tenant, "max_sessions", lambda: len(self.sessions.of(tenant)) >= limit):
            raise Refused(403, f"there are {limit} live sessions (max_sessions); close a ServiceClient first")
        record = registry.Session(uuid.uuid4().hex, time.time(), display_name, dict(user_metadata))
        session = Session(tenant, record)
        self.sessions[session.session_id] = session
        # For list_sessions. A session over the disk quota is created without this row, because the tenant needs a session to
        # delete checkpoints. Creating a model writes the row again, within the quota.
        with suppress(Refused), await self.disk.room(tenant, _row_bytes(vars(record))):
            await asyncio.to_thread(registry.Registry(tenant.home).record_session, record)
        return session

    def end_session(self, session: Session, why: str) -> None:
        """Fail a session's unanswered requests, and free its models and samplers."""
        self.sessions.pop(session.session_id, None)
        for request in session.requests.values():
            if request.reply is None:
                self.requests.cancel(request)
                request.fail(f"session {session.session_id} has ended: {why}")
            request.fetched_event.set()
        for model in session.models.values():
            model.sequence.clear()
        self.requests.drop(list(session.models), list(session.samplers))

    def end_tenants(self, known: Callable[[Tenant], bool]) -> None:
        """End the sessions of tenants that are no longer known."""
        for session in list(self.sessions.values()):
            if not known(session.tenant):
                self.end_session(session, "its API key was withdrawn")

    def _has_too_many_models(self, tenant: Tenant) -> bool:
        return sum(len(session.models) for session in self.sessions.of(tenant)) >= self.config.max_models

    def _make_room(self, tenant: Tenant, limit: str, is_full: Callable[[], bool]) -> bool:
        """End silent sessions, the longest silent first, until there is room. Returns whether there is."""
        now = time.monotonic()
        while is_full():
            candidates = [s for s in self.sessions.of(tenant) if s.models or limit == "max_sessions"]
            if not candidates:  # ending sessions would not help
                return False
            session = min(candidates, key=lambda s: s.seen)
            silent = now - session.seen
            if silent <= self.config.silent_seconds:
                return False
            logger.info("session %s, silent for %.0f s, ends to make room (%s)", session.session_id, silent, limit)
            self.end_session(session, f"no heartbeat for {silent:.0f} s while others needed room ({limit})")
        return True

    async def _wait_for_capacity(self, tenant: Tenant, session_id: str, model_id: str) -> None:
        """Wait until there is room for the model, it exists, or every session with models has proved to be alive."""
        start = time.monotonic()
        session = self.sessions.touch(tenant, session_id)
        while model_id not in session.models:
            if self._make_room(tenant, "max_models", lambda: self._has_too_many_models(tenant)):
                return
            if self.requests.closing or all(s.seen >= start for s in self.sessions.of(tenant) if s.models):
                return
            await asyncio.sleep(ROOM_SECONDS)

    # Models

    async def create_model(
        self, tenant: Tenant, session_id: str, number: int, fields: dict[str, Any], digest: bytes, size: int = 0
    ) -> Model:
        """Create a model (`op` create_model or load_model) with an adapter of `size` bytes.
        At the limit, waits up to `silent_seconds`, in case a session with models is dead."""
        fields["model_id"] = f"{session_id}:train:{number}"
        await self._wait_for_capacity(tenant, session_id, fields["model_id"])
        session = self.sessions.touch(tenant, session_id)
        if fields["model_id"] in session.models:
            return self._begin_model(tenant, session_id, fields, digest, size)
        with await self.disk.room(tenant, _row_bytes(vars(session.record)) + _row_bytes(fields)) as room:
            model = self._begin_model(tenant, session_id, fields, digest, size)
            model.creation.attach(room)
        return model

    def _begin_model(self, tenant: Tenant, session_id: str, fields: dict[str, Any], digest: bytes, size: int) -> Model:
        session, model_id = self.sessions.touch(tenant, session_id), fields["model_id"]
        existing = session.models.get(model_id)
        if existing is not None:
            if existing.digest != digest:
                number = model_id.rpartition(":")[2]
                raise Refused(400, f"model_seq_id {number} was used by another request of this session")
            return existing
        self.requests.check_open()
        if self._has_too_many_models(tenant):
            raise Refused(
                403,
                f"{self.config.max_models} models are being trained (max_models); close a ServiceClient first: while its program "
                "runs, the SDK keeps it alive",
            )
        size *= COPIES_IN_TRAINING
        if not self._make_room(tenant, "max_adapters_mib", lambda: not self.samplers.free_checkpoints(tenant, size)):
            raise self.adapters.capacity_error(tenant, size)
        fields |= {"home": str(tenant.home), "session": vars(session.record), "tenant": tenant.name}
        request = self.requests.new(session, fields)
        model = session.models[model_id] = Model(model_id, session, request, digest, size)
        request.on_reply = partial(self._on_model_created, model)
        self.requests.send(request)
        return model

    def _on_model_created(self, model: Model, reply: Frame) -> Frame:
        if "error" in reply.fields:
            model.session.models.pop(model.model_id, None)
            for request in model.sequence.clear():
                request.fail(f"model {model.model_id} could not be created: {reply.fields['error']}")
            return reply
        if model.session.models.get(model.model_id) is not model or not self.sessions.is_live(model.session):
            # it was unloaded, or the session ended, meanwhile
            self.requests.drop([model.model_id])
            return reply
        model.info = {key: reply.fields[key] for key in ("base_model", "rank", "arch", "execution")}
        model.sequence.is_open = True
        for request in model.sequence.ready():
            self.requests.send(request)
        kind = "create_model" if model.creation.kind == "create_model" else "load_weights"
        return Frame({"json": {"type": kind, "model_id": model.model_id}})

    def model(self, tenant: Tenant, model_id: str) -> Model:
        """A model of a live session. Raises Refused (404)."""
        session = self.sessions.find(tenant, model_id.partition(":")[0])
        model = session.models.get(model_id) if session is not None else None
        if model is None:
            raise Refused(404, not_found_message("model", model_id))
        return model

    def unload_model(self, tenant: Tenant, model_id: str) -> Request:
        """Free a model before its session ends. Requests already at the engine still run; pending ones fail."""
        model = self.model(tenant, model_id)
        del model.session.models[model_id]
        for request in model.sequence.clear():
            request.fail(f"model {model_id} was unloaded")
        self.requests.drop([model_id])
        request = self.requests.new(model.session, {"op": "unload_model"})
        request.resolve(Frame({"json": {"type": "unload_model", "model_id": model_id}}))
        return request

    def submit(
        self, tenant: Tenant, model_id: str, seq_id: int, fields: dict[str, Any], digest: bytes, body: bytes = b""
    ) -> Request:
        """Submit an operation on a model; it runs after all operations of the model with a smaller seq_id.
        Raises Refused (429) while the tenant's requests hold too much memory; the client may retry with the same seq_id."""
        model = self.model(tenant, model_id)
        known = model.sequence.recent.find(seq_id, digest)
        if known is not None:
            return known
        self.requests.check_open()
        if model.queued >= self.config.max_training_requests:
            raise Refused(
                400,
                f"{model.queued} requests of model {model_id} are waiting (max_training_requests); wait for results before "
                "sending more",
            )
        if fields["op"] == "forward_backward":
            self.requests.quotas.check(tenant)
        model.sequence.check(seq_id)
        reservation = self.memory.reserve(tenant, len(body))
        if fields["op"] == "snapshot":
            try:
                fields["sampler_id"] = self.samplers.add_snapshot(model, fields["sampling_session_seq_id"]).sampler_id
            except Refused as refusal:
                if refusal.status != TENANT_FULL:
                    reservation.release()
                    raise
                fields = {"op": "refuse", "why": refusal.detail}  # its seq_id must not be missing
        request = self.requests.new(model.session, {**fields, "model_id": model_id}, body, reservation)
        request.on_reply = partial(self._release_turn, model)
        model.sequence.add(seq_id, request)
        model.sequence.recent.add(seq_id, digest, request)
        model.queued += 1
        for ready in model.sequence.ready():
            self.requests.send(ready)
        return request

    def _release_turn(self, model: Model, reply: Frame) -> Frame:
        model.queued -= 1
        return reply

    # Housekeeping

    async def sweep(self) -> None:
        """End dead sessions, fail requests after a gap, and drop old results, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            try:
                self.sweep_once(time.monotonic())
            except Exception:
                logger.exception("housekeeping failed; it will run again")

    def sweep_once(self, now: float) -> None:
        for session in list(self.sessions.values()):
            if now - session.seen > self.config.session_timeout_seconds:
                logger.info("session %s sent no heartbeat and ends", session.session_id)
                self.end_session(session, f"no heartbeat for {self.config.session_timeout_seconds:g} s")
                continue
            for model in session.models.values():
                missing, pending = model.sequence.give_up(now - self.config.request_gap_seconds)
                why = f"request {missing} of model {model.model_id} never arrived"
                for request in pending:
                    model.queued -= 1
                    request.fail(f"{why}, so this later one was not executed")
                if pending:
                    # Other parts of their batch may have run: the next step must fail, not train on an incomplete batch.
                    self.link.call({"op": "fail_step", "model_id": model.model_id, "why": why})
        self.requests.discard_older_than(now - self.config.result_seconds, self.sessions.is_live)
        self.requests.limit_results(self.config.max_results_mib * MIB)

    @property
    def live(self) -> dict[str, float]:
        """Gauges of the whole server; the age of the oldest request is in seconds."""
        sessions, now = self.sessions.values(), time.monotonic()
        waiting = self.requests.waiting()
        return {
            "sessions": len(sessions),
            "models": sum(len(session.models) for session in sessions),
            "samplers": sum(not sampler.evicted for session in sessions for sampler in session.samplers.values()),
            "requests": len(waiting),
            "sampling_requests": self.samplers.running("requests"),
            "sampling_tokens": self.samplers.running("tokens"),
            "held_bytes": self.memory.total,
            "oldest_request_seconds": max((now - request.created for request in waiting), default=0.0),
        }

    @property
    def tenants(self) -> dict[str, dict[str, float]]:
        """Gauges by tenant."""
        by_tenant: dict[str, dict[str, float]] = {}
        for session in self.sessions.values():
            name = session.tenant.name
            if name not in by_tenant:
                by_tenant[name] = {"sessions": 0, "models": 0, "held_bytes": self.memory.of(session.tenant)}
                by_tenant[name] |= self.samplers.of(name)
            by_tenant[name]["sessions"] += 1
            by_tenant[name]["models"] += len(session.models)
        return by_tenant


def _row_bytes(fields: Mapping[str, Any]) -> int:
    """Bytes of a session or run in the registry, with its name and metadata."""
    return _ROW_BYTES + len(json.dumps([fields.get("display_name"), fields.get("user_metadata")]))
