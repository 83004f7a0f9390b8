"""An environment of this library as a taskset of verifiers 0.4, for its commands and for other trainers of its
tasksets.

    # counting_taskset.py
    from tinker_cookbook.env.verifiers.served import InProcessHarness, ServedEnv, ServedTaskset

    __all__ = ["CountingTaskset", "InProcessHarness", "ServedEnv"]

    class CountingTaskset(ServedTaskset):
        environment = "counting"

verifiers makes the model calls. This library's rollout plays the environment, so the rewards equal those of our loops
for the same replies.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, ClassVar, Literal, TypeVar

import verifiers.v1 as vf

from tinker_cookbook.completers import StopCondition, TokenCompleter, TokensWithLogprobs
from tinker_cookbook.endpoints import as_openai
from tinker_cookbook.env.contract_groups import RubricGroupBuilder
from tinker_cookbook.env.dataset import DatasetSettings
from tinker_cookbook.env.registry import get_env
from tinker_cookbook.env.verifiers.in_process import InProcessHarness
from tinker_cookbook.env.verifiers.player import read_call
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Message, Renderer, get_renderer_of_model
from tinker_cookbook.renderers.replies import strip_stop
from tinker_cookbook.rl.item_dataset import GroupSource, ItemDataset, refuse_pool
from tinker_cookbook.rl.message_env import EnvFromMessageEnv
from tinker_cookbook.rl.problem_env import OneTurnEnv
from tinker_cookbook.rl.rollout_runner import RolloutHooks, RolloutState, run_rollout
from tinker_cookbook.rl.run_clients import clients_for
from tinker_cookbook.rl.types import (
    STOP_METRIC_PREFIX,
    Env,
    EnvGroupBuilder,
    Metrics,
    RLDataset,
    Trajectory,
    Transition,
)
from tinker_cookbook.utils.lazy import tinker

__all__ = ["InProcessHarness", "ServedConfig", "ServedEnv", "ServedTaskset"]

T = TypeVar("T")
ROLES = ("system", "user", "assistant", "tool")


class ServedConfig(vf.TasksetConfig):
    """Fields under `--env.taskset.*`."""

    env_args: dict[str, Any] = {}  # noqa: RUF012 (a pydantic field)
    """arguments of the environment"""
    model_name: str = ""
    """the model that plays, to use its sampled tokens unchanged (with a training client); empty: replies are
    read as text"""
    renderer_name: str | None = None
    """how messages become tokens; None: the model's own renderer"""
    split: Literal["train", "test"] = "train"
    num_tasks: int = 100
    """most tasks; of questions, each once"""
    seed: int = 0
    """seed of the order of questions and of the episodes"""


class ServedData(vf.TaskData):
    number: int
    """index of the group in the environment's dataset"""


class ServedTask(vf.Task[ServedData, vf.State, vf.TaskConfig]):
    """One question or episode; `ServedEnv` rewards it."""


class ServedTaskset(vf.Taskset[ServedTask, ServedConfig]):
    """The groups of an environment, one task each. A subclass sets `environment` to anything that `get_env` takes."""

    environment: ClassVar[Any] = None

    @cached_property
    def settings(self) -> DatasetSettings:
        config = self.config
        return DatasetSettings(
            model_name=config.model_name or "tiny_chat",
            renderer_name=config.renderer_name,
            groups_per_batch=1,
            group_size=1,
            num_batches=config.num_tasks,
            num_test=config.num_tasks,
            seed=config.seed,
        )

    @cached_property
    def renderer(self) -> Renderer:
        name, model = self.settings.renderer_name, self.settings.model_name
        assert name is not None
        return get_renderer_of_model(name, model)

    @cached_property
    def dataset(self) -> RLDataset:
        """Raises ConfigurationError: no environment is named, it is refused, or it has no such split."""
        if type(self).environment is None:
            raise ConfigurationError(f"{type(self).__name__}.environment is not set; name the environment there")
        # On the class, because a function would become a method of the object.
        builder = get_env(type(self).environment, self.config.env_args).build(self.settings)
        train, test = _finished(builder())
        dataset = train if self.config.split == "train" else test
        if dataset is None:
            raise ConfigurationError(f"{self.config.id}: the environment has no test tasks; leave out split=test")
        refuse_pool(dataset, self.config.id)
        return dataset

    @cached_property
    def groups(self) -> GroupSource:
        return GroupSource(self.dataset, self.config.id)

    def count(self) -> int:
        """How many tasks there are, without repeated questions."""
        count = self.groups.count_up_to(self.config.num_tasks)
        return min(count, self.dataset.num_items) if isinstance(self.dataset, ItemDataset) else count

    def group(self, number: int) -> EnvGroupBuilder:
        """A group with one member. Raises ConfigurationError for rewards that compare the members of a group."""
        group = self.groups.draw(number)
        if isinstance(group, RubricGroupBuilder) and (compared := group.questions.scoring.of_group):
            raise ConfigurationError(
                f"{self.config.id}: {compared[0].name} rewards a whole group, and verifiers plays each episode alone; it cannot "
                "be served"
            )
        return group

    def load(self) -> Iterator[ServedTask]:
        for number in range(self.count()):
            prompt = _finished(_opening(self.group(number)))
            yield ServedTask(ServedData(number=number, prompt=prompt), self.config.task)


class ServedEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(runtime={"type": "subprocess"})


class ServedEnv(vf.Env[ServedEnvConfig]):
    """Plays tasks of a ServedTaskset: this library's rollout calls the agent for each reply."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        taskset = self.taskset
        assert isinstance(taskset, ServedTaskset) and isinstance(task.data, ServedData)
        group = taskset.group(task.data.number)
        async with agents.agent.interaction(task) as talk:
            policy = _Agent(talk, taskset.renderer, bool(taskset.config.model_name))
            group = group.with_clients(clients_for(policy))
            try:
                env = policy.env = _one_env(await group.make_envs())
                trajectory = await _play(policy, env)
                [(final, metrics)] = await group.compute_group_rewards([trajectory], [env])
            finally:
                await group.cleanup()
        trace, turns = talk.trace, trajectory.transitions
        trace.record_reward("reward", sum(turn.reward for turn in turns) + final)
        trace.record_metrics(_named([*(turn.metrics for turn in turns), metrics]))


class _EndedError(Exception):
    """verifiers ended the rollout: a limit of the role, a stop of the task, a failure."""


class _Agent(TokenCompleter):
    """An agent of verifiers as a policy: each call returns its reply to the new messages of the environment."""

    def __init__(self, talk: Any, renderer: Renderer, reads_tokens: bool):
        self._talk, self._renderer, self._reads_tokens = talk, renderer, reads_tokens
        self._seen: list[Message] = []
        self.env: Env | None = None

    async def __call__(
        self, model_input: tinker.ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        if max_tokens is not None:
            raise ConfigurationError(
                f"the environment limits this reply to {max_tokens} tokens; verifiers has no such setting"
            )
        assert self.env is not None
        conversation = conversation_of(self.env)
        segment = await self._talk.turn(self._new(conversation))
        if segment.terminated:
            raise _EndedError
        reply = self._reply()
        self._seen = [*conversation, self._renderer.parse_response(reply.tokens)[0]]
        return reply

    def _new(self, conversation: list[Message]) -> list[dict[str, Any]] | None:
        """The messages that are new to the agent. None for the opening, which is the task's prompt."""
        if not self._seen:
            opened = [(message.role, message.content) for message in self._talk.trace.task.data.prompt]
            if opened != [(wired["role"], wired["content"]) for wired in map(_wire, conversation)]:
                raise ConfigurationError("the environment's opening differs from the one at loading")
            return None
        seen = len(self._seen)
        if conversation[: seen - 1] != self._seen[:-1]:
            raise ConfigurationError(
                "the environment changed earlier messages; verifiers can only append to a conversation"
            )
        return [_wire(message) for message in conversation[seen:]]

    def _reply(self) -> TokensWithLogprobs:
        """The last reply: as sampled, or its text encoded with the renderer."""
        trace = self._talk.trace
        node = next(node for node in reversed(trace.nodes) if node.sampled)
        cut = trace.calls[-1].finish_reason == "length"
        if self._reads_tokens:
            tokens = [token for token, sampled in zip(node.token_ids, node.mask, strict=True) if sampled]
            if not tokens:
                raise ConfigurationError(
                    "model_name is given, and the client reports no tokens; leave model_name out, or use a training client"
                )
        else:
            tokens = _written(self._renderer, node.message, cut)
        return TokensWithLogprobs(tokens, None, "length" if cut else "stop")


class _Turns(RolloutHooks):
    """Stores the turns so far, for a rollout that verifiers ends."""

    turns: list[Transition]

    async def on_turn_begin(self, state: RolloutState) -> list[Message] | None:
        self.turns = state.transitions
        return None


async def _play(policy: _Agent, env: Env) -> Trajectory:
    """Play a rollout. One that verifiers ends gets its rewards so far, without a grade, like one that our limits end."""
    hooks = _Turns()
    try:
        return await run_rollout(policy, env, hooks=hooks)
    except _EndedError:
        return Trajectory(hooks.turns, tinker.ModelInput.empty())


def conversation_of(env: Env) -> list[Message]:
    """The conversation so far. Raises ConfigurationError for an environment over tokens, or with several roles."""
    if isinstance(env, OneTurnEnv):
        return env.get_messages()
    if isinstance(env, EnvFromMessageEnv):
        return env.conversation
    raise ConfigurationError(f"{type(env).__name__} does not speak in messages turn by turn; it cannot be served")


def _one_env(envs: Any) -> Env:
    if len(envs) != 1:
        raise ConfigurationError(
            f"the environment has {len(envs)} roles, and a served one has one; it cannot be served"
        )
    return envs[0]


async def _opening(group: EnvGroupBuilder) -> list[dict[str, Any]]:
    try:
        env = _one_env(await group.make_envs())
        if isinstance(env, EnvFromMessageEnv):
            await env.initial_observation()
        return [_wire(message) for message in conversation_of(env)]
    finally:
        await group.cleanup()


def _wire(message: Message) -> dict[str, Any]:
    if message["role"] not in ROLES:
        raise ConfigurationError(f"a message of role {message['role']!r}: verifiers supports {', '.join(ROLES)}")
    return as_openai(message)


def _written(renderer: Renderer, given: vf.AssistantMessage, cut: bool) -> list[int]:
    """A reply encoded with the renderer, with its stop unless it was truncated."""
    message: Message = {"role": "assistant", "content": given.content or ""}
    if given.tool_calls:
        message["tool_calls"] = [read_call(call.id, call.name, call.arguments) for call in given.tool_calls]
    before: list[Message] = [{"role": "user", "content": "."}]
    prompt = renderer.build_generation_prompt(before).to_ints()
    spoken = renderer.build_supervised_example([*before, message])[0].to_ints()
    if spoken[: len(prompt)] != prompt:
        raise ConfigurationError(
            f"{type(renderer).__name__} writes replies differently from its prompts; give model_name"
        )
    tokens = spoken[len(prompt) :]
    return strip_stop(renderer, tokens) if cut else tokens


def _named(metrics: list[Metrics]) -> dict[str, float]:
    """The last value of each metric over all turns; without the stop reason, which the trace has."""
    merged = {key: value for turn in metrics for key, value in turn.items()}
    return {key: float(value) for key, value in merged.items() if not key.startswith(STOP_METRIC_PREFIX)}


def _finished(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to completion, even inside a running event loop: verifiers loads tasks with a plain call."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()
