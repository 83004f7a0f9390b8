"""A second training client that starts from the policy's state, takes one step, and reports what changed."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from tinker_cookbook import backends
from tinker_cookbook.exceptions import CheckpointError, DataValidationError
from tinker_cookbook.rl.run_clients import RunClients
from tinker_cookbook.supervised.common import datum_from_tokens_weights
from tinker_cookbook.utils.lazy import tinker, torch

SECONDS = 24 * 3600
"""How long the shadow's start states are stored."""


class Shadow:
    """Created once per run from a saved state of the policy, and reset to the newest one for every step.

    It never trains the policy's client; it only asks it to save its state, once per snapshot that plays.
    """

    def __init__(self, clients: RunClients):
        self._training_client: Any = clients.training_client
        self._service_client: Any = clients.service_client
        self._client: Any = None
        self._snapshot, self._path, self._count = None, "", 0
        self._starting = asyncio.Lock()

    async def changes(
        self, snapshot: Any, steps: Sequence[tinker.Datum], probe: tinker.Datum, learning_rate: float
    ) -> list[float]:
        """How much one Adam step on each datum, each from the policy's current weights, raises the summed logprob of a
        probe, in nats.

        Args:
            snapshot: the sampling client that plays; if it differs from the previous one, the policy has changed.
            steps, probe: datums with target_tokens and weights; the logprobs of the targets with weight count.
        """
        await self._start(snapshot)
        # No await between these calls, so that calls of other groups cannot come in between.
        client, path = self._client, self._path
        requests: list[list[Any]] = []
        before = _reset(client, path), client.forward([probe], "cross_entropy")
        for datum in steps:
            requests.append(
                [
                    _reset(client, path),
                    client.forward_backward([datum], "cross_entropy"),
                    client.optim_step(tinker.AdamParams(learning_rate=learning_rate)),
                    client.forward([probe], "cross_entropy"),
                ]
            )
        await before[0]
        first = _summed(await before[1], probe)
        changes: list[float] = []
        for loaded, passed, stepped, scored in requests:
            for future in (loaded, passed, stepped):
                await future
            changes.append(_summed(await scored, probe) - first)
        return changes

    async def _start(self, snapshot: Any) -> None:
        async with self._starting:
            if self._client is not None and self._snapshot is snapshot:
                return
            name = f"shadow-{self._count:06d}"
            self._count += 1
            self._path = await self._save(name)
            self._snapshot = snapshot
            if self._client is None:
                self._client = await self._service_client.create_training_client_from_state(self._path)

    async def _save(self, name: str) -> str:
        """Save the policy's state and return its path. Raises CheckpointError for a name that is taken, or another
        refusal of the engine.
        """
        try:
            return (await self._training_client.save_state(name, SECONDS)).path
        except Exception as error:
            if not backends.is_engine_error(error):
                raise
            raise CheckpointError(
                f"gradient_intuition cannot save the state {name!r} of the policy, from which its shadow starts ({error}). Each "
                "training client has one shadow, whose states are called so, and a resumed run has a training client of its own; "
                "delete a state of this name that something else saved"
            ) from error


def _reset(client: Any, path: str) -> Any:
    """The future of resetting the client to a saved state.

    The SDK deprecates this in favour of a new client per start; a shadow would need one for every reply.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"DEPRECATED: TrainingClient\.load_state", FutureWarning)
        return client.load_state(path)


def _summed(output: Any, datum: tinker.Datum) -> float:
    logprobs = output.loss_fn_outputs[0]["logprobs"].to_numpy().astype(np.float64)
    total = float((logprobs * datum.loss_fn_inputs["weights"].to_numpy()).sum())
    if not np.isfinite(total):
        raise DataValidationError(f"the shadow scored the probe as {total}; lower the learning rate of its step")
    return total


async def shadow_of(clients: RunClients) -> Shadow:
    """The run's shadow."""

    async def make() -> Shadow:
        return Shadow(clients)

    return await clients.shared.once("gradient_intuition shadow", make)


def answer_datum(prompt: Sequence[int], answer: Sequence[int]) -> tinker.Datum:
    """A datum whose loss is only on the answer's ids."""
    weights = [0.0] * len(prompt) + [1.0] * len(answer)
    return datum_from_tokens_weights(torch.tensor([*prompt, *answer]), torch.tensor(weights))
