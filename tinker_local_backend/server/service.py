"""What a server does, whatever the protocol: sessions come and go, models are trained in order, samplers are sampled from."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from tinker_local_backend.engine.model.lora_spec import LoraSpec
from tinker_local_backend.server.access import Access, Tenant
from tinker_local_backend.server.access_log import AccessLog
from tinker_local_backend.server.adapters import COPIES_IN_TRAINING, OWN_IN_THE_WAY, Adapters
from tinker_local_backend.server.chat_text import Texts
from tinker_local_backend.server.config import MIB, ServerConfig
from tinker_local_backend.server.held import Held
from tinker_local_backend.server.link import EngineLink
from tinker_local_backend.server.metrics import Metrics
from tinker_local_backend.server.pool import Pool
from tinker_local_backend.server.quotas import Disk
from tinker_local_backend.server.requests import Requests
from tinker_local_backend.server.samplers import Samplers
from tinker_local_backend.server.sessions import Model, Refused, Request, Sampler, Session, Turn, gone
from tinker_local_backend.shipped import shipped_model
from tinker_local_backend.storage import registry
from tinker_local_backend.wire.frames import Frame

logger = logging.getLogger(__name__)

SWEEP_SECONDS = 1.0
ROOM_SECONDS = 0.25
"""between two looks for room"""

SMALLEST = LoraSpec(1)

_ROW_BYTES = 4096
"""A row of the registry beside its metadata: a page of the file."""


class Service:
    """All state of the HTTP process. Belongs to one event loop."""

    def __init__(self, config: ServerConfig, link: EngineLink, metrics: Metrics, log: AccessLog, access: Access):
        self.config = config
        self.link = link
        self.metrics = metrics
        self.requests = Requests(link, metrics, log)
        self.held = Held(config, access)
        self.disk = Disk()
        self.parsing = Pool("parsing", threads=2, waiting=1024)
        self.listing = Pool("listing", threads=2, waiting=256)
        self.copying = Pool("copying", threads=1, waiting=64)
        self.texts = Texts(config)
        self.adapters = Adapters(config, link, access)
        self.samplers = Samplers(self)
        self.closing = False
        self.hurry = asyncio.Event()
        """set when nobody wants to wait for what is still running"""
        self._sessions: dict[str, Session] = {}
        self._standing: dict[str, Session] = {}
        """tenant -> the session of requests that come without one; it never ends"""

    # Sessions

    async def create_session(
        self, tenant: Tenant, user_metadata: Mapping[str, str], display_name: str | None
    ) -> Session:
        self.check_open()
        if not self._make_room(tenant, "max_sessions", self._has_too_many_sessions):
            raise Refused(
                403, f"there are {self.config.max_sessions} live sessions (max_sessions); close a ServiceClient first"
            )
        record = registry.Session(uuid.uuid4().hex, time.time(), display_name, dict(user_metadata))
        session = Session(record.session_id, tenant, record)
        self._sessions[session.session_id] = session
        await self._record(tenant, record)
        return session

    async def _record(self, tenant: Tenant, record: registry.Session) -> None:
        """For the list of sessions. Beyond a tenant's room on the disk it is not: he needs one to delete what he has there.

        With a model it is written again, which needs room.
        """
        with suppress(Refused), await self.disk.hold(tenant, _row_bytes(vars(record))):
            await asyncio.to_thread(registry.Registry(tenant.home).record_session, record)

    def session(self, tenant: Tenant, session_id: str) -> Session:
        """A live session. Raises Refused (404) for one that has ended, that never was, or that is another tenant's."""
        session = self.find_session(tenant, session_id)
        if session is None:
            raise Refused(404, gone("session", session_id))
        session.seen = time.monotonic()
        return session

    def is_live(self, session: Session) -> bool:
        return session.session_id in self._sessions

    def sampler_ids(self, tenant: Tenant, session_id: str) -> list[str]:
        """Of a session that is alive; none of another."""
        session = self.find_session(tenant, session_id)
        return list(session.samplers) if session is not None else []

    def end_session(self, session: Session, why: str) -> None:
        """Fail what waits, and free its models and samplers."""
        self._sessions.pop(session.session_id, None)
        for request in session.requests.values():
            if request.reply is None:
                self.requests.cancel(request)
                request.fail(f"session {session.session_id} has ended: {why}")
            request.taken.set()
        for model in session.models.values():
            model.sequence.clear()
        self.drop(list(session.models), list(session.samplers))

    def standing_session(self, tenant: Tenant) -> Session:
        """The one of requests that come without one."""
        session = self._standing.get(tenant.name)
        if session is None or session.session_id not in self._sessions:
            record = registry.Session(uuid.uuid4().hex)
            session = Session(record.session_id, tenant, record, seen=math.inf)
            self._standing[tenant.name] = self._sessions[session.session_id] = session
        return session

    def find_session(self, tenant: Tenant, session_id: str) -> Session | None:
        """A live session of a tenant's, which is not heard from by this."""
        session = self._sessions.get(session_id)
        return session if session is not None and session.tenant == tenant else None

    def _sessions_of(self, tenant: Tenant) -> list[Session]:
        """Those of its clients."""
        standing = self._standing.get(tenant.name)
        return [s for s in self._sessions.values() if s.tenant == tenant and s is not standing]

    def _has_too_many_sessions(self, tenant: Tenant) -> bool:
        return len(self._sessions_of(tenant)) >= self.config.max_sessions

    def _has_too_many_models(self, tenant: Tenant) -> bool:
        return sum(len(session.models) for session in self._sessions_of(tenant)) >= self.config.max_models

    def _make_room(self, tenant: Tenant, limit: str, is_full: Callable[[Tenant], bool]) -> bool:
        """End silent sessions, the longest silent first, until there is room. Returns whether there is."""
        now = time.monotonic()
        while is_full(tenant):
            held = [s for s in self._sessions_of(tenant) if s.models or limit == "max_sessions"]
            if not held:  # what is full is full of other things
                return False
            session = min(held, key=lambda s: s.seen)
            silent = now - session.seen
            if silent <= self.config.silent_seconds:
                return False
            logger.info(
                "session %s sent no heartbeat for %.0f s and gives room (%s)", session.session_id, silent, limit
            )
            self.end_session(session, f"no heartbeat for {silent:.0f} s while others needed room ({limit})")
        return True

    async def _wait_for_room(self, tenant: Tenant, session_id: str, model_id: str) -> None:
        """Until there is room for this model, or it is there, or none of the sessions that hold models may be dead."""
        asked = time.monotonic()
        asking = self.session(tenant, session_id)
        while model_id not in asking.models:
            if self._make_room(tenant, "max_models", self._has_too_many_models):
                return
            if self.closing or all(s.seen >= asked for s in self._sessions_of(tenant) if s.models):
                return
            await asyncio.sleep(ROOM_SECONDS)

    def adapter_room(self, tenant: Tenant) -> int:
        """Bytes that a tenant's adapters may still take."""
        return self.adapters.room(tenant, self._sessions.values())

    def no_adapter_room(self, tenant: Tenant, size: int) -> Refused:
        """Why an adapter that takes so many bytes finds no room."""
        return self.adapters.no_room(tenant, size, self._sessions.values())

    def samplers_of(self, tenant: Tenant) -> list[Sampler]:
        """All of a tenant's that there are in memory, also those of requests that come without a session."""
        sessions = [session for session in self._sessions.values() if session.tenant == tenant]
        return [s for session in sessions for s in session.samplers.values() if not s.evicted]

    def drop(self, models: list[str], samplers: list[str]) -> None:
        if models or samplers:
            self.link.call({"op": "drop", "model_ids": models, "sampler_ids": samplers})

    # Models

    async def create_model(
        self,
        tenant: Tenant,
        session_id: str,
        model_seq_id: int,
        fields: dict[str, Any],
        digest: bytes,
        base_model: str = "",
        spec: LoraSpec = SMALLEST,
    ) -> tuple[Request, str]:
        """Make a model (`op` create_model or load_model) with such an adapter. Returns the request and the model's id.

        At the limit, waits up to `silent_seconds` for a session that may be dead to give room.
        """
        model_id = f"{session_id}:train:{model_seq_id}"
        await self._wait_for_room(tenant, session_id, model_id)
        session = self.session(tenant, session_id)
        room = None
        if model_id not in session.models:
            room = await self.disk.hold(tenant, _row_bytes(vars(session.record)) + _row_bytes(fields))
        try:
            request = self._begin_model(tenant, session_id, model_id, fields, digest, base_model, spec)
        except BaseException:
            if room is not None:
                room.release()
            raise
        if room is not None:
            self.disk.release_after(request, room)
        return request, model_id

    def _begin_model(
        self,
        tenant: Tenant,
        session_id: str,
        model_id: str,
        fields: dict[str, Any],
        digest: bytes,
        base_model: str,
        spec: LoraSpec,
    ) -> Request:
        session = self.session(tenant, session_id)
        existing = session.models.get(model_id)
        if existing is not None:
            if existing.digest != digest:
                number = model_id.rpartition(":")[2]
                raise Refused(400, f"model_seq_id {number} was used by another request of this session")
            return existing.creation
        self.check_open()
        if self._has_too_many_models(tenant):
            raise Refused(
                403,
                f"{self.config.max_models} models are being trained (max_models); close a ServiceClient first: while its program "
                "runs, the SDK keeps it alive",
            )
        size = COPIES_IN_TRAINING * self.adapters.size(base_model, spec)
        if not self._make_room(tenant, "max_adapters_mib", lambda _: not self.samplers.free_checkpoints(tenant, size)):
            raise self.no_adapter_room(tenant, size)
        request = self.requests.new(session, fields["op"])
        model = Model(model_id, session, request, digest, size)
        session.models[model_id] = model
        place = {
            "model_id": model_id,
            "home": str(tenant.home),
            "session": vars(session.record),
            "tenant": tenant.name,
        }
        self.requests.dispatch(request, {**fields, **place}, b"", lambda reply: self._model_made(model, reply))
        return request

    def _model_made(self, model: Model, reply: Frame) -> Frame:
        if "error" in reply.fields:
            model.session.models.pop(model.model_id, None)
            for _, turn in model.sequence.clear():
                turn.request.fail(f"model {model.model_id} could not be made: {reply.fields['error']}")
            return reply
        if model.session.models.get(model.model_id) is not model or model.session.session_id not in self._sessions:
            # unloaded, or the session ended, in the meantime
            self.drop([model.model_id], [])
            return reply
        model.info = {key: reply.fields[key] for key in ("base_model", "rank", "arch", "execution")}
        model.sequence.is_open = True
        self._advance(model)
        kind = "create_model" if model.creation.kind == "create_model" else "load_weights"
        return Frame({"json": {"type": kind, "model_id": model.model_id}})

    def model(self, tenant: Tenant, model_id: str) -> Model:
        """A model of a live session. Raises Refused (404)."""
        session = self.find_session(tenant, model_id.partition(":")[0])
        model = session.models.get(model_id) if session is not None else None
        if model is None:
            raise Refused(404, gone("model", model_id))
        return model

    def unload_model(self, tenant: Tenant, model_id: str) -> Request:
        """Free a model before its session ends. What the engine was given goes on; what is held fails."""
        model = self.model(tenant, model_id)
        del model.session.models[model_id]
        for _, turn in model.sequence.clear():
            turn.request.fail(f"model {model_id} was unloaded")
        self.drop([model_id], [])
        request = self.requests.new(model.session, "unload_model")
        request.settle(Frame({"json": {"type": "unload_model", "model_id": model_id}}))
        return request

    def model_request(
        self,
        tenant: Tenant,
        model_id: str,
        seq_id: int,
        fields: dict[str, Any],
        digest: bytes,
        body: bytes = b"",
    ) -> Request:
        """An operation on a model, carried out when all of its model with a smaller seq_id have been.

        Raises Refused (429) while the tenant's requests hold too much; the same number may be sent again.
        """
        model = self.model(tenant, model_id)
        known = model.sequence.known.find(seq_id, digest)
        if known is not None:
            return known
        self.check_open()
        if model.queued >= self.config.max_training_requests:
            raise Refused(
                400,
                f"{model.queued} requests of model {model_id} are waiting (max_training_requests); wait for results before "
                "sending more",
            )
        if fields["op"] == "forward_backward":
            self.requests.quotas.check(tenant)
        model.sequence.check(seq_id)
        holding = self.held.hold(tenant, len(body))
        if fields["op"] == "snapshot":
            try:
                sampler = self.samplers.add_snapshot(model, fields.pop("sampling_session_seq_id"))
                fields["sampler_id"] = sampler.sampler_id
            except Refused as refusal:
                if refusal.status != OWN_IN_THE_WAY:
                    holding.release()
                    raise
                fields = {"op": "refuse", "why": refusal.detail}  # it keeps its place in the order
        request = self.requests.new(model.session, fields["op"], holding)
        model.sequence.add(seq_id, Turn(request, {**fields, "model_id": model_id}, body))
        model.sequence.known.add(seq_id, digest, request)
        model.queued += 1
        self._advance(model)
        return request

    def _advance(self, model: Model) -> None:
        def ended(reply: Frame) -> Frame:
            model.queued -= 1
            return reply

        for turn in model.sequence.ready():
            self.requests.dispatch(turn.request, turn.fields, turn.body, ended)

    # What is there at all

    def check_open(self) -> None:
        """Raise Refused (503) when the server is on its way down."""
        if self.closing:
            raise Refused(503, "the server is shutting down and takes no new requests")

    def served(self, base_model: str, status: int = 400) -> str:
        """The name of a base model as it is served; a shipped one may be asked for by its short name. Raises Refused."""
        names = [model.name for model in self.link.models]
        for name in (base_model, shipped_model(base_model)):
            if name in names:
                return name
        raise Refused(status, f"base model {base_model!r} is not served here; this server has {', '.join(names)}")

    # Housekeeping

    async def sweep(self) -> None:
        """Until cancelled: end dead sessions, give up on gaps, forget what was fetched."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            try:
                self.sweep_once(time.monotonic())
            except Exception:
                logger.exception("housekeeping failed; it goes on")

    def sweep_once(self, now: float) -> None:
        for session in list(self._sessions.values()):
            if now - session.seen > self.config.session_timeout_seconds:
                logger.info("session %s sent no heartbeat and is ended", session.session_id)
                self.end_session(session, f"no heartbeat for {self.config.session_timeout_seconds:g} s")
                continue
            for model in session.models.values():
                for missing, turn in model.sequence.give_up(now - self.config.request_gap_seconds):
                    model.queued -= 1
                    why = f"request {missing} of model {model.model_id} never arrived"
                    turn.request.fail(f"{why}, so this later one was not carried out")
                    # It may have been a part of a batch whose other parts were: no step is taken without it.
                    self.link.call({"op": "fail_step", "model_id": model.model_id, "why": why})
        self.requests.forget_older(now - self.config.result_seconds, self.is_live)
        self.requests.bound(self.config.max_results_mib * MIB)

    @property
    def live(self) -> dict[str, float]:
        """How many there are of each thing, and how long the oldest request has waited, in seconds."""
        sessions, now = self._sessions.values(), time.monotonic()
        waiting = self.requests.waiting()
        return {
            "sessions": len(self._sessions),
            "models": sum(len(session.models) for session in sessions),
            "samplers": sum(not sampler.evicted for session in sessions for sampler in session.samplers.values()),
            "requests": len(waiting),
            "sampling_requests": self.samplers.waiting,
            "sampling_tokens": self.samplers.tokens,
            "held_bytes": self.held.total,
            "oldest_request_seconds": max((now - request.created for request in waiting), default=0.0),
        }

    def end_tenants(self, known: Callable[[Tenant], bool]) -> None:
        """End the sessions of those who are not known any more."""
        for session in list(self._sessions.values()):
            if not known(session.tenant):
                self.end_session(session, "its API key was withdrawn")

    @property
    def tenants(self) -> dict[str, dict[str, float]]:
        """What there is of each tenant's now."""
        found: dict[str, dict[str, float]] = {}
        for session in self._sessions.values():
            name = session.tenant.name
            if name not in found:
                found[name] = {"sessions": 0, "models": 0, "held_bytes": self.held.of(session.tenant)}
                found[name] |= self.samplers.of(name)
            found[name]["sessions"] += 1
            found[name]["models"] += len(session.models)
        return found


def _row_bytes(fields: Mapping[str, Any]) -> int:
    """What a session or a run takes in the registry, with its name and metadata."""
    return _ROW_BYTES + len(json.dumps([fields.get("display_name"), fields.get("user_metadata")]))
