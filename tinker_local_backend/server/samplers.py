"""Samplers of all sessions, and sampling requests."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from tinker_local_backend.engine.model.refusals import base_model_of, check_context
from tinker_local_backend.server.access import Tenant
from tinker_local_backend.server.adapters import COPIES_IN_TRAINING, Adapters
from tinker_local_backend.server.budget import Draw, MemoryBudget
from tinker_local_backend.server.config import ServerConfig
from tinker_local_backend.server.errors import Refused
from tinker_local_backend.server.link import EngineLink, ServedModel, served
from tinker_local_backend.server.requests import Requests
from tinker_local_backend.server.sessions import Model, Request, Sampler, Sessions, not_found_message
from tinker_local_backend.shipped import shipped_model
from tinker_local_backend.storage.catalog import read_info, resolve_latest
from tinker_local_backend.storage.info import CheckpointInfo
from tinker_local_backend.storage.paths import CheckpointPath
from tinker_local_backend.wire.frames import Frame

CLIENTS_PER_SAMPLER = 10**9
"""Number of clients of one sampler that the SDK's ranges of sequence numbers allow."""

MAX_SAMPLERS = 10_000
"""per session, including evicted ones"""


class Samplers:
    """Belongs to one event loop."""

    def __init__(
        self,
        config: ServerConfig,
        link: EngineLink,
        sessions: Sessions,
        requests: Requests,
        memory: MemoryBudget,
        adapters: Adapters,
    ):
        self._config, self._link, self._sessions = config, link, sessions
        self._requests, self._memory, self._adapters = requests, memory, adapters
        self._running: dict[str, Counter[str]] = {}
        """by tenant: queued and running requests, and upper bounds of their tokens and samples"""

    def running(self, name: str) -> int:
        """Total of unanswered `requests`, or of their `tokens` or `rows`."""
        return sum(running[name] for running in self._running.values())

    def of(self, tenant: str) -> dict[str, float]:
        """A tenant's gauges."""
        running = self._running.get(tenant, Counter())
        return {f"sampling_{name}": running[name] for name in ("requests", "tokens", "rows")}

    def add_snapshot(self, model: Model, seq_id: int) -> Sampler:
        base_model = (model.info or {}).get("base_model", "")
        sampler_id = f"{model.session.session_id}:sample:{seq_id}"
        if sampler_id in model.session.samplers:
            raise Refused(400, f"sampling_session_seq_id {seq_id} was used before in this session")
        size = model.bytes // COPIES_IN_TRAINING
        return self._add(Sampler(sampler_id, model.session, base_model, is_snapshot=True, bytes=size))

    def _add(self, sampler: Sampler) -> Sampler:
        """Register a sampler, and evict the tenant's least recently used ones if memory is short.
        Raises Refused, and evicts none, if evicting all of them would not suffice."""
        session, tenant = sampler.session, sampler.session.tenant
        if sampler.is_snapshot or sampler.model_path:  # a base model takes no extra memory
            kept = self._kept(tenant)
            if not self._free(tenant, sampler.bytes, kept):
                raise self._adapters.capacity_error(tenant, sampler.bytes)
            same_session = [other for other in kept if other.session is session and not other.evicted]
            self._evict(same_session[: max(0, len(same_session) + 1 - self._config.max_snapshots)])
        session.samplers[sampler.sampler_id], sampler.evicted = sampler, False
        return sampler

    def free_checkpoints(self, tenant: Tenant, size: int) -> bool:
        """Evict samplers of checkpoints, which can be loaded again, to make room for a model. Returns whether there is room."""
        return self._free(tenant, size, [other for other in self._kept(tenant) if other.model_path])

    def _kept(self, tenant: Tenant) -> list[Sampler]:
        """A tenant's samplers with an adapter, of all sessions, the least recently used first."""
        candidates = self._sessions.samplers_of(tenant)
        return sorted((s for s in candidates if s.is_snapshot or s.model_path), key=lambda sampler: sampler.used)

    def _free(self, tenant: Tenant, size: int, others: Sequence[Sampler]) -> bool:
        """Evict as many of `others` as `size` bytes need, in order; none if all would not suffice. Returns whether they fit."""
        missing, to_evict = size - self._adapters.room(tenant), list[Sampler]()
        for other in others:
            if missing > 0 and other.bytes:
                to_evict.append(other)
                missing -= other.bytes
        if missing > 0:
            return False
        self._evict(to_evict)
        return True

    def _evict(self, samplers: Sequence[Sampler]) -> None:
        for sampler in samplers:
            sampler.evicted = True
        self._requests.drop(samplers=[sampler.sampler_id for sampler in samplers])

    async def create(
        self, tenant: Tenant, session_id: str, seq_id: int, base_model: str | None, model_path: str | None
    ) -> Sampler:
        """A sampler of a base model or checkpoint. Raises CheckpointError or RequestError if it does not exist."""
        session = self._sessions.touch(tenant, session_id)
        base_model = base_model if base_model is None else shipped_model(base_model)
        sampler_id = f"{session_id}:sample:{seq_id}"
        asked, base_model = base_model, base_model and base_model_of(base_model)
        existing = session.samplers.get(sampler_id)
        if existing is not None:
            if existing.model_path != model_path or base_model not in (None, existing.base_model):
                raise Refused(400, f"sampling_session_seq_id {seq_id} was used by another request of this session")
            return existing
        self._requests.check_open()
        if len(session.samplers) >= MAX_SAMPLERS:
            raise Refused(403, f"this session has made {MAX_SAMPLERS} sampling sessions; reuse one of them")
        size = 0
        if model_path is not None:
            info = await _read_info(tenant, model_path, base_model)
            base_model, size = info.base_model, self._adapters.size(info.base_model, info.spec)
        elif base_model is None:
            raise Refused(400, "give base_model or model_path")
        model = served(self._link.models, base_model)
        check_context(asked or base_model, model.context_length)
        return self._load(Sampler(sampler_id, session, model.name, model_path, bytes=size))

    async def named(self, tenant: Tenant, model: str) -> tuple[ServedModel, CheckpointInfo | None, str]:
        """The base model and checkpoint (or None) of a base model's name or a `tinker://` path, and the name with `latest`
        resolved (`resolve_latest`). Raises Refused or CheckpointError if there is none."""
        if not model.startswith("tinker://"):
            return served(self._link.models, model, status=404), None, model
        path = str(await asyncio.to_thread(lambda: resolve_latest(tenant.home, CheckpointPath.parse(model))))
        info = await _read_info(tenant, path)
        return served(self._link.models, info.base_model), info, path

    async def default_sampler(self, tenant: Tenant, model: str) -> tuple[Sampler, ServedModel]:
        """The default session's sampler of a base model or `tinker://` path. An overwritten checkpoint is loaded again."""
        base, info, model = await self.named(tenant, model)
        version, size = (0.0, 0) if info is None else (info.created, self._adapters.size(base.name, info.spec))
        session = self._sessions.default_session(tenant)
        sampler_id = f"{session.session_id}:sample:{model}@{version}"
        sampler = session.samplers.get(sampler_id)
        if sampler is None:
            path, metadata = (None, {}) if info is None else (model, info.user_metadata)
            sampler = self._load(Sampler(sampler_id, session, base.name, path, bytes=size, user_metadata=metadata))
        return sampler, base

    def _load(self, sampler: Sampler) -> Sampler:
        """Register a sampler, and have the engine load it; sampling requests may follow at once. Raises Refused as `_add`."""
        self._add(sampler)
        self._link.call(
            {
                "op": "open_sampler",
                "sampler_id": sampler.sampler_id,
                "base_model": sampler.base_model,
                "path": sampler.model_path,
                "home": str(sampler.session.tenant.home),
            }
        )
        return sampler

    def find(self, tenant: Tenant, sampler_id: str) -> Sampler:
        """A sampler of a live session. Raises Refused (404)."""
        session = self._sessions.find(tenant, sampler_id.partition(":")[0])
        sampler = session.samplers.get(sampler_id) if session is not None else None
        if session is None or sampler is None:
            raise Refused(404, not_found_message("sampling session", sampler_id))
        sampler.used = time.monotonic()
        return sampler

    def sample(
        self,
        tenant: Tenant,
        sampler_id: str,
        seq_id: int | None,
        draw: Draw,
        digest: bytes,
        on_progress: Callable[[Frame], None] | None = None,
        record: bool = False,
        cache_salt: str | None = None,
    ) -> Request:
        """Submit a sampling request. Raises Refused (429) while too many of the tenant's requests are queued or running.

        `on_progress` gets new tokens while they are sampled (operations.Progress). With `record`, the engine stores the
        samples under the request's `sequence_ids` until they are trained on. Only requests of the same tenant and `cache_salt`
        share cached prompts.
        """
        sampler = self.find(tenant, sampler_id)
        known = sampler.recent.find(seq_id, digest) if seq_id is not None else None
        if known is not None:
            return known
        self._requests.check_open()
        if sampler.evicted and sampler.model_path is None:
            raise Refused(
                404,
                f"the snapshot of sampling session {sampler_id} was evicted: only the {self._config.max_snapshots} used last "
                "are kept (max_snapshots), or fewer if memory is short (max_tenant_adapters_mib); save_weights_for_sampler "
                "under a name and make a client from its path",
            )
        context_length = next((m.context_length for m in self._link.models if m.name == sampler.base_model), 0)
        usage = Counter(requests=1, tokens=draw.tokens(context_length), rows=draw.samples)
        self._check_room(tenant, usage)
        reservation = self._memory.reserve(tenant, draw.bytes(context_length))
        try:
            if sampler.evicted:
                self._load(sampler)
        except Refused:
            reservation.release()
            raise
        prefix_owner = "" if self._config.share_prefixes else tenant.name
        fields = {
            "op": "sample",
            "sampler_id": sampler_id,
            "stream": on_progress is not None,
            "tenant": tenant.name,
            "prefixes": [prefix_owner, cache_salt or ""],
        }
        request = self._requests.new(sampler.session, fields, draw.request, reservation)
        request.sequence_ids = [f"{request.request_id}:{i}" for i in range(draw.samples)]
        fields["record_as"] = request.sequence_ids if record else None
        if seq_id is not None:
            sampler.recent.add(seq_id, digest, request)
        self._running.setdefault(tenant.name, Counter()).update(usage)
        self._requests.quotas.spend(tenant, draw.prompt_tokens)
        request.on_reply = partial(self._release_usage, tenant, usage)
        self._requests.send(request, on_progress)
        return request

    def _release_usage(self, tenant: Tenant, usage: Counter[str], reply: Frame) -> Frame:
        self._running[tenant.name].subtract(usage)
        return reply

    def _check_room(self, tenant: Tenant, usage: Counter[str]) -> None:
        """Raise Refused (429, or 400 if it never fits) if a tenant's requests would exceed a limit."""
        self._requests.quotas.check(tenant)
        running, config = self._running.get(tenant.name, Counter()), self._config
        for name, limit, what in (
            ("rows", tenant.terms.rows, "samples"),
            ("requests", config.max_sampling_requests, "sampling requests (max_sampling_requests)"),
            ("tokens", config.max_sampling_tokens, "tokens of prompts and samples (max_sampling_tokens)"),
        ):
            requested, current = usage[name], running[name]
            if limit is not None and requested > limit:
                raise Refused(400, f"this request takes {requested} {what}; you may have {limit} at a time")
            if limit is not None and current + requested > limit:
                raise Refused(429, f"{current} of your {limit} {what} are waiting or running; send this one again")


async def _read_info(tenant: Tenant, path: str, base_model: str | None = None) -> CheckpointInfo:
    return await asyncio.to_thread(read_info, tenant.home, CheckpointPath.parse(path), base_model)
