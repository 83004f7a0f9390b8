"""Twenty questions: the policy asks, an answerer says yes or no, and a right guess ends the game.

The default answerer is a script that knows the attributes of eight things (example_data/twenty_questions); answerer=lm asks a
frozen model instead. With the shipped model this is a small game: four questions, and each answer lists what is still
possible. A supervised stage shows it the form of a question, by a careless player; what it learns from the reward is to
ask what narrows the list down and to name what is still on it. It does not learn to reason about things.

    python -m recipes.twenty_questions
    python -m recipes.twenty_questions model_name=Qwen/Qwen3-4B-Instruct-2507 answerer=lm max_turns=20 list_objects=False
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

from recipes.common import prompt_room, resolve_model, train_config
from recipes.warm_up import WarmUpConfig, demonstrate, warm_up
from tinker_cookbook import backends
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.completers import MessageCompleter, TinkerMessageCompleter
from tinker_cookbook.exceptions import ConfigurationError, DataFormatError
from tinker_cookbook.model_info import get_recommended_renderer_name
from tinker_cookbook.renderers import Message, Renderer, get_renderer, get_text_content
from tinker_cookbook.rl import train
from tinker_cookbook.rl.message_env import MessageEnv, MessageStepResult
from tinker_cookbook.rl.message_groups import EnvMaker, MessageDatasetBuilder
from tinker_cookbook.rl.play_w_env import play_episode
from tinker_cookbook.rl.types import Metrics
from tinker_cookbook.runs.files import read_jsonl
from tinker_cookbook.runs.outcome import print_rl_changes
from tinker_cookbook.tasks.datasets import EXAMPLE_DATA
from tinker_cookbook.tokenizer_utils import get_tokenizer

RECIPE = "twenty_questions"
OBJECTS = EXAMPLE_DATA / "twenty_questions" / "objects.jsonl"
WASTE = 0.2
"""What a question costs that is none, or whose answer could be known."""
WIN = 0.5
_QUESTION = re.compile(r"Is it (.{1,80})\?")

Answerer = Callable[[str, str], Awaitable[bool | None]]
"""Object and question to yes, no, or None for a question that it cannot answer."""


@dataclass(frozen=True)
class Things:
    """Objects by name, each with the attributes that are true of it."""

    attributes: dict[str, frozenset[str]]

    @classmethod
    def read(cls, path: Path = OBJECTS) -> "Things":
        attributes = {}
        for number, row in enumerate(read_jsonl(path), start=1):
            if not isinstance(row.get("object"), str) or not isinstance(row.get("attributes"), list):
                raise DataFormatError(f'{path}:{number}: expected {{"object": "...", "attributes": ["...", ...]}}')
            attributes[row["object"]] = frozenset(row["attributes"])
        return cls(attributes)

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
    """Knows the attributes and nothing else."""

    things: Things

    async def __call__(self, name: str, question: str) -> bool | None:
        return self.things.holds(name, question)


@dataclass(frozen=True)
class LMAnswerer:
    """Asks a frozen model. A reply that begins with neither yes nor no is no answer."""

    completer: MessageCompleter

    async def __call__(self, name: str, question: str) -> bool | None:
        request = f"We play twenty questions, and the thing is: {name}. Is it {question}? Answer yes or no."
        reply = get_text_content(await self.completer([{"role": "user", "content": request}])).strip().lower()
        return True if reply.startswith("yes") else False if reply.startswith("no") else None


class TwentyQuestionsEnv(MessageEnv):
    """One thing to find with at most `max_turns` questions of the form "Is it ...?".

    A win is worth WIN. A question is worth the share of the uncertainty that it may be expected to remove by what is still
    possible: for half of 8 things log 2 / log 8, whatever the answer, so that luck counts little. One that is not
    understood, or whose answer is known, costs WASTE.

    Args:
        list_objects: each answer lists the things that are still possible, by what the script knows of them.
    """

    def __init__(self, name: str, things: Things, answerer: Answerer, max_turns: int, list_objects: bool):
        self.name, self.things, self.answerer = name, things, answerer
        self.max_turns, self.list_objects = max_turns, list_objects
        self.possible = things.names
        self.messages: list[Message] = []
        self.turns = 0

    async def initial_observation(self) -> list[Message]:
        rules = f"Find my thing. Ask: Is it ...? It may be {', '.join(self.things.known)}.{self.left()}"
        self.messages = [{"role": "user", "content": rules}]
        return list(self.messages)

    async def step(self, message: Message) -> MessageStepResult:
        self.turns += 1
        match = _QUESTION.fullmatch(get_text_content(message).strip())
        question = match.group(1) if match else ""
        won = question == self.name
        answer = True if won else await self.answerer(self.name, question) if question else None
        information = self.information(question) if answer is not None else 0.0
        useful = won or information > 0
        if answer is not None:
            self.narrow(question, answer)
        done = won or self.turns == self.max_turns
        reward = WIN * won + (information if useful else -WASTE)
        metrics: Metrics = {"well_formed": float(answer is not None), "useful": float(useful)}
        if done:
            metrics |= {"won": float(won), "left": len(self.possible)}
        self.messages += [message, {"role": "user", "content": "You win!" if won else self.reply(answer)}]
        return MessageStepResult(reward, done, list(self.messages), metrics, {"thing": self.name, "question": question})

    def information(self, question: str) -> float:
        """Expected fall of the entropy over what is possible, in units of the entropy at the beginning."""
        n = len(self.possible)
        yes = sum(bool(self.things.holds(thing, question)) for thing in self.possible)
        rest = sum(k / n * math.log(k) for k in (yes, n - yes) if k > 0)
        return (math.log(n) - rest) / math.log(len(self.things.names))

    def narrow(self, question: str, answer: bool) -> None:
        """Keep what the script finds possible; an answer that contradicts it in everything (answerer=lm) narrows nothing."""
        fitting = [thing for thing in self.possible if self.things.holds(thing, question) in (answer, None)]
        self.possible = fitting or self.possible

    def reply(self, answer: bool | None) -> str:
        said = {True: "Yes.", False: "No.", None: "I do not understand. Ask: Is it ...?"}[answer]
        return said + self.left()

    def left(self) -> str:
        return f" Left: {', '.join(self.possible)}." if self.list_objects else ""


def careless_question(things: Things, rng: random.Random, messages: list[Message]) -> Message:
    """A player that knows the form, and that half of the time does not look at what is still possible."""
    left = get_text_content(messages[-1]).partition("Left: ")[2].removesuffix(".").split(", ")
    names = left if rng.random() < 0.5 and left != [""] else things.names
    what = rng.choice(things.known if rng.random() < 0.4 else names)
    return {"role": "assistant", "content": f"Is it {what}?"}


@chz.chz(typecheck=True)
class TwentyQuestionsDatasetBuilder(MessageDatasetBuilder):
    """Games about things drawn evenly from the list."""

    max_turns: int = chz.field(doc="questions per game")
    list_objects: bool = chz.field(doc="answers list what is still possible")
    answerer_model: str | None = chz.field(doc="model that answers; None: the script")
    backend: str | None = chz.field(doc="where that model runs")
    base_url: str | None = chz.field(doc="its server")

    @property
    def dataset_name(self) -> str:
        return RECIPE

    async def make_answerer(self, things: Things) -> Answerer:
        """The script, or one frozen snapshot of the model, made here."""
        if self.answerer_model is None:
            return ScriptedAnswerer(things)
        service = backends.create_service_client(self.backend, self.base_url)
        client = await service.create_sampling_client(base_model=self.answerer_model)
        name = get_recommended_renderer_name(self.answerer_model)
        renderer = get_renderer(name, get_tokenizer(self.answerer_model), model_name=self.answerer_model)
        return LMAnswerer(TinkerMessageCompleter(client, renderer, max_tokens=8, temperature=0.0))

    async def make_env_maker(self) -> EnvMaker:
        things = Things.read()
        answerer = await self.make_answerer(things)

        def make_env(renderer: Renderer, rng: random.Random) -> Callable[[], TwentyQuestionsEnv]:
            name = rng.choice(things.names)
            return partial(TwentyQuestionsEnv, name, things, answerer, self.max_turns, self.list_objects)

        return make_env

    def env_options(self) -> dict[str, Any]:
        # A reply without an end must not pay: it costs more than wasting every question.
        return {"context_overflow_reward": -1.0 - WASTE * self.max_turns}


@chz.chz(typecheck=True)
class CLIConfig(WarmUpConfig):
    """Keys of `python -m recipes.twenty_questions`."""

    answerer: Literal["script", "lm"] = chz.field(default="script", doc="script, or lm (a frozen model)")
    answerer_model: str | None = chz.field(
        default=None, doc="model of an lm answerer; default: the policy's base model"
    )
    list_objects: bool = chz.field(default=True, doc="answers list what is still possible, by what the script knows")
    max_turns: int = chz.field(default=4, doc="questions per game", validator=chz.validators.gt(0))
    max_steps: int = chz.field(default=14, doc="number of batches", validator=chz.validators.gt(0))
    groups_per_batch: int = chz.field(default=8, doc="things per step", validator=chz.validators.gt(0))
    group_size: int = chz.field(default=8, doc="games per thing", validator=chz.validators.gt(1))
    num_test: int = chz.field(default=48, doc="games of an evaluation", validator=chz.validators.gt(0))
    play: bool = chz.field(default=False, doc="play a game yourself in the terminal; no model is loaded")


def make_dataset_builder(cli: CLIConfig) -> TwentyQuestionsDatasetBuilder:
    """The episodes. Raises ConfigurationError for whatever can be wrong before a model is loaded."""
    model, renderer_name = resolve_model(cli)
    answerer = None
    if cli.answerer == "lm":
        answerer, _ = resolve_model(chz.replace(cli, model_name=cli.answerer_model or cli.model_name))
    elif cli.answerer_model is not None:
        raise ConfigurationError(f"answerer_model={cli.answerer_model!r} is of no use with answerer=script; drop it")
    return TwentyQuestionsDatasetBuilder(
        model_name=model,
        renderer_name=renderer_name,
        groups_per_batch=cli.groups_per_batch,
        group_size=cli.group_size,
        num_batches=cli.max_steps,
        num_test=cli.num_test,
        seed=cli.seed,
        max_prompt_tokens=prompt_room(cli, model),
        max_turns=cli.max_turns,
        list_objects=cli.list_objects,
        answerer_model=answerer,
        backend=cli.backend,
        base_url=cli.base_url,
    )


def build_config(cli: CLIConfig, episodes: TwentyQuestionsDatasetBuilder) -> train.Config:
    """The run's full config, checked; its folder is settled last."""
    return train_config(
        cli, RECIPE, episodes.model_name, episodes, [cli.answerer, f"{cli.groups_per_batch}x{cli.group_size}"]
    )


async def main(cli: CLIConfig) -> None:
    episodes = make_dataset_builder(cli)
    if cli.play:
        await play_episode(episodes, get_tokenizer(episodes.model_name))
        return
    config = build_config(cli, episodes)
    things = Things.read()

    async def careless_game(renderer: Renderer, rng: random.Random) -> list[Message]:
        thing, answerer = rng.choice(things.names), ScriptedAnswerer(things)
        game = TwentyQuestionsEnv(thing, things, answerer, cli.max_turns, cli.list_objects)
        return await demonstrate(game, partial(careless_question, things, rng))

    config = await warm_up(cli, config, episodes, careless_game)
    await train.main(config)
    print_rl_changes(config.log_path, ["reward/total", "won", "left", "useful", "well_formed"])


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
