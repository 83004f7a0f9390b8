"""Memory accounting of adapters: sizes and limits."""

from __future__ import annotations

from tinker_local_backend.engine.model.lora_spec import LoraSpec
from tinker_local_backend.server.access import Access, Tenant
from tinker_local_backend.server.config import MIB, ServerConfig
from tinker_local_backend.server.errors import Refused
from tinker_local_backend.server.link import EngineLink
from tinker_local_backend.server.sessions import Sessions

COPIES_IN_TRAINING = 4
"""An adapter's matrices, their gradients, and the optimizer's two moments."""

TENANT_FULL = 403
"""HTTP status if the tenant's own adapters leave no room for another."""

FULL_SECONDS = 10
"""Retry-After if other tenants' adapters leave no room."""

_FLOAT_BYTES = 4


class Adapters:
    """Limits on the memory of adapters, of training and sampling together."""

    def __init__(self, config: ServerConfig, link: EngineLink, access: Access, sessions: Sessions):
        self._link, self._access, self._sessions = link, access, sessions
        self._limit = config.max_adapters_mib * MIB if config.max_adapters_mib else link.adapter_room
        self._tenant_limit = None if (mib := config.max_tenant_adapters_mib) is None else mib * MIB

    def size(self, base_model: str, spec: LoraSpec) -> int:
        """Bytes of an adapter's matrices."""
        by_layout = next((model.lora_widths for model in self._link.models if model.name == base_model), {})
        widths = by_layout.get(spec.experts, {})
        trained = {"attn": spec.train_attn, "mlp": spec.train_mlp, "unembed": spec.train_unembed}
        return spec.rank * _FLOAT_BYTES * sum(width for part, width in widths.items() if trained[part])

    def room(self, tenant: Tenant) -> int:
        """Bytes left for a tenant's adapters."""
        total, of_tenant = self._used(tenant)
        return min(self._limit - total, self._access.tenant_limit(self._limit, self._tenant_limit) - of_tenant)

    def capacity_error(self, tenant: Tenant, size: int) -> Refused:
        """The refusal of an adapter of `size` bytes.
        Status 400 if it alone exceeds the limit, 403 if the tenant's own adapters leave no room, 429 if other tenants' do."""
        limit, (_, of_tenant) = self._access.tenant_limit(self._limit, self._tenant_limit), self._used(tenant)
        what = f"the adapter takes {size / MIB:.1f} MiB here"
        if size > limit:
            return Refused(400, f"{what}, and your limit is {limit / MIB:.1f}; use a smaller rank")
        if of_tenant + size > limit:
            return Refused(
                TENANT_FULL,
                f"{what}, your others take {of_tenant / MIB:.1f}, and your limit is {limit / MIB:.1f} (max_tenant_adapters_mib); "
                "close a ServiceClient first, or use a smaller rank",
            )
        why = f"{what}, and the adapters of all tenants leave no room (max_adapters_mib); try again later"
        return Refused(429, why, FULL_SECONDS)

    def _used(self, tenant: Tenant) -> tuple[int, int]:
        """Bytes of all adapters, and of one tenant's."""
        total = of_tenant = 0
        for session in self._sessions.values():
            used = sum(model.bytes for model in session.models.values())
            used += sum(sampler.bytes for sampler in session.samplers.values() if not sampler.evicted)
            total += used
            of_tenant += used if session.tenant == tenant else 0
        return total, of_tenant
