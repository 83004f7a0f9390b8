"""Twenty questions: the policy asks, an answerer says yes or no, and naming a thing ends the game.

The default answerer is a script that knows the attributes of eight things (example_data/twenty_questions); answerer=lm
uses a frozen model instead. For the shipped model the game is small: four things are drawn, one of them is the target,
each answer lists what is still open (attributes that distinguish the possible things, then these things), and naming a
wrong thing loses. A supervised stage teaches the form and how to copy a name from the list, from a player that names
things too early and asks questions with known answers. Reinforcement learning teaches it to narrow the list down
before naming a thing (reward/total, left). It still often names one of two, so the fraction of games won rises less,
depending on the seed. It does not learn facts about the things: every game lists the attributes, and every answer says
what it excludes.

    python -m recipes.twenty_questions
    python -m recipes.twenty_questions model_name=Qwen/Qwen3-4B-Instruct-2507 env.num_things=8 env.answerer=lm
    python -m recipes.twenty_questions play=True
"""

import math
import random
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import chz

from recipes.common import for_model
from recipes.rl_common import dataset_of
from recipes.warm_up import GENTLE_RATES, GameConfig, demonstrate, play_or_train
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.completers import MessageCompleter, TinkerMessageCompleter
from tinker_cookbook.data.rows import Row, read_file
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.env.dataset import DatasetSettings, EnvMaker, Episodes, Groups
from tinker_cookbook.exceptions import ConfigurationError, DataFormatError
from tinker_cookbook.field_groups import TurnLimit
from tinker_cookbook.renderers import Message, Renderer, get_text_content
from tinker_cookbook.rl.message_env import MessageEnv, MessageStepResult
from tinker_cookbook.rl.types import Metrics
from tinker_cookbook.runs.outcome import RunSummary
from tinker_cookbook.utils.fields import docs
from tinker_cookbook.weights_config import WeightsConfig

RECIPE = "twenty_questions"
OBJECTS = EXAMPLE_DATA / "twenty_questions" / "objects.jsonl"
WASTE = 0.2
"""Cost of a question that is not one, or whose answer is already known."""
WIN = 1.0
TINY_STEPS = 150
"""Supervised steps, after which the shipped model names things from the list."""
_QUESTION = re.compile(r"Is it (.{1,80})\?")

Answerer = Callable[[str, str], Awaitable[bool | None]]
"""Object and question to yes, no, or None for a question that it cannot answer."""


def _thing(row: Row) -> tuple[str, frozenset[str]]:
    name, attributes = row.content.get("object"), row.content.get("attributes")
    if not isinstance(name, str) or not isinstance(attributes, list):
        raise DataFormatError(f"it has {sorted(row.content)}")
    return name, frozenset(attributes)


@dataclass(frozen=True)
class Things:
    """Objects by name, each with the attributes that are true of it."""

    attributes: dict[str, frozenset[str]]

    @classmethod
    def read(cls, path: Path = OBJECTS) -> "Things":
        return cls(dict(read_file(path, _thing, '{"object": "...", "attributes": ["...", ...]}')))

    @property
    def names(self) -> list[str]:
        return list(self.attributes)

    @property
    def known(self) -> list[str]:
        return sorted({attribute for attributes in self.attributes.values() for attribute in attributes})

    def holds(self, name: str, what: str) -> bool | None:
        """Whether `what`, an attribute or an object's name, is true of the object; None for anything else."""
        if what in self.attributes:
            return what == name
        return what in self.attributes[name] if what in self.known else None


@dataclass(frozen=True)
class ScriptedAnswerer:
    """The answerer that only knows the attributes."""

    things: Things

    async def __call__(self, name: str, question: str) -> bool | None:
        return self.things.holds(name, question)


@dataclass(frozen=True)
class LMAnswerer:
    """Asks a frozen model. A reply that begins with neither yes nor no counts as no answer."""

    completer: MessageCompleter

    async def __call__(self, name: str, question: str) -> bool | None:
        request = f"We play twenty questions, and the thing is: {name}. Is it {question}? Answer yes or no."
        reply = get_text_content(await self.completer([{"role": "user", "content": request}])).strip().lower()
        return True if reply.startswith("yes") else False if reply.startswith("no") else None


class TwentyQuestionsEnv(MessageEnv):
    """Find one of several things, with at most `max_turns` questions of the form "Is it ...?".

    Naming a thing ends the game: WIN if it is the right one, else 0. A question about an attribute earns the expected
    fraction of the uncertainty that it removes: for half of 4 things log 2 / log 4, whatever the answer, so that luck
    matters little; 0 if the script does not know the attribute (answerer=lm). A question that is not understood, or
    that has a known answer, costs WASTE.

    Args:
        among: the possible things, two or more for a game that needs questions.
        list_objects: each answer lists the remaining candidates, according to the script; otherwise only the first message
            does.
    """

    def __init__(
        self, name: str, among: list[str], things: Things, answerer: Answerer, max_turns: int, list_objects: bool
    ):
        self.name, self.among, self.things, self.answerer = name, among, things, answerer
        self.max_turns, self.list_objects = max_turns, list_objects
        self.possible = list(among)
        self.messages: list[Message] = []
        self.turns = 0

    async def initial_observation(self) -> list[Message]:
        self.messages = [{"role": "user", "content": f"Find my thing. Ask: Is it ...? {self.open_questions()}"}]
        return list(self.messages)

    async def step(self, message: Message) -> MessageStepResult:
        self.turns += 1
        match = _QUESTION.fullmatch(get_text_content(message).strip())
        question = match.group(1) if match else ""
        named, won = question in self.things.names, question == self.name
        answer = won if named else await self.answerer(self.name, question) if question else None
        reward = WIN * won if named else self.worth(question, answer)
        if answer is not None:
            self.narrow(question, answer)
        done = named or self.turns == self.max_turns
        metrics: Metrics = {
            "well_formed": float(answer is not None),
            "useful": float(won or (not named and reward > 0)),
        }
        if done:
            metrics |= {"won": float(won), "left": len(self.possible)}
        self.messages += [message, {"role": "user", "content": "You win!" if won else self.reply(answer)}]
        return MessageStepResult(reward, done, list(self.messages), metrics, {"thing": self.name, "question": question})

    def worth(self, question: str, answer: bool | None) -> float:
        """Reward of a question that does not name a thing."""
        if answer is not None and question not in self.things.known:
            return 0.0
        information = 0.0 if answer is None else self.information(question)
        return information if information > 0 else -WASTE

    def information(self, question: str) -> float:
        """Expected decrease of the entropy over the possible things, in units of the initial entropy."""
        n = len(self.possible)
        yes = sum(bool(self.things.holds(thing, question)) for thing in self.possible)
        if yes in (0, n):
            return 0.0
        rest = sum(k / n * math.log(k) for k in (yes, n - yes))
        return (math.log(n) - rest) / math.log(len(self.among))

    def narrow(self, question: str, answer: bool) -> None:
        """Keep what the script considers possible; an answer that contradicts it entirely (answerer=lm) narrows
        nothing.
        """
        fitting = [thing for thing in self.possible if self.things.holds(thing, question) in (answer, None)]
        self.possible = fitting or self.possible

    def reply(self, answer: bool | None) -> str:
        verdict = {True: "Yes.", False: "No.", None: "I do not understand. Ask: Is it ...?"}[answer]
        return f"{verdict} {self.open_questions()}" if self.list_objects else verdict

    def open_questions(self) -> str:
        """The attributes that only some of the possible things have, and the possible things."""
        splitting = [what for what in self.things.known if self.information(what) > 0]
        return f"Open: {', '.join(splitting + self.possible)}."


def careless_question(things: Things, rng: random.Random, messages: list[Message]) -> Message:
    """A player without a plan: it often names a thing too early, or asks a question with a known answer."""
    listed = get_text_content(messages[-1]).partition("Open: ")[2].removesuffix(".").split(", ")
    left = [what for what in listed if what in things.names]
    splitting = [what for what in listed if what in things.known]
    if rng.random() < (0.6 if splitting or not left else 0.1):
        what = rng.choice(splitting if splitting and rng.random() < 0.75 else things.known)
    else:
        what = left[-1] if left else rng.choice(things.names)
    return {"role": "assistant", "content": f"Is it {what}?"}


@chz.chz(typecheck=True)
class TwentyQuestions(TurnLimit, Episodes, max_turns=5):
    """Games about a few things drawn uniformly from the list."""

    DOCS = docs(max_turns="questions per game")

    num_things: int = chz.field(default=4, doc="candidates of a game, drawn for each", validator=chz.validators.gt(1))
    list_objects: bool = chz.field(default=True, doc="answers list the remaining candidates, according to the script")
    answerer: Literal["script", "lm"] = chz.field(default="script", doc="script, or lm (a frozen model)")
    answerer_weights: WeightsConfig = chz.field(
        default_factory=WeightsConfig, doc="the model of answerer=lm; default: the policy's base model"
    )

    @property
    def dataset_name(self) -> str:
        return RECIPE

    def check(self, settings: DatasetSettings) -> None:
        if self.num_things > (known := len(Things.read().names)):
            raise ConfigurationError(
                f"num_things={self.num_things}: there are {known} things; choose at most that many"
            )
        if self.answerer == "script" and self.answerer_weights != WeightsConfig():
            raise ConfigurationError("answerer_weights is unused with answerer=script; add answerer=lm, or drop it")

    async def groups(self, settings: DatasetSettings) -> Groups:
        if self.answerer == "script" or self.answerer_weights != WeightsConfig():
            return await super().groups(settings)
        of_policy = WeightsConfig(base_model=settings.model_name)
        return await Episodes.groups(chz.replace(self, answerer_weights=of_policy), settings)

    async def make_answerer(self, things: Things) -> Answerer:
        """The script, or one frozen snapshot of the model, opened here."""
        if self.answerer == "script":
            return ScriptedAnswerer(things)
        policy = await self.answerer_weights.open_policy("answerer_weights")
        completer = TinkerMessageCompleter(policy.sampling_client, policy.renderer, max_tokens=8, temperature=0.0)
        return LMAnswerer(completer)

    async def make_env_maker(self) -> EnvMaker:
        things = Things.read()
        answerer = await self.make_answerer(things)

        def make_env(renderer: Renderer, rng: random.Random) -> Callable[[], TwentyQuestionsEnv]:
            among = rng.sample(things.names, self.num_things)
            name = rng.choice(among)
            return partial(TwentyQuestionsEnv, name, among, things, answerer, self.max_turns, self.list_objects)

        return make_env

    def env_options(self) -> dict[str, Any]:
        # An unfinished reply must not pay: it costs more than wasting every question.
        return {"context_overflow_reward": -1.0 - WASTE * self.max_turns}


@chz.chz(typecheck=True)
class CLIConfig(GameConfig, rates=GENTLE_RATES, num_test=48):
    """Keys of `python -m recipes.twenty_questions`."""

    env: TwentyQuestions = chz.field(default_factory=TwentyQuestions, doc="the game")


async def main(cli: CLIConfig) -> RunSummary | None:
    cli = for_model(cli)
    env, things = cli.env, Things.read()
    if env.answerer == "lm" and env.answerer_weights == WeightsConfig():
        base = cli.fill(WeightsConfig, base_model=cli.model_name, load_checkpoint_path=None)
        env = chz.replace(env, answerer_weights=base)
    episodes = dataset_of(cli, env)

    async def careless_game(renderer: Renderer, rng: random.Random) -> list[Message]:
        # Half of the games begin with one thing left: short conversations, the fastest way to learn copying.
        among = rng.sample(things.names, 1 if rng.random() < 0.5 else env.num_things)
        answerer = ScriptedAnswerer(things)
        game = TwentyQuestionsEnv(rng.choice(among), among, things, answerer, env.max_turns, env.list_objects)
        return await demonstrate(game, partial(careless_question, things, rng))

    metrics = ["reward/total", "won", "left", "useful", "well_formed"]
    return await play_or_train(cli, RECIPE, episodes, careless_game, metrics, [env.answerer], TINY_STEPS)


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
