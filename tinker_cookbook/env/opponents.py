"""The players of the other roles: the policy's earlier checkpoints, named weights, or a script of the game.

Which checkpoint a group plays against depends only on the seed and the group's batch, so a resumed run plays the same
games.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Awaitable
from typing import Any, Literal, TypeAlias

import chz

from tinker_cookbook.clients import SamplingClient
from tinker_cookbook.completers import TinkerTokenCompleter, TokenCompleter
from tinker_cookbook.env.games import Script
from tinker_cookbook.exceptions import CheckpointError, ConfigurationError
from tinker_cookbook.rl.run_clients import RunClients
from tinker_cookbook.runs.checkpoints import load_checkpoints_file

SELF, START, PAST = "self", "start", "past"
Kind: TypeAlias = Literal["self", "start", "past", "script", "weights"]


@chz.chz(typecheck=True)
class OpponentKeys:
    """The policy's opponent. Unless it is the policy itself, the policy has one role in each game, which alternates
    between groups.
    """

    opponent: str = chz.field(
        default=SELF,
        doc="self: the policy has all roles; start: the policy that the run started from; past: that and the run's checkpoints; "
        "a script of the game; or weights (tinker://<run>/sampler_weights/<name>)",
    )
    opponent_share: float = chz.field(
        default=1.0, doc="share of the groups that play against this opponent; in the others the policy has all roles"
    )
    num_past: int = chz.field(
        default=4, doc="opponent=past: the newest checkpoints among which to draw", validator=chz.validators.gt(0)
    )

    @chz.validate
    def _check_share(self) -> None:
        if not 0 <= self.opponent_share <= 1:
            raise ConfigurationError(f"opponent_share={self.opponent_share}: must be between 0 and 1")


@chz.chz(typecheck=True)
class OpponentConfig(OpponentKeys):
    """An opponent, with the settings of the run that its past checkpoints come from."""

    past_every: int = chz.field(
        default=0, doc="opponent=past: steps between the opponents' checkpoints, as the run's save_every"
    )
    past_lag: int = chz.field(
        default=0, doc="opponent=past: batches that are sampled ahead, as async_config.max_steps_off_policy"
    )

    def kind(self, game: Any) -> Kind:
        """The kind of opponent. Raises ConfigurationError for a name that the game does not define."""
        return kind_of(self.opponent, game)

    def meets(self, rng: random.Random) -> str:
        """The opponent of a group, drawn with the group's random numbers."""
        return self.opponent if rng.random() < self.opponent_share else SELF


def kind_of(opponent: str, game: Any) -> Kind:
    """The kind of an opponent for a game's class. Raises ConfigurationError for an unknown name."""
    for kind in (SELF, START, PAST):
        if opponent == kind:
            return kind
    if opponent.startswith("tinker://"):
        return "weights"
    scripts = getattr(game, "scripts", {})
    if opponent not in scripts:
        known = ", ".join([SELF, START, PAST, *scripts])
        raise ConfigurationError(
            f"opponent={opponent!r}: {game.__name__} has no such script; use {known}, or weights (tinker://...)"
        )
    return "script"


def script_of(opponent: str, game: Any) -> Script | None:
    """The function of a script; None for any other opponent."""
    return game.scripts[opponent] if kind_of(opponent, game) == "script" else None


def past_steps(batch: int, every: int, lag: int, newest: int) -> list[int]:
    """The steps of the possible opponents' checkpoints for a batch, 0 for the start; all are saved before the
    batch is sampled.
    """
    saved = range(every, batch - lag, every) if every > 0 else range(0)
    return [0, *saved][-newest:]


async def open_opponent(opponent: str, step: int, clients: RunClients | None) -> TokenCompleter:
    """The policy with an opponent's weights; `step` is the checkpoint's, for opponent=past.

    Raises:
        ConfigurationError: there are no clients to open it with (replies are typed or scripted).
        CheckpointError: the run has no such checkpoint.
    """
    if clients is None or not isinstance(clients.policy, TinkerTokenCompleter):
        raise ConfigurationError(
            f"opponent={opponent!r} needs a policy that samples; where replies are typed or scripted, use self or a script"
        )
    return dataclasses.replace(clients.policy, sampling_client=await _open(opponent, step, clients))


async def _open(opponent: str, step: int, clients: RunClients) -> SamplingClient:
    if opponent == START or (opponent == PAST and step == 0):
        if clients.starting_policy is None:
            raise ConfigurationError(
                f"opponent={opponent!r} needs the policy that a training run started from, and this is not a training run"
            )
        return clients.starting_policy
    path = _checkpoint_of(step, clients) if opponent == PAST else opponent
    service = clients.service_client
    if service is None:
        raise ConfigurationError(
            f"opponent={opponent!r} needs the service_client of a training run, and this is not one, or plays in another "
            "process: leave the rollout executor out"
        )

    def load() -> Awaitable[SamplingClient]:
        return service.create_sampling_client(model_path=path)

    return await clients.shared.once(("opponent", path), load)


def _checkpoint_of(step: int, clients: RunClients) -> str:
    assert clients.log_path is not None
    for record in load_checkpoints_file(clients.log_path):
        if record.batch == step and record.sampler_path is not None:
            return record.sampler_path
    raise CheckpointError(
        f"{clients.log_path} has no checkpoint of step {step} that can be sampled from, which opponent=past is to meet; it needs "
        "save_every (as past_every), and neither ttl_seconds nor async_periodic_saves that lose or delay it"
    )
