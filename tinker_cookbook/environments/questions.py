"""Environments of questions, each with an answer, and a function that scores the replies; with tools or without."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeAlias

import chz

from tinker_cookbook.environments.base import DatasetSettings, Environment
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Message, Renderer, get_text_content
from tinker_cookbook.rl.message_groups import MessageGroupBuilder
from tinker_cookbook.rl.types import EnvGroupBuilder, Metrics, RLDatasetBuilder
from tinker_cookbook.tasks.plain import PlainTask
from tinker_cookbook.tasks.rewards import OwnRewardFn, RewardSpec
from tinker_cookbook.tasks.single_turn import MakeGroup, SingleTurnDatasetBuilder, TaskDatasetBuilder
from tinker_cookbook.tasks.types import Task, TaskItem
from tinker_cookbook.tool_use.agent_tool_message_env import AgentToolMessageEnv, tool_conversation
from tinker_cookbook.tool_use.tools import ToolRegistry
from tinker_cookbook.tool_use.types import Tool
from tinker_cookbook.utils.fields import fill
from tinker_cookbook.utils.reward_threads import call_reward

Rows: TypeAlias = Sequence[Mapping[str, Any]]
Questions: TypeAlias = str | Callable[[], Any] | Rows | tuple[Rows, Rows]
"""Rows with `question` and `answer`, a pair of such lists for training and testing, or whatever `dataset=` takes
(tinker_cookbook.tasks.datasets): a file, a hub id, a function."""


def single_turn_env(
    dataset: Questions, reward_fn: str | OwnRewardFn, *, system_prompt: str = "", test_dataset: str | None = None
) -> Environment:
    """One question, one reply, one reward.

    Args:
        dataset: the questions.
        reward_fn: (question, reply, answer) -> float or (float, metrics), sync or async, or a name or mixture as
            `reward_fn=` takes it (RewardSpec.parse). It reads the whole reply, less reasoning that the renderer sets apart.
        system_prompt: stands before each question; empty: nothing does.
        test_dataset: where test questions come from, if not from `dataset`.

    Raises:
        ConfigurationError: a reward function that takes something else, an unknown name.
    """
    return _Questions(_dataset(dataset), _checked(reward_fn), system_prompt, test_dataset)


def tool_env(
    dataset: Questions,
    reward_fn: str | OwnRewardFn,
    tools: Sequence[Tool | Callable[..., Any]],
    *,
    system_prompt: str = "",
    test_dataset: str | None = None,
    max_turns: int = 5,
) -> Environment:
    """Questions that may be answered with the help of tools. A reply without calls is the answer, and is scored.

    Args:
        dataset, reward_fn, system_prompt, test_dataset: as `single_turn_env`; `reply` is the answer's text, empty if the
            episode ended without one.
        tools: typed functions with a docstring, plain or async, or tools of `tinker_cookbook.tool_use`.
        max_turns: replies per episode, those with calls included; then the episode is scored as it stands.

    Raises:
        ConfigurationError: as `single_turn_env`; a function that cannot be a tool.
    """
    if not tools:
        raise ConfigurationError("tools is empty: give at least one tool, or use single_turn_env")
    ToolRegistry(tools)
    questions = _Questions(_dataset(dataset), _checked(reward_fn), system_prompt, test_dataset)
    return _QuestionsWithTools(questions, tuple(tools), max_turns)


class _GivenRows:
    """Rows from a script, in the form of a dataset of one's own."""

    def __init__(self, rows: Any):
        self.rows = rows

    def __call__(self) -> Any:
        return self.rows


def _dataset(dataset: Questions) -> str | Callable[[], Any]:
    return dataset if isinstance(dataset, str) or callable(dataset) else _GivenRows(dataset)


def _checked(reward_fn: str | OwnRewardFn) -> str | OwnRewardFn:
    RewardSpec.parse(reward_fn)
    return reward_fn


@dataclass(frozen=True)
class _MakePlainTask:
    system_prompt: str

    def __call__(self, reward: RewardSpec | None) -> Task:
        return PlainTask(reward, self.system_prompt)


@dataclass(frozen=True)
class _Questions(Environment):
    dataset: str | Callable[[], Any]
    reward_fn: str | OwnRewardFn
    system_prompt: str
    test_dataset: str | None

    def build(self, settings: DatasetSettings) -> RLDatasetBuilder:
        builder = fill(SingleTurnDatasetBuilder, settings, **self.task_fields(settings))
        builder.check()
        return builder

    def task_fields(self, settings: DatasetSettings) -> dict[str, Any]:
        """Fields of a TaskDatasetBuilder that are not called as in DatasetSettings."""
        return {
            "task": _MakePlainTask(self.system_prompt),
            "dataset": self.dataset,
            "reward_fn": self.reward_fn,
            "test_dataset": self.test_dataset,
            "num_groups": settings.groups_per_batch,
            "max_test_items": settings.num_test,
        }


@dataclass(frozen=True)
class _QuestionsWithTools(Environment):
    questions: _Questions
    tools: tuple[Any, ...]
    max_turns: int

    def build(self, settings: DatasetSettings) -> RLDatasetBuilder:
        own = self.questions.task_fields(settings)
        builder = fill(ToolDatasetBuilder, settings, tools=self.tools, max_turns=self.max_turns, **own)
        task, train, _ = builder.check()
        builder.make_env(task, train[0], builder.renderer())  # a renderer without tools fails here
        return builder


@chz.chz(typecheck=True)
class ToolDatasetBuilder(TaskDatasetBuilder):
    """A task's items as episodes with tools."""

    tools: tuple[Any, ...] = chz.field(doc="tools, or typed functions with a docstring")
    max_turns: int = chz.field(doc="replies per episode")
    max_prompt_tokens: int | None = chz.field(
        default=None, doc="an episode ends whose prompt has grown beyond this; None: no limit"
    )

    @property
    def shared_system_prompt(self) -> None:
        return None  # the declaration of the tools stands there, in the renderer's own way

    def make_env(self, task: Task, item: TaskItem, renderer: Renderer) -> AgentToolMessageEnv:
        """One episode. Raises RendererError for a renderer without tools, ConfigurationError for max_turns below 1."""
        registry = _registry(self.tools)
        *system, question = task.messages(item)
        prompt = get_text_content(system[0]) if system else ""
        messages = tool_conversation(renderer, registry, prompt, get_text_content(question))
        return AgentToolMessageEnv(
            registry, messages, self.max_turns, partial(_grade, task, item), tool_errors="answer"
        )

    async def group_makers(self, task: Task, renderer: Renderer) -> tuple[MakeGroup, MakeGroup]:
        def of_size(group_size: int) -> MakeGroup:
            def make(item: TaskItem, key: tuple[int, int]) -> EnvGroupBuilder:
                env, options = (
                    partial(self.make_env, task, item, renderer),
                    {"max_trajectory_tokens": self.max_prompt_tokens},
                )
                return MessageGroupBuilder(env, group_size, renderer, task.name, options)

            return make

        return of_size(self.group_size), of_size(1)


@lru_cache(maxsize=16)
def _registry(tools: tuple[Any, ...]) -> ToolRegistry:
    return ToolRegistry(tools)


async def _grade(task: Task, item: TaskItem, messages: list[Message]) -> tuple[float, Metrics]:
    """The score of the answer, which is the last message unless the episode ended without one."""
    answer = get_text_content(messages[-1]) if messages[-1]["role"] == "assistant" else ""
    score = await call_reward(task.score, item, answer)
    return score.reward, {**score.metrics}
