"""Groups for the objects of `load_environment`: replies to a row of its dataset, or its episodes."""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from tinker_cookbook.data.epochs import Epochs, ShuffledItems
from tinker_cookbook.env.contract import (
    EnvContext,
    Questions,
    build_arguments,
    form_of,
    is_prompt,
    missing_parts,
    prompt_messages,
)
from tinker_cookbook.env.episodes import EpisodeEnv, TurnResult
from tinker_cookbook.env.packages import load_environment
from tinker_cookbook.env.rewards import finite_number
from tinker_cookbook.env.verifiers.stand_in import verifiers_stands_in
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.plugin_errors import plugin_errors
from tinker_cookbook.renderers import Message, Renderer, get_text_content
from tinker_cookbook.renderers.datum_text import to_ints
from tinker_cookbook.rl.message_env import EnvFromMessageEnv, MessageEnv
from tinker_cookbook.rl.message_groups import MessageGroupBuilder
from tinker_cookbook.rl.problem_env import OneTurnEnv, OneTurnGroupBuilder, Reply
from tinker_cookbook.rl.run_clients import RunClients, Shared
from tinker_cookbook.rl.shared_prompt import SharedPrompt
from tinker_cookbook.rl.types import Action, ActionExtra, Env, Metrics, StepResult, Trajectory
from tinker_cookbook.utils.misc_utils import resolved
from tinker_cookbook.utils.narrowing import is_mapping
from tinker_cookbook.utils.reward_threads import call_reward


class RubricEnv(OneTurnEnv):
    """One row of a dataset; its rubric scores the reply.

    Attributes:
        fields: values that the functions of the rubric may take.
    """

    def __init__(
        self,
        questions: Questions,
        row: Mapping[str, Any],
        renderer: Renderer,
        info: dict[str, Any],
        max_prompt_tokens: int | None = None,
    ):
        super().__init__(renderer)
        self._questions, self._row, self.max_prompt_tokens = questions, row, max_prompt_tokens
        self.instance_id = None if row.get("id") is None else str(row["id"])
        self.fields: dict[str, Any] = {
            "prompt": self.get_messages(),
            "completion": [],
            "answer": row.get("answer"),
            "task": row.get("task", "default"),
            "state": {},
            "info": info,
        }

    def get_messages(self) -> list[Message]:
        return self._questions.messages(self._row)

    def get_reference_answer(self) -> str | None:
        answer = self._row.get("answer")
        return None if answer is None else str(answer)

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        prompt = self.renderer.build_generation_prompt(self.get_messages())
        self.fields["state"] |= {"prompt_tokens": to_ints(prompt), "completion_tokens": list(action)}
        return await super().step(action, extra=extra)

    async def score_reply(self, reply: Reply) -> tuple[float, Metrics]:
        self.fields["completion"] = [{"role": "assistant", "content": reply.text}]
        self.fields["state"]["stopped"] = reply.stopped
        reward, metrics = await self._questions.scoring.score(self.fields)
        return reward, {**metrics, "stopped": float(reply.stopped), "context_overflow": 0.0}


@dataclass(frozen=True)
class RubricGroupBuilder(OneTurnGroupBuilder):
    """Replies to one row. `env_thunk` is called with the member's `info`."""

    env_thunk: Callable[..., RubricEnv]
    questions: Questions = field(kw_only=True)
    row: Mapping[str, Any] = field(kw_only=True)
    renderer: Renderer = field(kw_only=True)
    clients: RunClients | None = field(default=None, kw_only=True)

    def with_clients(self, clients: RunClients) -> Self:
        return replace(self, clients=clients)

    async def make_envs(self) -> Sequence[RubricEnv]:
        context, prompt = EnvContext(self.clients, self.renderer), SharedPrompt()
        context.check_needs(self.questions.needs, self.dataset_name)
        envs = [self.env_thunk(info=context.info(self.row)) for _ in range(self.num_envs)]
        for env in envs:
            env.shared_prompt = prompt
        return envs

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        if not self.questions.scoring.of_group:
            return await super().compute_group_rewards(trajectory_group, env_group)
        answered = [env for env in env_group if isinstance(env, RubricEnv) and env.reply is not None]
        scores = iter(await self.questions.scoring.score_group([env.fields for env in answered]))
        return [next(scores) if env in answered else (0.0, {}) for env in env_group]


class StepsEpisode:
    """An object with initial_observation and step, in the form of a `episodes.EpisodeEnv` episode."""

    def __init__(self, env: Any, info: dict[str, Any], name: str):
        self._env, self._info, self._name = env, info, name
        self._takes_info = "info" in inspect.signature(env.step).parameters

    async def opening(self) -> Any:
        """The first messages. Raises ConfigurationError if the members of the group begin with different messages."""
        shown = await resolved(self._env.initial_observation())
        if not is_prompt(shown):
            raise ConfigurationError(
                f"{self._name}: initial_observation gave {shown!r:.200}; it gives a text or messages"
            )
        first = await self._info["group"].once(("initial_observation", self._name), _value(copy.deepcopy(shown)))
        if first != shown:
            raise ConfigurationError(
                f"{self._name}: members of a group were shown different first observations, {first!r:.120} and {shown!r:.120}, "
                "so that their rewards cannot be compared; let load_environment take `rng`, a random.Random that is the same "
                "for all of them, and draw from nothing else"
            )
        return prompt_messages(shown)

    async def step(self, message: Message) -> TurnResult:
        text = get_text_content(message)
        with plugin_errors(f"step of {self._name}", self._env.step, {"action_text": text}):
            result = await call_reward(self._step, text)
        return read_step(result, f"{self._name}: step")

    def _step(self, text: str) -> Any:
        return self._env.step(text, info=self._info) if self._takes_info else self._env.step(text)


def _value(value: Any) -> Callable[[], Any]:
    async def give() -> Any:
        return value

    return give


def steps_env(name: str, episode: Any, info: dict[str, Any]) -> MessageEnv:
    """The env for one member's object."""
    return EpisodeEnv(StepsEpisode(episode, info, name))


def read_step(result: Any, what: str) -> TurnResult:
    """Read the result of a step: a number, or an object or mapping with reward and, while the episode continues, the
    next observation.

    The episode ends if there is no next observation (`next_observation` or `observation`, a text or messages), or when
    `done` or `episode_done` says so. `metrics` is a mapping of numbers. Raises DataValidationError for anything else.
    """
    has: Callable[[str], Any] = result.get if is_mapping(result) else lambda name: getattr(result, name, None)
    reward = has("reward")
    if reward is None:
        if is_mapping(result) or not isinstance(result, int | float):
            raise DataValidationError(f"{what} gave {result!r:.200}; it gives an object or mapping with a reward")
        reward = result
    shown = has("next_observation") if has("next_observation") is not None else has("observation")
    done = has("done") if has("done") is not None else has("episode_done")
    goes_on = shown is not None and shown != "" if done is None else not done
    if goes_on and not is_prompt(shown):
        raise DataValidationError(
            f"{what} is not done, and its next observation is {shown!r:.200}; it is a text or messages"
        )
    given: Mapping[str, Any] = has("metrics") or {}
    metrics = {key: finite_number(value, f"{what}: metrics[{key!r}]") for key, value in given.items()}
    messages = prompt_messages(shown) if goes_on else []
    return TurnResult(messages, finite_number(reward, f"{what}: reward"), done=not goes_on, metrics=metrics)


class LoadedOnce:
    """One object for all episodes; each member plays a copy of its initial state."""

    def __init__(self, loaded: Any, owner: str):
        self._loaded, self._owner = loaded, owner

    async def episodes(self, count: int, number: int, seed: int, context: EnvContext) -> list[Any]:
        """Fresh objects for the members of group `number`, which has this seed."""
        return [copy_for_member(self._loaded, self._owner, context) for _ in range(count)]


class LoadedPerGroup:
    """Calls `load_environment(rng=..., **args)` for each member, with the same random numbers within a group."""

    def __init__(self, load: Callable[..., Any], args: Mapping[str, Any], owner: str):
        self._load, self._args, self._owner = load, dict(args), owner

    async def episodes(self, count: int, number: int, seed: int, context: EnvContext) -> list[Any]:
        with verifiers_stands_in(load_environment):
            return [self._load(**self._args, rng=random.Random(seed)) for _ in range(count)]


class BuiltWithClients:
    """The list that `build` returns for a snapshot; groups go through it for several epochs, each in a different order."""

    def __init__(self, loaded: Any, needs: tuple[str, ...], owner: str, seed: int):
        self._loaded, self._needs, self._owner, self._seed = loaded, needs, owner, seed
        self._built: tuple[Any, Shared] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_built": None}  # the built object depends on clients of this process

    async def episodes(self, count: int, number: int, seed: int, context: EnvContext) -> list[Any]:
        context.check_needs(self._needs, self._owner)
        clients = context.clients
        assert clients is not None
        if self._built is None or self._built[0] is not clients.sampling_client:
            self._built = clients.sampling_client, Shared()
        envs = await self._built[1].once("build", lambda: self._build(clients))
        chosen = Epochs(ShuffledItems(envs), self._seed, "epoch").draw(number)
        return [copy_for_member(chosen, self._owner, context) for _ in range(count)]

    async def _build(self, clients: RunClients) -> list[Any]:
        build = self._loaded.build
        envs = list(await resolved(build(clients.sampling_client, **build_arguments(build, clients))))
        if not envs:
            raise ConfigurationError(f"{self._owner}.build gave no environments")
        for i, env in enumerate(envs):
            if form_of(env) != "episodes":
                raise ConfigurationError(
                    f"{self._owner}.build()[{i}]: {missing_parts(env)}; build gives objects with initial_observation and step"
                )
        return envs


def copy_for_member(env: Any, owner: str, context: EnvContext | None = None) -> Any:
    """A copy for one member, which shares clients, tokenizer and renderer with the other members.

    Raises ConfigurationError for an object that cannot be copied.
    """
    kept: list[Any] = []
    if context is not None:
        clients = vars(context.clients).values() if context.clients is not None else ()
        kept = [client for client in (*clients, context.renderer, context.renderer.tokenizer) if client is not None]
    try:
        return copy.deepcopy(env, {id(client): client for client in kept})
    except Exception as error:  # any error of an object with a lock, a file or a connection
        raise ConfigurationError(
            f"{owner}: {type(env).__name__} cannot be copied for the members of a group ({type(error).__name__}: {error}); "
            "define __deepcopy__, or keep what cannot be copied outside of it"
        ) from error


@dataclass(frozen=True)
class StepsGroupBuilder(MessageGroupBuilder):
    """`num_envs` attempts at one episode of `source`. `env_thunk` is called with a member's object and its `info`."""

    env_thunk: Callable[..., MessageEnv]
    source: LoadedOnce | LoadedPerGroup | BuiltWithClients = field(kw_only=True)
    needs: tuple[str, ...] = field(default=(), kw_only=True)
    number: int = field(kw_only=True)
    seed: int = field(kw_only=True)
    clients: RunClients | None = field(default=None, kw_only=True)

    def with_clients(self, clients: RunClients) -> Self:
        return replace(self, clients=clients)

    async def make_envs(self) -> Sequence[EnvFromMessageEnv]:
        context, prompt = EnvContext(self.clients, self.renderer), SharedPrompt()
        context.check_needs(self.needs, self.dataset_name)
        episodes = await self.source.episodes(self.num_envs, self.number, self.seed, context)
        envs: list[EnvFromMessageEnv] = []
        for episode in episodes:
            env = EnvFromMessageEnv(self.renderer, self.env_thunk(episode, context.info()), **self.options)
            env.shared_prompt = prompt
            envs.append(env)
        return envs
