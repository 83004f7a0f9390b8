"""Multi-turn environments from a class that returns only the new messages.

    class Guess:
        def __init__(self, rng, highest=9):
            self.number = rng.randint(1, highest)
            self.opening = f"I think of a number from 1 to {highest}."

        def step(self, message):
            return 1.0 if message["content"] == str(self.number) else "No. Guess again."

Each episode is played by a fresh object. The library stores the conversation: earlier turns stay in the prompt as the
sampled tokens, and only the new messages are rendered.
"""

import copy
import inspect
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any, TypeAlias, get_type_hints

from tinker_cookbook.env.arguments import arguments_called, check_type
from tinker_cookbook.env.dataset import DatasetSettings, Environment, EnvMaker, Episodes
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Message, Renderer
from tinker_cookbook.rl.message_env import MessageEnv, MessageStepResult
from tinker_cookbook.rl.rollout_limits import RolloutLimits
from tinker_cookbook.rl.types import Logs, Metrics
from tinker_cookbook.utils.misc_utils import resolved
from tinker_cookbook.utils.narrowing import is_list_or_tuple, is_mapping, is_tuple
from tinker_cookbook.utils.reward_threads import call_reward

NewMessages: TypeAlias = str | Message | Sequence[Message]
"""A text is a user message."""

MAX_TURNS = 10
"""Default number of replies per episode."""


@dataclass(frozen=True)
class TurnResult:
    """The result of a reply, if a number or new messages cannot express it."""

    messages: NewMessages = ()
    """messages that follow the reply"""
    reward: float = 0.0
    """reward of this turn"""
    done: bool | None = None
    """whether the episode ends here; None: if there are no new messages"""
    metrics: Metrics = field(default_factory=Metrics)
    logs: Logs = field(default_factory=Logs)


def multi_turn_env(episode: type, *, max_turns: int | None = None, **env_args: Any) -> Environment:
    """Episodes played by objects of a class.

    Args:
        episode: has `step(message)`, plain or async, which takes the policy's reply and returns what is new: messages
            (a text, a message or a list of them) for the next turn, a number, which is the reward and ends the
            episode, a pair (messages, reward), or a TurnResult. It also has `opening`: such messages, or a method that
            returns them. If its constructor has an argument `rng`, it gets a random.Random, the same for all members
            of a group, for whatever differs between groups. A MessageEnv works too.
        max_turns: replies per episode; the episode then ends with its rewards so far. None: the class's attribute
            `max_turns`, or else MAX_TURNS.
        env_args: more arguments for the constructor.

    Raises:
        ConfigurationError: the constructor takes other arguments, or values of other types.
    """
    with arguments_called(""):
        return episodes_of(episode, env_args, max_turns)


def episodes_of(episode: type, env_args: dict[str, Any], max_turns: int | None = None) -> Environment:
    """Like `multi_turn_env`; errors name an argument as `env_args.x`."""
    check_arguments(episode, env_args, filled=("rng",))
    turns = max_turns if max_turns is not None else getattr(episode, "max_turns", MAX_TURNS)
    RolloutLimits(max_turns=turns)
    return MultiTurn(episode, env_args, turns)


def check_arguments(function: Callable[..., Any], given: Mapping[str, Any], filled: Sequence[str] = ()) -> None:
    """Check that a class or function takes these keywords, `env_args.x` in errors, and optionally those of `filled`.

    Raises ConfigurationError for unknown or missing arguments, and for values of the wrong type.
    """
    name, signature = getattr(function, "__name__", type(function).__name__), inspect.signature(function)
    named = [p.name for p in signature.parameters.values() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    accepted = ", ".join(f"env_args.{key}" for key in named if key not in filled) or "no arguments"
    if drawn := [key for key in filled if key in given and key in named]:
        raise ConfigurationError(f"env_args.{drawn[0]}: {name} is given one for each episode; leave it out")
    try:
        signature.bind(**given, **{key: None for key in filled if key in signature.parameters})
    except TypeError as error:
        unknown = next((f"env_args.{key}: " for key in given if key not in named), "")
        raise ConfigurationError(f"{unknown}{name}{signature}: {error}; it takes {accepted}") from None
    try:
        hints = get_type_hints(function.__init__ if isinstance(function, type) else function)
    except (NameError, TypeError):
        return  # annotations that only a type checker can read, or an object without signature (a partial)
    for key, value in given.items():
        if key in hints:
            check_type(name, key, value, hints[key])


@dataclass(frozen=True)
class MultiTurn(Episodes):
    """Episodes played by objects of a class; see `multi_turn_env`."""

    episode: type
    env_args: dict[str, Any]
    """arguments of its constructor, besides rng"""
    max_turns: int

    @property
    def dataset_name(self) -> str:
        return self.episode.__name__

    def env_options(self) -> dict[str, Any]:
        return {"rollout_limits": RolloutLimits(max_turns=self.max_turns)}

    async def make_env_maker(self) -> EnvMaker:
        def make_env(renderer: Renderer, rng: random.Random) -> Callable[[], MessageEnv]:
            return partial(make_episode, self.episode, self.env_args, rng.getrandbits(64))

        return make_env

    def check(self, settings: DatasetSettings) -> None:
        """Make one episode. Raises ConfigurationError if it does not follow `multi_turn_env`."""
        before = random.getstate()
        openings = [self._opening(make_episode(self.episode, self.env_args, 0)) for _ in range(2)]
        if random.getstate() != before or openings[0] != openings[1]:
            raise ConfigurationError(
                f"{self.episode.__name__} draws from something else than `rng`, so that members of a group would get "
                "different episodes; take an argument `rng` in __init__, a random.Random, and draw from it"
            )

    def _opening(self, env: MessageEnv) -> list[Message] | None:
        """The opening, if it is known without an event loop."""
        if not isinstance(env, EpisodeEnv) or inspect.iscoroutinefunction(opening := env.episode.opening):
            return None
        return env.read_opening(opening() if callable(opening) else opening)


def make_episode(episode: type, env_args: Mapping[str, Any], seed: int) -> MessageEnv:
    """A fresh episode; the same seed draws the same episode.

    Raises ConfigurationError for an object without an opening.
    """
    drawn = {"rng": random.Random(seed)} if "rng" in inspect.signature(episode).parameters else {}
    made = episode(**drawn, **env_args)
    if isinstance(made, MessageEnv):
        return made
    if not hasattr(made, "opening"):
        raise ConfigurationError(
            f"{episode.__name__} has no `opening`: set it to the first message, or define a method that returns it"
        )
    return EpisodeEnv(made)


class EpisodeEnv(MessageEnv):
    """Stores the conversation for an object that returns only new messages."""

    def __init__(self, episode: Any):
        self.episode = episode
        self.messages: list[Message] = []

    async def initial_observation(self) -> list[Message]:
        opening = self.episode.opening
        self.messages = self.read_opening(await resolved(opening() if callable(opening) else opening))
        return list(self.messages)

    def read_opening(self, opening: Any) -> list[Message]:
        """The messages of an opening, at least one. Raises ConfigurationError for anything else."""
        messages = _messages(opening)
        if not messages:
            raise self._error("opening", opening, "a text, a message or a list of messages, at least one")
        return messages

    async def step(self, message: Message) -> MessageStepResult:
        # A copy: the conversation keeps the original reply, whatever the episode does to the message.
        returned = await call_reward(self.episode.step, copy.deepcopy(message))
        result = self._read(returned)
        new = _messages(result.messages)
        if new is None:
            raise self._error("TurnResult.messages", result.messages, "a text, a message or a list of messages")
        self.messages += [message, *new]
        done = not new if result.done is None else result.done
        if not math.isfinite(result.reward):
            raise self._error("step", result.reward, "a finite reward")
        return MessageStepResult(
            float(result.reward), done, list(self.messages), dict(result.metrics), dict(result.logs)
        )

    async def add_messages(self, messages: list[Message]) -> list[Message]:
        self.messages += messages
        return list(self.messages)

    def _read(self, returned: Any) -> TurnResult:
        if isinstance(returned, TurnResult):
            return returned
        if isinstance(returned, Real):
            return TurnResult(reward=float(returned), done=True)
        if is_tuple(returned) and len(returned) == 2 and isinstance(returned[1], Real):
            messages = _messages(returned[0])
            if messages:
                return TurnResult(messages, float(returned[1]))
        elif messages := _messages(returned):
            return TurnResult(messages)
        raise self._error("step", returned, "new messages, a number (the reward), (messages, reward) or a TurnResult")

    def _error(self, what: str, got: Any, wanted: str) -> ConfigurationError:
        return ConfigurationError(f"{type(self.episode).__name__}: {what} gave {got!r:.200}; it gives {wanted}")


def _messages(value: Any) -> list[Message] | None:
    """New messages as a list; None if they are not messages."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if isinstance(value, Mapping):
        value = [value]
    if not is_list_or_tuple(value):
        return None
    if not all(is_mapping(message) and {"role", "content"} <= message.keys() for message in value):
        return None
    return copy.deepcopy(list(value))
