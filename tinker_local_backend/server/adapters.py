"""How much memory adapters take, and whether there is room for another one."""

from __future__ import annotations

from tinker_local_backend.engine.model.lora_spec import LoraSpec
from tinker_local_backend.server.access import Access, Tenant
from tinker_local_backend.server.config import MIB, ServerConfig
from tinker_local_backend.server.errors import Refused
from tinker_local_backend.server.link import EngineLink
from tinker_local_backend.server.sessions import Sessions

COPIES_IN_TRAINING = 4
"""Of what an adapter takes alone: its matrices, their gradients, and two moments of the optimizer."""

OWN_IN_THE_WAY = 403
"""The status where a tenant's own adapters leave no room for one more."""

FULL_SECONDS = 10
"""after which it is worth asking again while others have all the room"""

_FLOAT_BYTES = 4


class Adapters:
    """Bounds on the memory of adapters, those that are trained and those that are sampled from."""

    def __init__(self, config: ServerConfig, link: EngineLink, access: Access, sessions: Sessions):
        self._link, self._access, self._sessions = link, access, sessions
        self._most = config.max_adapters_mib * MIB if config.max_adapters_mib else link.adapter_room
        self._given = config.max_tenant_adapters_mib

    @property
    def _most_of_tenant(self) -> int:
        return self._access.share(self._most, None if self._given is None else self._given * MIB)

    def size(self, base_model: str, spec: LoraSpec) -> int:
        """Bytes of an adapter's matrices."""
        widths = next((model.lora_widths for model in self._link.models if model.name == base_model), {})
        trained = {"attn": spec.train_attn, "mlp": spec.train_mlp, "unembed": spec.train_unembed}
        return spec.rank * _FLOAT_BYTES * sum(width for part, width in widths.items() if trained[part])

    def room(self, tenant: Tenant) -> int:
        """Bytes that a tenant's adapters may still take."""
        total, own = self._taken(tenant)
        return min(self._most - total, self._most_of_tenant - own)

    def no_room(self, tenant: Tenant, size: int) -> Refused:
        """The refusal of an adapter that takes so many bytes and finds no room.

        400 if it never would, 403 if the tenant's own are in its way, which he can end, and 429 if others' are.
        """
        most, (_, own) = self._most_of_tenant, self._taken(tenant)
        what = f"the adapter takes {size / MIB:.1f} MiB here"
        if size > most:
            return Refused(400, f"{what}, and at most {most / MIB:.1f} are yours; use a smaller rank")
        if own + size > most:
            return Refused(
                OWN_IN_THE_WAY,
                f"{what}, your others take {own / MIB:.1f}, and {most / MIB:.1f} are yours (max_tenant_adapters_mib); close a "
                "ServiceClient first, or use a smaller rank",
            )
        why = f"{what}, and the adapters of all tenants leave no room (max_adapters_mib); try again later"
        return Refused(429, why, FULL_SECONDS)

    def _taken(self, tenant: Tenant) -> tuple[int, int]:
        """Bytes of all adapters, and of a tenant's."""
        total = own = 0
        for session in self._sessions.values():
            taken = sum(model.bytes for model in session.models.values())
            taken += sum(sampler.bytes for sampler in session.samplers.values() if not sampler.evicted)
            total += taken
            own += taken if session.tenant == tenant else 0
        return total, own
