"""Any task as plain single-turn RL: one question, one reply, one reward; group_size replies per question."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import chz

from tinker_cookbook.completers import StopCondition, derive_seed
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Renderer, get_renderer
from tinker_cookbook.renderers.replies import decode_reply, reply_text
from tinker_cookbook.rl.metric_util import RLTestSetEvaluator
from tinker_cookbook.rl.records import transition_record
from tinker_cookbook.rl.types import (
    Action,
    ActionExtra,
    Env,
    EnvGroupBuilder,
    InitialObservationOverflow,
    Record,
    RLDataset,
    RLDatasetBuilder,
    StepResult,
    Trajectory,
    TrajectoryGroup,
)
from tinker_cookbook.tasks.datasets import load_items
from tinker_cookbook.tasks.registry import get_task
from tinker_cookbook.tasks.types import Task, TaskItem
from tinker_cookbook.tokenizer_utils import get_tokenizer

if TYPE_CHECKING:
    from tinker_cookbook.rl.types import Observation


class SingleTurnEnv(Env):
    """Asks one item and scores the reply."""

    def __init__(
        self,
        task: Task,
        item: TaskItem,
        renderer: Renderer,
        extra_request: str = "",
        max_prompt_tokens: int | None = None,
    ):
        self.task, self.item, self.renderer = task, item, renderer
        self._extra_request = extra_request
        self._max_prompt_tokens = max_prompt_tokens
        self.raw_reply = ""

    async def initial_observation(self) -> tuple["Observation", StopCondition] | InitialObservationOverflow:
        prompt = self._prompt()
        if self._max_prompt_tokens is not None and prompt.length > self._max_prompt_tokens:
            return InitialObservationOverflow(0.0, {"context_overflow": 1.0})
        return prompt, self.renderer.get_stop_sequences()

    def _prompt(self) -> "Observation":
        return self.renderer.build_generation_prompt(self.task.messages(self.item, self._extra_request))

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        self.raw_reply = decode_reply(self.renderer, action)
        score = self.task.score(self.item, reply_text(self.renderer, action))
        stopped = float((extra or {}).get("stop_reason") == "stop")
        metrics = {**score.metrics, "stopped": stopped, "context_overflow": 0.0}
        return StepResult(score.reward, True, self._prompt(), self.renderer.get_stop_sequences(), metrics)


@dataclass(frozen=True)
class SingleTurnGroupBuilder(EnvGroupBuilder):
    """`group_size` attempts at one item.

    With `accept_min_reward` or `accept_require_parse` only replies that pass survive into training (rejection sampling).
    """

    task: Task
    item: TaskItem
    renderer: Renderer
    group_size: int
    extra_request: str = ""
    accept_min_reward: float | None = None
    accept_require_parse: bool = False
    max_prompt_tokens: int | None = None
    """a longer prompt is not asked: its members count with reward 0 and metric context_overflow, and train nothing"""

    async def make_envs(self) -> Sequence[SingleTurnEnv]:
        return [
            SingleTurnEnv(self.task, self.item, self.renderer, self.extra_request, self.max_prompt_tokens)
            for _ in range(self.group_size)
        ]

    def select_trained(self, trajectory_group: list[Trajectory], env_group: Sequence[Env]) -> list[bool] | None:
        if self.accept_min_reward is None and not self.accept_require_parse:
            return None
        return [self._accepted(trajectory) for trajectory in trajectory_group]

    def _accepted(self, trajectory: Trajectory) -> bool:
        transition = trajectory.transitions[-1]
        if self.accept_require_parse and not transition.metrics.get("parsed"):
            return False
        return self.accept_min_reward is None or transition.reward >= self.accept_min_reward

    def make_records(self, group: TrajectoryGroup, env_group: Sequence[Env]) -> list[Record]:
        records = []
        for i, (trajectory, env, reward) in enumerate(
            zip(group.trajectories_G, env_group, group.get_total_rewards(), strict=True)
        ):
            assert isinstance(env, SingleTurnEnv)
            transition = trajectory.transitions[-1]
            content = {
                "tags": self.logging_tags(),
                "instance_id": self.item.id,
                "member": i,
                "question": self.item.question,
                "ground_truth": self.item.reference,
                **transition_record(transition, env.raw_reply),
                "reward": reward,
                "accepted": group.is_trained()[i],
                "metrics": transition.metrics,
            }
            records.append(Record(self.task.record_kind, content))
        return records

    def describe_members(self, env_group: Sequence[Env]) -> list[dict[str, Any]]:
        return [{"question": self.item.question[:100], "instance_id": self.item.id} for _ in env_group]

    def logging_tags(self) -> list[str]:
        return [self.task.name]


class TaskDataset(RLDataset):
    """Batches of `groups_per_batch` items, reshuffled for each pass over them by a generator of its own.

    `make_builder(item, key)` makes the group of an item; key is (batch, group), for seeds.
    """

    def __init__(
        self,
        items: Sequence[TaskItem],
        groups_per_batch: int,
        num_batches: int,
        make_builder,
        seed: int | None,
    ):
        self._items = list(items)
        self._groups_per_batch = groups_per_batch
        self._num_batches = num_batches
        self._make_builder = make_builder
        self._seed = seed
        self._orders: dict[int, list[int]] = {}

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        if not 0 <= index < self._num_batches:
            raise IndexError(f"batch {index} of {self._num_batches}")
        first = index * self._groups_per_batch
        return [
            self._make_builder(self._items[self._position(first + i)], (index, i))
            for i in range(min(self._groups_per_batch, self._limit() - first))
        ]

    def _limit(self) -> int:
        """An unshuffled dataset (a test set) is passed over once."""
        return self._num_batches * self._groups_per_batch if self._seed is not None else len(self._items)

    def _position(self, n: int) -> int:
        epoch, offset = divmod(n, len(self._items))
        if self._seed is None:
            return offset
        if epoch not in self._orders:
            order = list(range(len(self._items)))
            random.Random(derive_seed(self._seed, "epoch", epoch)).shuffle(order)
            self._orders = {epoch: order, **{k: v for k, v in self._orders.items() if k == epoch - 1}}
        return self._orders[epoch][offset]

    def __len__(self) -> int:
        return self._num_batches


def load_task_items(
    task_name: str, reward_fn: str | None, dataset: str | None, test_dataset: str | None, num_groups: int
) -> tuple[Task, list[TaskItem], list[TaskItem]]:
    """A task with its items, enough of them for a batch of `num_groups` different questions."""
    task = get_task(task_name, reward_fn)
    train, test = load_items(task, dataset or task.default_dataset, test_dataset)
    if len(train) < num_groups:
        raise ConfigurationError(
            f"num_groups={num_groups} questions per batch, but the dataset has {len(train)}; lower num_groups"
        )
    return task, train, test


@chz.chz(typecheck=True)
class SingleTurnDatasetBuilder(RLDatasetBuilder):
    """A task's items as single-turn groups."""

    task: str = chz.field(doc="qa, summary, or a registered task")
    dataset: str | None = chz.field(default=None, doc="shipped name, .jsonl file or hub id; None: the task's own")
    test_dataset: str | None = chz.field(
        default=None, doc="where test items come from, if not the dataset's test split"
    )
    reward_fn: str | None = chz.field(
        default=None, doc="reward spec, e.g. compression:0.5,rouge:0.3; None: the task's own"
    )
    model_name: str = chz.field(doc="whose tokenizer to use")
    renderer_name: str = chz.field(doc="how messages become tokens")
    num_groups: int = chz.field(doc="questions per batch", validator=chz.validators.gt(0))
    group_size: int = chz.field(doc="replies per question", validator=chz.validators.gt(0))
    num_batches: int = chz.field(doc="training batches", validator=chz.validators.gt(0))
    seed: int = chz.field(default=0, doc="order of the items")
    extra_request: str = chz.field(default="", doc="appended to the system prompt")
    accept_min_reward: float | None = chz.field(default=None, doc="train only on replies with at least this reward")
    accept_require_parse: bool = chz.field(default=False, doc="train only on replies whose answer could be read")
    max_test_items: int | None = chz.field(default=None, doc="evaluate on this many test items")
    max_prompt_tokens: int | None = chz.field(default=None, doc="longer prompts are not asked; None: no limit")

    def check(self) -> tuple[Task, list[TaskItem], list[TaskItem]]:
        """Task, training and test items, read and checked. Raises ConfigurationError or DataFormatError."""
        return load_task_items(self.task, self.reward_fn, self.dataset, self.test_dataset, self.num_groups)

    async def __call__(self) -> tuple[TaskDataset, TaskDataset | None]:
        task, train, test = self.check()
        train_set = TaskDataset(
            train, self.num_groups, self.num_batches, self._builder(task, self.group_size), self.seed
        )
        return train_set, evaluation_set(test[: self.max_test_items], self._builder(task, 1))

    def _builder(self, task: Task, group_size: int):
        renderer = get_renderer(self.renderer_name, get_tokenizer(self.model_name), model_name=self.model_name)

        def build(item: TaskItem, key: tuple[int, int]) -> SingleTurnGroupBuilder:
            return SingleTurnGroupBuilder(
                task,
                item,
                renderer,
                group_size,
                self.extra_request,
                self.accept_min_reward,
                self.accept_require_parse,
                self.max_prompt_tokens,
            )

        return build


def evaluation_set(items: Sequence[TaskItem], make_builder) -> TaskDataset | None:
    """All items once, in order, as one batch; None without items."""
    return TaskDataset(items, len(items), 1, make_builder, seed=None) if items else None


@chz.chz(typecheck=True)
class TaskEvaluatorBuilder:
    """Evaluates single-turn replies on a fixed, seeded choice of a task's training or test items."""

    name: str = chz.field(doc="prefix of the metrics")
    task: str = chz.field(doc="qa, summary, or a registered task")
    dataset: str | None = chz.field(default=None, doc="shipped name, .jsonl file or hub id; None: the task's own")
    reward_fn: str | None = chz.field(default=None, doc="reward spec; None: the task's own")
    split: Literal["train", "test"] = chz.field(default="train", doc="which items")
    model_name: str = chz.field(doc="whose tokenizer to use")
    renderer_name: str = chz.field(doc="how messages become tokens")
    extra_request: str = chz.field(default="", doc="appended to the system prompt")
    max_items: int = chz.field(default=100, doc="how many items at most", validator=chz.validators.gt(0))
    max_tokens: int = chz.field(doc="longest reply", validator=chz.validators.gt(0))
    temperature: float = chz.field(default=1.0, doc="sampling temperature", validator=chz.validators.gt(0))
    top_k: int = chz.field(default=-1, doc="sample from the k likeliest tokens alone; -1: from all")
    top_p: float = chz.field(default=1.0, doc="sample from the likeliest tokens of this probability; 1: from all")
    max_prompt_tokens: int | None = chz.field(default=None, doc="longer prompts are not asked; None: no limit")
    seed: int = chz.field(default=0, doc="seed of the choice and of sampling")

    def __call__(self) -> RLTestSetEvaluator:
        task = get_task(self.task, self.reward_fn)
        train, test = load_items(task, self.dataset or task.default_dataset)
        items = train if self.split == "train" else test
        if len(items) > self.max_items:
            items = random.Random(derive_seed(self.seed, self.name)).sample(items, self.max_items)
        renderer = get_renderer(self.renderer_name, get_tokenizer(self.model_name), model_name=self.model_name)

        def build(item: TaskItem, key: tuple[int, int]) -> SingleTurnGroupBuilder:
            return SingleTurnGroupBuilder(
                task, item, renderer, 1, self.extra_request, max_prompt_tokens=self.max_prompt_tokens
            )

        dataset = evaluation_set(items, build)
        if dataset is None:
            raise ConfigurationError(f"evaluator {self.name!r}: the dataset has no {self.split} items")
        seed = derive_seed(self.seed, self.name, "sampling")
        return RLTestSetEvaluator(
            dataset, self.max_tokens, self.name, self.temperature, seed, top_k=self.top_k, top_p=self.top_p
        )
