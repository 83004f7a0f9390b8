"""Shared sum: two players add two numbers, each knows only one, and they win or lose together.

`teller` sees its number and says one; `adder` hears it, sees its own number and names the sum. Both get 1 if this is
the sum of the two true numbers, else 0. A reply that is not a number from 0 to 99 is a forfeit, which costs 1.
"""

import random
from collections.abc import Mapping
from typing import Any

from tinker_cookbook.env.dataset import Environment
from tinker_cookbook.env.games import IllegalMove
from tinker_cookbook.env.multi_agent import multi_agent_env
from tinker_cookbook.env.qa import QA_SYSTEM
from tinker_cookbook.env.task import parse_solution
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl.types import Metrics

TELLER, ADDER = "teller", "adder"
MOST = 99


def play_well(game: "SharedSum", role: str, rng: random.Random) -> str:
    """Say its number; add the number that it heard."""
    return say(game.numbers[TELLER] if role == TELLER else game.heard + game.numbers[ADDER])


def play_badly(game: "SharedSum", role: str, rng: random.Random) -> str:
    """Any possible number."""
    return say(rng.randint(1, game.highest if role == TELLER else 2 * game.highest))


def say(number: int) -> str:
    """A number in the players' notation."""
    return f"<SOLUTION>{number}</SOLUTION>"


class SharedSum:
    """Two numbers from 1 to `highest`."""

    roles = (TELLER, ADDER)
    system_prompt = QA_SYSTEM
    scripts = {"good": play_well, "bad": play_badly}  # noqa: RUF012

    def __init__(self, rng: random.Random, highest: int = 5):
        if not 1 < highest <= MOST // 2:
            raise ConfigurationError(f"highest={highest}: must be between 2 and {MOST // 2}")
        self.highest = highest
        self.numbers = {role: rng.randint(1, highest) for role in self.roles}
        self.heard, self.named = 0, 0
        self._moves = 0

    def to_move(self) -> tuple[str, ...]:
        return self.roles[self._moves : self._moves + 1]

    def observe(self, role: str) -> str:
        if role == TELLER:
            return f"Your number is {self.numbers[TELLER]}. Which number is it?"
        return f"What is {self.heard} + {self.numbers[ADDER]}?"

    def act(self, role: str, text: str) -> None:
        answer = parse_solution(text) or ""
        if not (answer.isascii() and answer.isdigit() and int(answer[:9]) <= MOST):
            raise IllegalMove(f"{answer[:20]!r} is not a number from 0 to {MOST}")
        if role == TELLER:
            self.heard = int(answer)
        else:
            self.named = int(answer)
        self._moves += 1

    def rewards(self) -> Mapping[str, float]:
        return dict.fromkeys(self.roles, float(self.named == sum(self.numbers.values())))

    def metrics(self) -> Metrics:
        return {
            "told": float(self.heard == self.numbers[TELLER]),
            "added": float(self.named == self.heard + self.numbers[ADDER]),
        }


def load_environment(highest: int = 5, **settings: Any) -> Environment:
    """Shared sum between two copies of the policy, or with another partner; takes the keywords of `multi_agent_env`."""
    return multi_agent_env(SharedSum, game_args={"highest": highest}, **settings)
