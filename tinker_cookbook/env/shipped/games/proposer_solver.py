"""Hierarchical GRPO: a proposer writes a sum, solvers answer it.

The proposer is paid for sums that the solvers get right about half of the time, each solver for a right answer. Proposers of a
group are compared with each other, and so are the solvers of one sum (`peers`): groups within a group. A reply of a solver that
cannot be read is a wrong answer; a proposal that cannot be read is a forfeit.
"""

import random
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from tinker_cookbook.env.dataset import Environment
from tinker_cookbook.env.games import IllegalMove
from tinker_cookbook.env.multi_agent import multi_agent_env
from tinker_cookbook.env.qa import QA_SYSTEM
from tinker_cookbook.env.task import parse_solution
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl.types import Metrics

PROPOSER, SOLVER = "proposer", "solver"
MOST = 999


def proposer_reward(pass_rate: float) -> float:
    """1 - |2 p - 1|: 1 where half of the solvers are right, 0 where all or none are, because such a task trains no solver.

    As in the hierarchical GRPO of prime-rl, the best task is one that half of the solvers solve.
    """
    return 1.0 - abs(2.0 * pass_rate - 1.0)


def play_at_random(game: "ProposerSolver", role: str, rng: random.Random) -> str:
    """Any sum of the range; the right answer or one next to it."""
    if role == PROPOSER:
        return f"<SOLUTION>{rng.randint(1, game.highest)}+{rng.randint(1, game.highest)}</SOLUTION>"
    return f"<SOLUTION>{sum(game.numbers) + rng.choice([0, 0, 1, -1])}</SOLUTION>"


class ProposerSolver:
    """Sums of two numbers from 1 to `highest`."""

    solvers: ClassVar[tuple[str, ...]] = tuple(f"{SOLVER}_{i}" for i in range(4))
    roles: ClassVar[tuple[str, ...]] = (PROPOSER, *solvers)
    peers: ClassVar[Mapping[str, str]] = dict.fromkeys(solvers, SOLVER)
    takes_silence = True
    system_prompt = QA_SYSTEM
    scripts = {"random": play_at_random}  # noqa: RUF012

    def __init__(self, rng: random.Random, highest: int = 9):
        if not 1 <= highest <= MOST:
            raise ConfigurationError(f"highest={highest}: must be between 1 and {MOST}")
        self.highest = highest
        self.numbers: tuple[int, int] = (0, 0)
        self.right: dict[str, bool] = {}
        self._proposed = False

    def to_move(self) -> tuple[str, ...]:
        if not self._proposed:
            return (PROPOSER,)
        return () if self.right else self.solvers

    def observe(self, role: str) -> str:
        if role == PROPOSER:
            return f"Which sum of two numbers from 1 to {self.highest} should others solve? Write it like 1+1."
        return f"What is {self.numbers[0]} + {self.numbers[1]}?"

    def act(self, role: str, text: str) -> None:
        answer = parse_solution(text) or ""
        if role != PROPOSER:
            self.right[role] = answer.strip() == str(sum(self.numbers))
            return
        read = re.fullmatch(r"\s*(\d{1,3})\s*\+\s*(\d{1,3})\s*", answer, flags=re.ASCII)
        numbers = (int(read[1]), int(read[2])) if read else (0, 0)
        if not all(1 <= number <= self.highest for number in numbers):
            raise IllegalMove(f"{answer[:20]!r} is not a sum of two numbers from 1 to {self.highest}")
        self.numbers, self._proposed = numbers, True

    @property
    def pass_rate(self) -> float:
        """Share of the solvers that were right."""
        return sum(self.right.values()) / len(self.solvers)

    def rewards(self) -> Mapping[str, float]:
        return {PROPOSER: proposer_reward(self.pass_rate)} | {role: float(right) for role, right in self.right.items()}

    def metrics(self) -> Metrics:
        return {"pass_rate": self.pass_rate, "proposed": float(sum(self.numbers))}


def with_solvers(game: type[ProposerSolver], count: int) -> type[ProposerSolver]:
    """The game with another number of solvers, at least 2: a single one cannot be compared with others."""
    if count < 2:
        raise ConfigurationError(f"num_solvers={count}: must be at least 2, which are compared with each other")
    solvers = tuple(f"{SOLVER}_{i}" for i in range(count))
    fields = {"solvers": solvers, "roles": (PROPOSER, *solvers), "peers": dict.fromkeys(solvers, SOLVER)}
    return type(game.__name__, (game,), fields)


def load_environment(highest: int = 9, num_solvers: int = 4, **settings: Any) -> Environment:
    """Proposer and solvers, all of them the policy; takes the keywords of `multi_agent_env`."""
    game = ProposerSolver if num_solvers == len(ProposerSolver.solvers) else with_solvers(ProposerSolver, num_solvers)
    return multi_agent_env(game, game_args={"highest": highest}, **settings)
