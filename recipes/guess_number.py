"""Guess the number: an episode of several turns, in which the environment answers "higher" or "lower".

The smallest multi-turn environment: a MessageEnv of forty lines, groups of attempts at the same number, GRPO on the
reward of the whole episode. Every episode is one training example, because each prompt extends the previous one token
for token. The shipped model can write a number between tags, but does not know the game: it learns to use the hints.

    python -m recipes.guess_number
    python -m recipes.guess_number model_name=Qwen/Qwen3-4B-Instruct-2507 env.highest=100 env.max_turns=7
    python -m recipes.guess_number play=True
"""

import random
import re
from collections.abc import Callable
from functools import partial

import chz

from recipes.common import for_model
from recipes.rl_common import dataset_of
from recipes.warm_up import GameConfig, demonstrate, play_or_train
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.env.dataset import DatasetSettings, EnvMaker, Episodes
from tinker_cookbook.env.qa import QA_SYSTEM
from tinker_cookbook.env.task import parse_solution
from tinker_cookbook.field_groups import TurnLimit
from tinker_cookbook.renderers import Message, Renderer, get_text_content
from tinker_cookbook.rl.message_env import MessageEnv, MessageStepResult
from tinker_cookbook.rl.types import Metrics
from tinker_cookbook.runs.outcome import RunSummary
from tinker_cookbook.utils.fields import docs

RECIPE = "guess_number"
NEAR = 0.5
"""Reward of the best possible miss; a hit gets 1."""
WASTE = 0.2
"""Penalty of a wasted turn."""


class GuessNumberEnv(MessageEnv):
    """A number from 1 to `highest`, and `max_turns` guesses between <SOLUTION> tags.

    The last turn's reward is 1 for a hit, else NEAR * (1 - distance / (highest - 1)). A guess that the earlier hints
    rule out, or an invalid one, costs WASTE immediately.

    Args:
        list_numbers: each hint lists the numbers that are still possible, as a help for small models.
    """

    def __init__(self, number: int, highest: int, max_turns: int, list_numbers: bool):
        self.number, self.highest, self.max_turns, self.list_numbers = number, highest, max_turns, list_numbers
        self.possible = range(1, highest + 1)
        self.messages: list[Message] = []
        self.turns = 0

    async def initial_observation(self) -> list[Message]:
        question = f"I think of a number from 1 to {self.highest}.{self.invitation()}"
        self.messages = [{"role": "system", "content": QA_SYSTEM}, {"role": "user", "content": question}]
        return list(self.messages)

    async def step(self, message: Message) -> MessageStepResult:
        guess = self.read_guess(get_text_content(message))
        sensible = guess is not None and guess in self.possible
        self.turns += 1
        hit = guess == self.number
        done = hit or self.turns == self.max_turns
        reward = 0.0 if sensible else -WASTE
        metrics: Metrics = {"valid_guess": float(guess is not None), "sensible_guess": float(sensible)}
        if done:
            closeness = 0.0 if guess is None else 1 - abs(guess - self.number) / (self.highest - 1)
            reward += 1.0 if hit else NEAR * closeness
            metrics |= {"correct": float(hit), "closeness": closeness}
        self.messages += [message, {"role": "user", "content": "Yes!" if hit else self.hint(guess)}]
        return MessageStepResult(
            reward, done, list(self.messages), metrics, {"number": self.number, "guess": str(guess)}
        )

    def read_guess(self, text: str) -> int | None:
        solution = parse_solution(text) or ""
        if not (solution.isascii() and solution.isdigit() and len(solution) <= len(str(self.highest))):
            return None
        return int(solution) if 1 <= int(solution) <= self.highest else None

    def hint(self, guess: int | None) -> str:
        if guess is None:
            return f"Give a number from 1 to {self.highest}.{self.invitation()}"
        low, high = self.possible.start, self.possible.stop
        more = self.number > guess
        self.possible = range(max(low, guess + 1), high) if more else range(low, min(high, guess))
        return f"It is {'more' if more else 'less'} than {guess}.{self.invitation()}"

    def invitation(self) -> str:
        return f" One of {' '.join(map(str, self.possible))}?" if self.list_numbers else " What is it?"


def careless_guess(highest: int, rng: random.Random, messages: list[Message]) -> Message:
    """A player that knows the answer format, and ignores the hints half of the time."""
    low, high = 1, highest
    if rng.random() < 0.5:
        for text in (get_text_content(message) for message in messages if message["role"] == "user"):
            if match := re.match(r"It is (more|less) than (\d+)", text):
                bound = int(match.group(2))
                low, high = (max(low, bound + 1), high) if match.group(1) == "more" else (low, min(high, bound - 1))
    return {"role": "assistant", "content": f"<SOLUTION>{rng.randint(low, high)}</SOLUTION>"}


@chz.chz(typecheck=True)
class GuessNumber(TurnLimit, Episodes):
    """Numbers drawn uniformly from the range."""

    DOCS = docs(max_turns="guesses per episode")

    highest: int = chz.field(default=10, doc="numbers are drawn from 1 to this", validator=chz.validators.gt(1))
    list_numbers: bool = chz.field(default=True, doc="each hint lists the numbers that are still possible")

    def env_options(self) -> dict[str, float]:
        # An unfinished reply must not pay: it costs more than wasting every turn.
        return {"context_overflow_reward": -1.0}

    @property
    def dataset_name(self) -> str:
        return RECIPE

    def shared_system_prompt(self, settings: DatasetSettings) -> str:
        return QA_SYSTEM

    def draw(self, rng: random.Random) -> Callable[[], GuessNumberEnv]:
        number = rng.randint(1, self.highest)
        return partial(GuessNumberEnv, number, self.highest, self.max_turns, self.list_numbers)

    async def make_env_maker(self) -> EnvMaker:
        return lambda renderer, rng: self.draw(rng)


@chz.chz(typecheck=True)
class CLIConfig(GameConfig, max_steps=16, groups_per_batch=16):
    """Keys of `python -m recipes.guess_number`."""

    env: GuessNumber = chz.field(default_factory=GuessNumber, doc="the game")


async def main(cli: CLIConfig) -> RunSummary | None:
    cli = for_model(cli)

    async def careless_game(renderer: Renderer, rng: random.Random) -> list[Message]:
        return await demonstrate(cli.env.draw(rng)(), partial(careless_guess, cli.env.highest, rng))

    metrics = ["reward/total", "correct", "closeness", "sensible_guess", "valid_guess"]
    return await play_or_train(cli, RECIPE, dataset_of(cli, cli.env), careless_game, metrics)


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
