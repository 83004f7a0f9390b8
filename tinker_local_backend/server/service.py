"""What a server does, whatever the protocol: sessions come and go, models are trained in order, samplers are sampled from."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from tinker_local_backend.server.access import Tenant
from tinker_local_backend.server.config import MIB, ServerConfig
from tinker_local_backend.server.link import EngineLink
from tinker_local_backend.server.metrics import Metrics
from tinker_local_backend.server.requests import Requests
from tinker_local_backend.server.sessions import Model, Refused, Request, Sampler, Session, Turn
from tinker_local_backend.storage import registry
from tinker_local_backend.storage.info import read_info
from tinker_local_backend.storage.paths import CheckpointPath
from tinker_local_backend.wire.frames import Frame

logger = logging.getLogger(__name__)

SWEEP_SECONDS = 1.0
ROOM_SECONDS = 0.25
"""between two looks for room"""
CLIENTS_PER_SAMPLER = 10**9
"""How many clients of one sampler the SDK can tell apart by their sequence numbers."""


class Service:
    """All state of the HTTP process. Belongs to one event loop."""

    def __init__(self, config: ServerConfig, link: EngineLink, metrics: Metrics):
        self.config = config
        self.link = link
        self.metrics = metrics
        self.requests = Requests(link, metrics)
        self.closing = False
        self.hurry = asyncio.Event()
        """set when nobody wants to wait for what is still running"""
        self._sessions: dict[str, Session] = {}
        self._standing: dict[str, Session] = {}
        """tenant -> the session of requests that come without one; it never ends"""
        self._sampling: dict[str, int] = {}
        """tenant -> sampling requests that are waiting or running"""

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
        await asyncio.to_thread(registry.Registry(tenant.home).record_session, record)
        return session

    def session(self, tenant: Tenant, session_id: str) -> Session:
        """A live session. Raises Refused (404) for one that has ended, that never was, or that is another tenant's."""
        session = self._sessions.get(session_id)
        if session is None or session.tenant != tenant:
            raise Refused(404, _gone("session", session_id))
        session.seen = time.monotonic()
        return session

    def sampler_ids(self, tenant: Tenant, session_id: str) -> list[str]:
        """Of a session that is alive; none of another."""
        session = self._sessions.get(session_id)
        return list(session.samplers) if session is not None and session.tenant == tenant else []

    def end_session(self, session: Session, why: str) -> None:
        """Fail what waits, and free its models and samplers."""
        self._sessions.pop(session.session_id, None)
        for request in session.requests.values():
            if request.reply is None:
                self.requests.cancel(request)
                request.fail(f"session {session.session_id} has ended: {why}")
        for model in session.models.values():
            model.sequence.clear()
        self._drop(list(session.models), list(session.samplers))

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

    def _drop(self, models: list[str], samplers: list[str]) -> None:
        if models or samplers:
            self.link.call({"op": "drop", "model_ids": models, "sampler_ids": samplers})

    # Models

    async def create_model(
        self, tenant: Tenant, session_id: str, model_seq_id: int, fields: dict[str, Any], digest: bytes
    ) -> tuple[Request, str]:
        """Make a model (`op` create_model or load_model). Returns the request and the model's id.

        At the limit, waits up to `silent_seconds` for a session that may be dead to give room.
        """
        model_id = f"{session_id}:train:{model_seq_id}"
        await self._wait_for_room(tenant, session_id, model_id)
        session = self.session(tenant, session_id)
        existing = session.models.get(model_id)
        if existing is not None:
            if existing.digest != digest:
                raise Refused(400, f"model_seq_id {model_seq_id} was used by another request of this session")
            return existing.creation, model_id
        self.check_open()
        if self._has_too_many_models(tenant):
            raise Refused(
                403,
                f"{self.config.max_models} models are being trained (max_models); close a ServiceClient first: while its program "
                "runs, the SDK keeps it alive",
            )
        request = self.requests.new(session, fields["op"])
        model = Model(model_id, session, request, digest)
        session.models[model_id] = model
        place = {"model_id": model_id, "home": str(tenant.home), "session": vars(session.record)}
        self.requests.dispatch(request, {**fields, **place}, b"", lambda reply: self._model_made(model, reply))
        return request, model_id

    def _model_made(self, model: Model, reply: Frame) -> Frame:
        if "error" in reply.fields:
            model.session.models.pop(model.model_id, None)
            for _, turn in model.sequence.clear():
                turn.request.fail(f"model {model.model_id} could not be made: {reply.fields['error']}")
            return reply
        if model.session.models.get(model.model_id) is not model or model.session.session_id not in self._sessions:
            # unloaded, or the session ended, in the meantime
            self._drop([model.model_id], [])
            return reply
        model.info = {key: reply.fields[key] for key in ("base_model", "rank", "arch", "execution")}
        model.sequence.is_open = True
        self._advance(model)
        kind = "create_model" if model.creation.kind == "create_model" else "load_weights"
        return Frame({"json": {"type": kind, "model_id": model.model_id}})

    def model(self, tenant: Tenant, model_id: str) -> Model:
        """A model of a live session. Raises Refused (404)."""
        session = self._sessions.get(model_id.partition(":")[0])
        model = session.models.get(model_id) if session is not None and session.tenant == tenant else None
        if model is None:
            raise Refused(404, _gone("model", model_id))
        return model

    def unload_model(self, tenant: Tenant, model_id: str) -> Request:
        """Free a model before its session ends. What the engine was given goes on; what is held fails."""
        model = self.model(tenant, model_id)
        del model.session.models[model_id]
        for _, turn in model.sequence.clear():
            turn.request.fail(f"model {model_id} was unloaded")
        self._drop([model_id], [])
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
        """An operation on a model, carried out when all of its model with a smaller seq_id have been."""
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
        request = self.requests.new(model.session, fields["op"])
        if fields["op"] == "snapshot":
            fields["sampler_id"] = self._add_snapshot(model, fields.pop("sampling_session_seq_id")).sampler_id
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

    # Samplers

    def _add_snapshot(self, model: Model, seq_id: int) -> Sampler:
        base_model = (model.info or {}).get("base_model", "")
        sampler_id = f"{model.session.session_id}:sample:{seq_id}"
        if sampler_id in model.session.samplers:
            raise Refused(400, f"sampling_session_seq_id {seq_id} was used before in this session")
        return self._add_sampler(Sampler(sampler_id, model.session, base_model, is_snapshot=True))

    def _add_sampler(self, sampler: Sampler) -> Sampler:
        """Keep it; the snapshot that was not used for the longest time goes when there are too many."""
        samplers = sampler.session.samplers
        samplers[sampler.sampler_id] = sampler
        kept = [other for other in samplers.values() if not other.evicted and (other.is_snapshot or other.model_path)]
        for other in kept[: -self.config.max_snapshots]:
            other.evicted = True
            self._drop([], [other.sampler_id])
        return sampler

    async def create_sampler(
        self, tenant: Tenant, session_id: str, seq_id: int, base_model: str | None, model_path: str | None
    ) -> Sampler:
        """A sampler of a base model or of a checkpoint. Raises CheckpointError or RequestError for one that is not there."""
        session = self.session(tenant, session_id)
        sampler_id = f"{session_id}:sample:{seq_id}"
        existing = session.samplers.get(sampler_id)
        if existing is not None:
            if existing.model_path != model_path or base_model not in (None, existing.base_model):
                raise Refused(400, f"sampling_session_seq_id {seq_id} was used by another request of this session")
            return existing
        self.check_open()
        if model_path is not None:
            info = await asyncio.to_thread(read_info, tenant.home, CheckpointPath.parse(model_path))
            if base_model not in (None, info.base_model):
                raise Refused(400, f"{model_path} is of base model {info.base_model!r}, not {base_model!r}")
            base_model = info.base_model
        elif base_model is None:
            raise Refused(400, "give base_model or model_path")
        self.check_served(base_model)
        sampler = self._add_sampler(Sampler(sampler_id, session, base_model, model_path))
        self._open(sampler)
        return sampler

    async def base_model_of(self, tenant: Tenant, model: str) -> str:
        """Of a base model's name or a `tinker://` path. Raises Refused or CheckpointError for one that is not there."""
        if not model.startswith("tinker://"):
            self.check_served(model, status=404)
            return model
        info = await asyncio.to_thread(read_info, tenant.home, CheckpointPath.parse(model))
        self.check_served(info.base_model)
        return info.base_model

    async def standing_sampler(self, tenant: Tenant, model: str) -> Sampler:
        """A sampler for requests without a session, of a base model's name or a `tinker://` path.

        A checkpoint that was replaced under its name is loaded anew.
        """
        base_model = await self.base_model_of(tenant, model)
        path = CheckpointPath.parse(model) if model.startswith("tinker://") else None
        version = 0.0 if path is None else (await asyncio.to_thread(read_info, tenant.home, path)).created
        session = self._standing.get(tenant.name)
        if session is None or session.session_id not in self._sessions:
            record = registry.Session(uuid.uuid4().hex)
            session = Session(record.session_id, tenant, record, seen=math.inf)
            self._standing[tenant.name] = self._sessions[session.session_id] = session
        sampler_id = f"{session.session_id}:sample:{model}@{version}"
        sampler = session.samplers.get(sampler_id)
        if sampler is None:
            sampler = self._add_sampler(Sampler(sampler_id, session, base_model, None if path is None else model))
            self._open(sampler)
        return sampler

    def _open(self, sampler: Sampler) -> None:
        """Let the engine load it; sampling requests may already follow."""
        self.link.call(
            {
                "op": "open_sampler",
                "sampler_id": sampler.sampler_id,
                "base_model": sampler.base_model,
                "path": sampler.model_path,
                "home": str(sampler.session.tenant.home),
            }
        )

    def sampler(self, tenant: Tenant, sampler_id: str) -> Sampler:
        """A sampler of a live session. Raises Refused (404)."""
        session = self._sessions.get(sampler_id.partition(":")[0])
        sampler = session.samplers.get(sampler_id) if session is not None and session.tenant == tenant else None
        if session is None or sampler is None:
            raise Refused(404, _gone("sampling session", sampler_id))
        session.samplers.move_to_end(sampler_id)
        return sampler

    def sample(
        self,
        tenant: Tenant,
        sampler_id: str,
        seq_id: int | None,
        fields: dict[str, Any],
        digest: bytes,
        on_progress: Callable[[Frame], None] | None = None,
        record: bool = False,
        cache_salt: str | None = None,
    ) -> Request:
        """A sampling request. Raises Refused (429) while too many of the tenant's are waiting.

        `on_progress` is told what is new of the samples while they are drawn (progress.py). With `record` the engine remembers
        them under the request's `sequence_ids` until they are trained on. Prompts are found again by the same tenant with the
        same `cache_salt`.
        """
        sampler = self.sampler(tenant, sampler_id)
        known = sampler.known.find(seq_id, digest) if seq_id is not None else None
        if known is not None:
            return known
        self.check_open()
        if sampler.evicted and sampler.model_path is None:
            raise Refused(
                404,
                f"the snapshot of sampling session {sampler_id} is gone: only the {self.config.max_snapshots} used last are "
                "kept (max_snapshots); save_weights_for_sampler under a name and make a client from its path",
            )
        waiting = self._sampling.get(tenant.name, 0)
        if waiting >= self.config.max_sampling_requests:
            raise Refused(429, f"{waiting} sampling requests are waiting (max_sampling_requests); send this one again")
        if sampler.evicted:
            sampler.evicted = False
            self._open(self._add_sampler(sampler))
        request = self.requests.new(sampler.session, "sample")
        request.sequence_ids = [f"{request.request_id}:{i}" for i in range(fields["num_samples"])]
        if seq_id is not None:
            sampler.known.add(seq_id, digest, request)
        self._sampling[tenant.name] = waiting + 1

        def ended(reply: Frame) -> Frame:
            self._sampling[tenant.name] -= 1
            return reply

        how = {"record_as": request.sequence_ids if record else None, "stream": on_progress is not None}
        whose = "" if self.config.share_prefixes else tenant.name
        origin = {"tenant": tenant.name, "prefixes": [whose, cache_salt or ""]}
        operation = {"op": "sample", "sampler_id": sampler_id, "request": fields, **how, **origin}
        self.requests.dispatch(request, operation, b"", ended, on_progress)
        return request

    # What is there at all

    def check_open(self) -> None:
        """Raise Refused (503) when the server is on its way down."""
        if self.closing:
            raise Refused(503, "the server is shutting down and takes no new requests")

    def check_served(self, base_model: str, status: int = 400) -> None:
        names = [model.name for model in self.link.models]
        if base_model not in names:
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
                    turn.request.fail(
                        f"request {missing} of model {model.model_id} never arrived, so this later one was not carried out"
                    )
        self.requests.forget_older(
            now - self.config.result_seconds, lambda session: session.session_id in self._sessions
        )
        for session in self._sessions.values():
            self.requests.bound(session, self.config.max_results_mib * MIB)

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
            "sampling_requests": sum(self._sampling.values()),
            "oldest_request_seconds": max((now - request.created for request in waiting), default=0.0),
        }

    async def drain(self, seconds: float) -> None:
        """Take nothing new, let what was accepted end (until `hurry` is set), and fail the rest."""
        self.closing = True
        waiting = self.requests.waiting()
        if waiting:
            logger.info("finishing %d requests, for at most %g s; stop again to fail them", len(waiting), seconds)
            ended = asyncio.gather(*(request.done.wait() for request in waiting))
            hurry = asyncio.create_task(self.hurry.wait())
            await asyncio.wait([ended, hurry], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            ended.cancel()
            hurry.cancel()
        for request in waiting:
            request.fail("the server was shut down before this request was carried out", "server")


def _gone(what: str, identifier: str) -> str:
    return (
        f"there is no {what} {identifier!r}: it has ended, or the server was restarted since; make a new ServiceClient and "
        "go on from a saved checkpoint"
    )
