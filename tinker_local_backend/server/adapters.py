"""How much memory adapters take, and whether there is room for another one."""

from __future__ import annotations

from collections.abc import Iterable

from tinker_local_backend.engine.lora_spec import LoraSpec
from tinker_local_backend.server.access import Tenant
from tinker_local_backend.server.config import MIB, ServerConfig
from tinker_local_backend.server.link import EngineLink
from tinker_local_backend.server.sessions import Session

COPIES_IN_TRAINING = 4
"""Of what an adapter takes alone: its matrices, their gradients, and two moments of the optimizer."""

_FLOAT_BYTES = 4


class Adapters:
    """Bounds on the memory of adapters, those that are trained and those that are sampled from."""

    def __init__(self, config: ServerConfig, link: EngineLink):
        self._link = link
        self._most = config.max_adapters_mib * MIB if config.max_adapters_mib else link.adapter_room
        self._most_of_tenant = config.max_tenant_adapters_mib * MIB if config.max_tenant_adapters_mib else self._most

    def size(self, base_model: str, spec: LoraSpec) -> int:
        """Bytes of an adapter's matrices."""
        widths = next((model.lora_widths for model in self._link.models if model.name == base_model), {})
        trained = {"attn": spec.train_attn, "mlp": spec.train_mlp, "unembed": spec.train_unembed}
        return spec.rank * _FLOAT_BYTES * sum(width for part, width in widths.items() if trained[part])

    def room(self, tenant: Tenant, sessions: Iterable[Session]) -> int:
        """Bytes that a tenant's adapters may still take, beside those of these sessions, which are all there are."""
        total = own = 0
        for session in sessions:
            taken = sum(model.bytes for model in session.models.values())
            taken += sum(sampler.bytes for sampler in session.samplers.values() if not sampler.evicted)
            total += taken
            own += taken if session.tenant == tenant else 0
        return min(self._most - total, self._most_of_tenant - own)
