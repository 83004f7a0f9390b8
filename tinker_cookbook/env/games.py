"""Games with several roles: turn order, what each role sees, and a match in which players wait for each other.

class Pennies:
    roles = ("even", "odd")

    def __init__(self, rng):
        self.moves = {}

    def to_move(self):
        return () if self.moves else self.roles

    def observe(self, role):
        return "Heads or tails?"

    def act(self, role, text):
        if text not in ("heads", "tails"):
            raise IllegalMove(f"{text!r} is neither heads nor tails")
        self.moves[role] = text

    def rewards(self):
        same = len(set(self.moves.values())) == 1
        return {"even": 1.0 if same else -1.0, "odd": -1.0 if same else 1.0}
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeAlias

from tinker_cookbook.env.episodes import NewMessages
from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.rl.types import Metrics

FORFEIT_REWARD = -1.0
"""Cost of a forfeit, unless the game sets `forfeit_reward`."""


class IllegalMove(Exception):
    """Raised by `Game.act`: the player forfeits, and the match ends."""


class Game(Protocol):
    """One game, from the deal to the end.

    The constructor takes `rng`, a random.Random that is the same for all games of a group, and other arguments. A
    class may have `forfeit_reward`, `system_prompt`, `metrics()`, `scripts`, a dict from names to functions of (game,
    role, rng) that return a move, and `test_opponent`, the default opponent in evaluations (the policy itself if
    absent). With `takes_silence = True`, a role that leaves says "" at each turn instead of forfeiting. `peers`, a dict
    from roles to names, are roles that are compared with each other within a game (advantage.baseline=role_mean), not
    with themselves in other games of the group.
    """

    roles: ClassVar[tuple[str, ...]]

    def to_move(self) -> Sequence[str]:
        """The roles that move next. Several roles move at once and do not see each other's moves. Empty: the game is
        over.
        """
        ...

    def observe(self, role: str) -> NewMessages:
        """The news for a role that moves next; the first time also the rules and its hand."""
        ...

    def act(self, role: str, text: str) -> None:
        """Take a move. Raises IllegalMove."""
        ...

    def rewards(self) -> Mapping[str, float]:
        """Rewards by role, once the game is over."""
        ...


Script: TypeAlias = Callable[[Any, str, random.Random], str]
"""(game, role, rng) -> a move."""


class Match:
    """One game whose players are separate coroutines.

    A player awaits `turn`, then calls `submit`. If several roles move at once, their moves are applied in the order of
    the roles when all have arrived. A player that leaves, or makes an illegal move, forfeits, and the others gain
    nothing from it.
    """

    def __init__(self, game: Any):
        self.game = game
        self.forfeited: str | None = None
        self.moves: list[tuple[str, str]] = []
        """(role, what it said), in order"""
        self._given: dict[str, str] = {}
        self._silent: set[str] = set()
        """roles that have left, in a game that counts their silence as moves"""
        self._changed = asyncio.Event()
        self._error: BaseException | None = None
        self._to_move = self._ask()

    @property
    def is_over(self) -> bool:
        return self.forfeited is not None or not self._to_move

    async def turn(self, role: str) -> bool:
        """Wait until this role moves (True) or the match is over (False). Raises the error passed to `fail`."""
        while True:
            if self._error is not None:
                raise self._error
            if self.is_over:
                return False
            if role in self._to_move and role not in self._given:
                return True
            await self._changed.wait()

    def submit(self, role: str, text: str) -> None:
        """Submit the move of a role that moves next."""
        if self.is_over:
            return
        assert role in self._to_move and role not in self._given, f"{role} moves out of turn"
        self._given[role] = text
        if len(self._given) < len(self._to_move):
            return
        for mover in self._to_move:
            self.moves.append((mover, self._given[mover]))
            try:
                self.game.act(mover, self._given[mover])
            except IllegalMove:
                self.forfeited = mover
                break
        self._given = {}
        if self.forfeited is None:
            self._to_move = self._ask()
        self._wake()
        self._move_for_silent()

    def leave(self, role: str) -> None:
        """This role stops playing: a forfeit, unless the match is over or counts its silence as a move."""
        if self.is_over:
            return
        if getattr(self.game, "takes_silence", False):
            self._silent.add(role)
            self._move_for_silent()
        else:
            self.forfeited = role
            self._wake()

    def _move_for_silent(self) -> None:
        waiting = [role for role in self._to_move if role in self._silent and role not in self._given]
        if waiting and not self.is_over:
            self.submit(waiting[0], "")
            self._move_for_silent()

    def fail(self, error: BaseException) -> None:
        """Called when a player cannot continue; all waiting players get the error."""
        self._error = error
        self._wake()

    def rewards(self) -> dict[str, float]:
        """Rewards by role. Raises DataValidationError if the game leaves a role out."""
        roles = self.game.roles
        if self.forfeited is not None:
            cost = float(getattr(self.game, "forfeit_reward", FORFEIT_REWARD))
            return {role: cost if role == self.forfeited else 0.0 for role in roles}
        rewards = dict(self.game.rewards())
        if rewards.keys() != set(roles):
            raise DataValidationError(
                f"{type(self.game).__name__}.rewards gave {rewards}; it gives one for each of {roles}"
            )
        return {role: float(rewards[role]) for role in roles}

    def metrics(self) -> Metrics:
        """The game's metrics, if it finished."""
        game_metrics = getattr(self.game, "metrics", None)
        return dict(game_metrics()) if game_metrics is not None and self.forfeited is None else {}

    def _ask(self) -> tuple[str, ...]:
        to_move = tuple(self.game.to_move())
        if unknown := [role for role in to_move if role not in self.game.roles]:
            raise DataValidationError(
                f"{type(self.game).__name__}.to_move gave {unknown[0]!r}; roles are {self.game.roles}"
            )
        return tuple(role for role in self.game.roles if role in to_move)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


async def play_script(match: Match, role: str, script: Script, rng: random.Random) -> None:
    """Play a role with a function, to the end of the match."""
    while await match.turn(role):
        match.submit(role, script(match.game, role, rng))
