"""Samplers of all sessions, and what is drawn from them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tinker_local_backend.server.access import Tenant
from tinker_local_backend.server.adapters import COPIES_IN_TRAINING
from tinker_local_backend.server.held import sampling_bytes
from tinker_local_backend.server.sessions import Draw, Model, Refused, Request, Sampler, gone
from tinker_local_backend.shipped import shipped_model
from tinker_local_backend.storage.info import read_info
from tinker_local_backend.storage.paths import CheckpointPath
from tinker_local_backend.wire.frames import Frame

if TYPE_CHECKING:
    from tinker_local_backend.server.service import Service

CLIENTS_PER_SAMPLER = 10**9
"""How many clients of one sampler the SDK can tell apart by their sequence numbers."""

MOST_SAMPLERS = 10_000
"""of a session, also those whose weights are gone"""


class Samplers:
    """Belongs to one service, and to its event loop."""

    def __init__(self, service: Service):
        self._service = service
        self._config = service.config
        self._requests: Counter[str] = Counter()
        """by tenant, that are waiting or running"""
        self._tokens: Counter[str] = Counter()
        """by tenant, that these may still take"""
        self._rows: Counter[str] = Counter()
        """by tenant, samples that these ask for"""

    @property
    def waiting(self) -> int:
        """Sampling requests without an answer."""
        return self._requests.total()

    @property
    def tokens(self) -> int:
        """That these may take."""
        return self._tokens.total()

    def of(self, tenant: str) -> dict[str, float]:
        """Numbers of a tenant's."""
        return {
            "sampling_requests": self._requests[tenant],
            "sampling_tokens": self._tokens[tenant],
            "sampling_rows": self._rows[tenant],
        }

    def add_snapshot(self, model: Model, seq_id: int) -> Sampler:
        base_model = (model.info or {}).get("base_model", "")
        sampler_id = f"{model.session.session_id}:sample:{seq_id}"
        if sampler_id in model.session.samplers:
            raise Refused(400, f"sampling_session_seq_id {seq_id} was used before in this session")
        size = model.bytes // COPIES_IN_TRAINING
        return self._add(Sampler(sampler_id, model.session, base_model, is_snapshot=True, bytes=size))

    def _add(self, sampler: Sampler) -> Sampler:
        """Keep it, where need be in the place of the tenant's own that were not used for the longest time.

        Raises Refused, with nothing changed, where all of these would not make enough room.
        """
        session, tenant = sampler.session, sampler.session.tenant
        if sampler.is_snapshot or sampler.model_path:  # and not of a base model, which is there anyway
            kept = self._kept(tenant)
            if not self._free(tenant, sampler.bytes, kept):
                raise self._service.no_adapter_room(tenant, sampler.bytes)
            beside = [other for other in kept if other.session is session and not other.evicted]
            self._evict(beside[: max(0, len(beside) + 1 - self._config.max_snapshots)])
        session.samplers[sampler.sampler_id] = sampler
        return sampler

    def free_checkpoints(self, tenant: Tenant, size: int) -> bool:
        """Make room for a model with samplers of checkpoints, which can be loaded again. Returns whether there is."""
        return self._free(tenant, size, [other for other in self._kept(tenant) if other.model_path])

    def _kept(self, tenant: Tenant) -> list[Sampler]:
        """A tenant's samplers with weights of their own, of all sessions, the least recently used one first."""
        found = self._service.samplers_of(tenant)
        return sorted((s for s in found if s.is_snapshot or s.model_path), key=lambda sampler: sampler.used)

    def _free(self, tenant: Tenant, size: int, others: Sequence[Sampler]) -> bool:
        """Evict as many of these as are in the way of so many bytes; none where all of them would not do."""
        missing, going = size - self._service.adapter_room(tenant), list[Sampler]()
        for other in others:
            if missing > 0 and other.bytes:
                going.append(other)
                missing -= other.bytes
        if missing > 0:
            return False
        self._evict(going)
        return True

    def _evict(self, samplers: Sequence[Sampler]) -> None:
        for sampler in samplers:
            sampler.evicted = True
        self._service.drop([], [sampler.sampler_id for sampler in samplers])

    async def create(
        self, tenant: Tenant, session_id: str, seq_id: int, base_model: str | None, model_path: str | None
    ) -> Sampler:
        """A sampler of a base model or of a checkpoint. Raises CheckpointError or RequestError for one that is not there."""
        session = self._service.session(tenant, session_id)
        base_model = base_model if base_model is None else shipped_model(base_model)
        sampler_id = f"{session_id}:sample:{seq_id}"
        existing = session.samplers.get(sampler_id)
        if existing is not None:
            if existing.model_path != model_path or base_model not in (None, existing.base_model):
                raise Refused(400, f"sampling_session_seq_id {seq_id} was used by another request of this session")
            return existing
        self._service.check_open()
        if len(session.samplers) >= MOST_SAMPLERS:
            raise Refused(403, f"this session has made {MOST_SAMPLERS} sampling sessions; use one of them again")
        size = 0
        if model_path is not None:
            info = await asyncio.to_thread(read_info, tenant.home, CheckpointPath.parse(model_path))
            if base_model not in (None, info.base_model):
                raise Refused(400, f"{model_path} is of base model {info.base_model!r}, not {base_model!r}")
            base_model, size = info.base_model, self._service.adapters.size(info.base_model, info.spec)
        elif base_model is None:
            raise Refused(400, "give base_model or model_path")
        served = self._service.served(base_model)
        sampler = self._add(Sampler(sampler_id, session, served, model_path, bytes=size))
        self._open(sampler)
        return sampler

    async def base_model_of(self, tenant: Tenant, model: str) -> str:
        """Of a base model's name or a `tinker://` path. Raises Refused or CheckpointError for one that is not there."""
        if not model.startswith("tinker://"):
            return self._service.served(model, status=404)
        info = await asyncio.to_thread(read_info, tenant.home, CheckpointPath.parse(model))
        return self._service.served(info.base_model)

    async def standing(self, tenant: Tenant, model: str) -> Sampler:
        """A sampler for requests without a session, of a base model's name or a `tinker://` path.

        A checkpoint that was replaced under its name is loaded anew.
        """
        base_model = await self.base_model_of(tenant, model)
        path = CheckpointPath.parse(model) if model.startswith("tinker://") else None
        info = None if path is None else await asyncio.to_thread(read_info, tenant.home, path)
        version = 0.0 if info is None else info.created
        size = 0 if info is None else self._service.adapters.size(base_model, info.spec)
        session = self._service.standing_session(tenant)
        sampler_id = f"{session.session_id}:sample:{model}@{version}"
        sampler = session.samplers.get(sampler_id)
        if sampler is None:
            sampler = self._add(Sampler(sampler_id, session, base_model, None if path is None else model, bytes=size))
            self._open(sampler)
        return sampler

    def _open(self, sampler: Sampler) -> None:
        """Let the engine load it; sampling requests may already follow."""
        self._service.link.call(
            {
                "op": "open_sampler",
                "sampler_id": sampler.sampler_id,
                "base_model": sampler.base_model,
                "path": sampler.model_path,
                "home": str(sampler.session.tenant.home),
            }
        )

    def _reopen(self, sampler: Sampler) -> None:
        """Load a checkpoint again that made room in the meantime. Raises Refused as `_add` does."""
        if sampler.evicted:
            self._add(sampler)
            sampler.evicted = False
            self._open(sampler)

    def find(self, tenant: Tenant, sampler_id: str) -> Sampler:
        """A sampler of a live session. Raises Refused (404)."""
        session = self._service.find_session(tenant, sampler_id.partition(":")[0])
        sampler = session.samplers.get(sampler_id) if session is not None else None
        if session is None or sampler is None:
            raise Refused(404, gone("sampling session", sampler_id))
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
        """A sampling request. Raises Refused (429) while too much of the tenant's is waiting.

        `on_progress` is told what is new of the samples while they are drawn (progress.py). With `record` the engine remembers
        them under the request's `sequence_ids` until they are trained on. Prompts are found again by the same tenant with the
        same `cache_salt`.
        """
        sampler = self.find(tenant, sampler_id)
        known = sampler.known.find(seq_id, digest) if seq_id is not None else None
        if known is not None:
            return known
        self._service.check_open()
        if sampler.evicted and sampler.model_path is None:
            raise Refused(
                404,
                f"the snapshot of sampling session {sampler_id} is gone: only the {self._config.max_snapshots} used last are "
                "kept (max_snapshots), and fewer where there is no room (max_tenant_adapters_mib); save_weights_for_sampler "
                "under a name and make a client from its path",
            )
        context_length = self._context_length(sampler.base_model)
        tokens = draw.tokens(context_length)
        self._check_room(tenant, tokens, draw.samples)
        holding = self._service.held.hold(tenant, sampling_bytes(draw, context_length))
        try:
            self._reopen(sampler)
        except Refused:
            holding.release()
            raise
        request = self._service.requests.new(sampler.session, "sample", holding)
        request.sequence_ids = [f"{request.request_id}:{i}" for i in range(draw.samples)]
        if seq_id is not None:
            sampler.known.add(seq_id, digest, request)
        self._requests[tenant.name] += 1
        self._tokens[tenant.name] += tokens
        self._rows[tenant.name] += draw.samples
        self._service.requests.quotas.spend(tenant, draw.prompt_tokens)

        def ended(reply: Frame) -> Frame:
            self._requests[tenant.name] -= 1
            self._tokens[tenant.name] -= tokens
            self._rows[tenant.name] -= draw.samples
            return reply

        how = {"record_as": request.sequence_ids if record else None, "stream": on_progress is not None}
        whose = "" if self._config.share_prefixes else tenant.name
        origin = {"tenant": tenant.name, "prefixes": [whose, cache_salt or ""]}
        operation = {"op": "sample", "sampler_id": sampler_id, **how, **origin}
        self._service.requests.dispatch(request, operation, draw.request, ended, on_progress)
        return request

    def _check_room(self, tenant: Tenant, tokens: int, samples: int) -> None:
        """Raise Refused (429, or 400 for what would never fit) where so many tokens or samples more are too many."""
        self._service.requests.quotas.check(tenant)
        rows, most = self._rows[tenant.name], tenant.terms.rows
        if most is not None and samples > most:
            raise Refused(400, f"{samples} samples are more than the {most} that you may have at a time; ask for fewer")
        if most is not None and rows + samples > most:
            raise Refused(429, f"{rows} of your {most} samples are waiting or running; send this one again")
        waiting, most = self._requests[tenant.name], self._config.max_sampling_requests
        if waiting >= most:
            raise Refused(429, f"{waiting} sampling requests are waiting (max_sampling_requests); send this one again")
        most = self._config.max_sampling_tokens
        if tokens > most:
            raise Refused(
                400, f"prompt and samples may take {tokens} tokens; at most {most} are drawn for a tenant at a time"
            )
        if self._tokens[tenant.name] + tokens > most:
            raise Refused(
                429,
                f"{self._tokens[tenant.name]} tokens are still to be drawn (max_sampling_tokens); send this one again",
            )

    def _context_length(self, base_model: str) -> int:
        return next((m.context_length for m in self._service.link.models if m.name == base_model), 0)
