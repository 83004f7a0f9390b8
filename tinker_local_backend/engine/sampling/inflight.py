"""Weights that change while sequences are sampled from them: `save_weights_and_get_sampling_client(kind="inflight")`.

A training client has one published adapter. Its in-flight sampling clients all sample from it, and running sequences go on with
a newly published one at their next token. Their KV cache stays, with what the earlier weights computed. Each token says which
weights drew it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tinker_local_backend.engine.model.lora import Adapter


@dataclass(eq=False)
class PublishedWeights:
    """The adapter that the in-flight samplers of a training client use. Only the engine's worker changes it."""

    adapter: Adapter
    version: int = 0
    """counts the adapters that were published"""

    def publish(self, adapter: Adapter) -> None:
        """Let all samplers go on with this snapshot."""
        self.adapter, self.version = adapter, self.version + 1


@dataclass(frozen=True, eq=False)
class InflightWeights:
    """What one in-flight sampling client samples from. Each client shares cached prefixes with itself alone."""

    published: PublishedWeights
