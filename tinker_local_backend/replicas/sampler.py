"""Sampling over all ranks: each request goes, whole, to the rank with the fewest running samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from functools import partial
from typing import Any

from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.sampling.requests import SamplerLimits
from tinker_local_backend.engine.sampling.sampler import Post, Sampler, SamplerStats, Ticket
from tinker_local_backend.errors import LocalBackendError, ReplicaError, RequestError
from tinker_local_backend.replicas.leader import Leader, Peer


class ReplicaSampler:
    """A Sampler (engine/sampling/sampler.py) over rank 0's own and those of the followers.

    What a follower samples is told when it has ended: `on_progress` hears of it once. Where the base weights are divided, all
    ranks go one step forward together.
    """

    def __init__(self, model: BaseModel, own: Sampler, random_seed: Callable[[], int], post: Post, leader: Leader):
        if leader.ranks is not None and model.shards.whole:
            raise RequestError(
                f"model {model.name!r} was made in memory, and TINKER_LOCAL_BASE_WEIGHTS=sharded divides only models that every "
                "rank loads: save it to a folder and name that"
            )
        self._model, self._own, self._random_seed, self._post, self._leader = model, own, random_seed, post, leader
        self._load = [0] * (1 + len(leader.peers))
        """samples under way by rank"""
        self._away: set[Ticket] = set()
        self._limits = replace(own.limits, tokens=min(own.limits.tokens, leader.load(model.name)))

    @property
    def limits(self) -> SamplerLimits:
        return self._limits

    @property
    def busy(self) -> bool:
        return self._own.busy or (self._leader.ranks is not None and any(self._load[1:]))

    @property
    def stats(self) -> SamplerStats:
        own = self._own.stats
        return own._replace(running=own.running + sum(self._load[1:]))

    def add(self, ticket: Ticket) -> None:
        # The seeds come from one source, whichever rank samples.
        if ticket.request.seed is None:
            ticket.request = replace(ticket.request, seed=self._random_seed())
        place = self._load.index(min(self._load))
        weight = max(1, ticket.request.num_samples)
        self._load[place] += weight
        complete = ticket.complete

        def completed(outcome: Any) -> None:
            self._load[place] -= weight
            self._away.discard(ticket)
            complete(outcome)

        def cancelled(_: object) -> None:
            if ticket.cancelled():
                self._post(partial(ticket.finish, CancelledError()))

        ticket.complete = completed
        if ticket.on_done is not None:
            ticket.on_done(cancelled)
        if place == 0:
            self._own.add(ticket)
        else:
            self._send(self._leader.peers[place - 1], ticket)

    def _send(self, peer: Peer, ticket: Ticket) -> None:
        request = ticket.request
        try:
            adapter = request.adapter
            name = None if adapter is None else self._leader.adapter_id(peer, self._model.name, adapter)
        except LocalBackendError as error:
            ticket.finish(error)
            return
        self._away.add(ticket)
        number, asked = peer.ask("sample", self._model.name, replace(request, adapter=None), name)

        def answered(done: Future[Any]) -> None:
            self._post(partial(self._finish, peer, ticket, done))

        def cancel(_: object) -> None:
            if ticket.cancelled():
                peer.cancel(number)

        asked.add_done_callback(answered)
        if ticket.on_done is not None:
            ticket.on_done(cancel)

    def _finish(self, peer: Peer, ticket: Ticket, done: Future[Any]) -> None:
        error = done.exception()
        if error is None:
            ticket.sequences = done.result().sequences
            ticket.finish(done.result())
        elif isinstance(error, LocalBackendError):
            ticket.finish(error)
        else:
            ticket.finish(ReplicaError(f"rank {peer.rank} failed: {type(error).__name__}: {error}"))

    @property
    def tenants(self) -> Collection[str]:
        return self._own.tenants

    def step(self) -> Mapping[str, int]:
        if self._leader.ranks is None:
            return self._own.step()
        tokens: Counter[str] = Counter()

        def own(_: object) -> None:
            tokens.update(self._own.step())

        try:
            self._leader.turn(self._model, own, "step", self._model.name)
        except ReplicaError as error:
            self.fail_all(error)
        return tokens

    def evict_prefixes(self, tenant: str = "") -> None:
        self._own.evict_prefixes(tenant)

    def fail_all(self, error: BaseException) -> None:
        for ticket in list(self._away):
            ticket.finish(error)
        self._own.fail_all(error)
