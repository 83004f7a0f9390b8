"""Weights that change while sequences are sampled from them: `save_weights_and_get_sampling_client(kind="inflight")`.

A training client has one published adapter. All its in-flight sampling clients sample from it, and running sequences switch to
a newly published one at their next token. Their KV cache stays, with keys and values of the earlier weights. Each token records
the version that drew it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tinker_local_backend.engine.model.lora import Adapter


@dataclass(eq=False)
class PublishedWeights:
    """The adapter that the in-flight samplers of a training client use. Only the engine's worker changes it."""

    adapter: Adapter
    version: int = 0
    """number of adapters published so far"""

    def publish(self, adapter: Adapter) -> None:
        """Switch all samplers to this snapshot."""
        self.adapter, self.version = adapter, self.version + 1


@dataclass(frozen=True, eq=False)
class InflightWeights:
    """The weights of one in-flight sampling client. Clients do not share cached prefixes."""

    published: PublishedWeights
