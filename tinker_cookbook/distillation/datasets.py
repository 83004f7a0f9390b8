"""Prompts for on-policy distillation, and several datasets of them in one batch, each with its own teacher.

The student answers the prompts and gets no reward: what it learns comes from the teacher alone (see `teacher_kl`). Any other
RLDatasetBuilder may stand here too; then the environment's reward and the teacher both count.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import chz

from tinker_cookbook.completers import derive_seed
from tinker_cookbook.distillation.prompts import load_deepmath_prompts, load_prompts, load_tulu3_prompts
from tinker_cookbook.distillation.teachers import TeacherConfig
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.renderers import Content, Message, Renderer, get_renderer
from tinker_cookbook.rl.one_turn import OneTurnEnv, OneTurnGroupBuilder, Reply
from tinker_cookbook.rl.types import (
    Env,
    EnvGroupBuilder,
    Metrics,
    Record,
    RLDataset,
    RLDatasetBuilder,
    Trajectory,
    TrajectoryGroup,
)
from tinker_cookbook.tokenizer_utils import get_tokenizer

if TYPE_CHECKING:
    pass

__all__ = [
    "CompositeDataset",
    "DistillationDatasetConfig",
    "PromptOnlyDataset",
    "PromptOnlyDatasetBuilder",
    "PromptOnlyEnv",
    "TeacherConfig",
    "load_deepmath_prompts",
    "load_prompts",
    "load_tulu3_prompts",
]

logger = logging.getLogger(__name__)


@chz.chz(typecheck=True)
class DistillationDatasetConfig:
    """A dataset and who judges what the student samples on it."""

    dataset_builder: RLDatasetBuilder = chz.field(
        doc="makes the groups; its own number of groups per batch does not matter"
    )
    teacher_config: TeacherConfig = chz.field(doc="the teacher on this dataset")
    groups_per_batch: int = chz.field(doc="groups of this dataset in each batch", validator=chz.validators.gt(0))


class PromptOnlyEnv(OneTurnEnv):
    """A prompt to answer, after `convo_prefix`, for reward 0. Metric: ended, the reply ended itself."""

    def __init__(self, prompt: Content, renderer: Renderer, convo_prefix: list[Message] | None = None):
        super().__init__(renderer)
        self._messages: list[Message] = [*(convo_prefix or []), {"role": "user", "content": prompt}]

    def get_messages(self) -> list[Message]:
        return self._messages

    def score_reply(self, reply: Reply) -> tuple[float, Metrics]:
        return 0.0, {"ended": float(reply.stopped)}


class PromptOnlyDataset(RLDataset):
    """Prompts, `groups_per_batch` to a batch; the last batch has what is left.

    Args:
        prompts: conversations that end in a user message.
        num_epochs: times that the prompts come round.
        seed: each epoch is shuffled by a seed that follows from this one; None: always in the order given.
    """

    def __init__(
        self,
        prompts: Sequence[list[Message]],
        renderer: Renderer,
        groups_per_batch: int,
        group_size: int,
        dataset_name: str = "prompts",
        num_epochs: int = 1,
        seed: int | None = None,
    ):
        self._prompts, self._renderer = prompts, renderer
        self._groups_per_batch, self._group_size, self._name = groups_per_batch, group_size, dataset_name
        self._total, self._seed = len(prompts) * num_epochs, seed
        self._epoch, self._order = None, list(range(len(prompts)))

    def get_batch(self, index: int) -> list[EnvGroupBuilder]:
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of a dataset with {len(self)} batches")
        first = index * self._groups_per_batch
        return [self._group(self._prompt(n)) for n in range(first, min(first + self._groups_per_batch, self._total))]

    def _group(self, messages: list[Message]) -> OneTurnGroupBuilder:
        env = partial(PromptOnlyEnv, messages[-1]["content"], self._renderer, messages[:-1])
        return OneTurnGroupBuilder(env, self._group_size, self._name, record_kind="prompt")

    def _prompt(self, n: int) -> list[Message]:
        epoch, place = divmod(n, len(self._prompts))
        if self._seed is not None and epoch != self._epoch:
            self._order = list(range(len(self._prompts)))
            random.Random(derive_seed(self._seed, "epoch", epoch)).shuffle(self._order)
            self._epoch = epoch
        return self._prompts[self._order[place]]

    def __len__(self) -> int:
        return -(-self._total // self._groups_per_batch)


@chz.chz(typecheck=True)
class PromptOnlyDatasetBuilder(RLDatasetBuilder):
    """Prompts from a file or the hub, shuffled once, some of them held out."""

    dataset_name: str = chz.field(doc="a .txt or .jsonl file, deepmath, tulu3, or a hub dataset id (see load_prompts)")
    groups_per_batch: int = chz.field(doc="prompts per batch", validator=chz.validators.gt(0))
    group_size: int = chz.field(doc="attempts per prompt", validator=chz.validators.gt(0))
    model_name_for_tokenizer: str = chz.field(doc="whose tokenizer to use")
    renderer_name: str = chz.field(doc="how messages become tokens")
    split: str = chz.field(default="train", doc="split of a hub dataset")
    system_prompt: str | None = chz.field(default=None, doc="put before every prompt")
    max_prompt_tokens: int | None = chz.field(
        default=None, doc="longer prompts are left out, and counted in a warning; None: no limit"
    )
    test_size: int = chz.field(
        default=0, doc="prompts held out as the test set (of test_dataset_name: used)", validator=chz.validators.ge(0)
    )
    test_dataset_name: str | None = chz.field(default=None, doc="where the test set comes from; None: the same prompts")
    num_epochs: int = chz.field(default=1, doc="times that the prompts come round", validator=chz.validators.gt(0))
    seed: int = chz.field(default=0, doc="seed of the shuffles")

    @chz.validate
    def _check_test(self) -> None:
        if self.test_dataset_name is not None and self.test_size == 0:
            raise ConfigurationError("test_dataset_name needs test_size, the number of its prompts to use")

    async def __call__(self) -> tuple[PromptOnlyDataset, PromptOnlyDataset | None]:
        tokenizer = get_tokenizer(self.model_name_for_tokenizer)
        renderer = get_renderer(self.renderer_name, tokenizer, model_name=self.model_name_for_tokenizer)
        train, test = self._split(renderer)
        training = PromptOnlyDataset(
            train, renderer, self.groups_per_batch, self.group_size, num_epochs=self.num_epochs, seed=self.seed
        )
        return training, PromptOnlyDataset(test, renderer, self.groups_per_batch, 1) if test else None

    def _split(self, renderer: Renderer) -> tuple[list[list[Message]], list[list[Message]]]:
        rng = random.Random(self.seed)
        prompts = self._fitting(renderer, self.dataset_name)
        if self.test_dataset_name is not None:
            others = self._fitting(renderer, self.test_dataset_name)
            return prompts, rng.sample(others, min(self.test_size, len(others)))
        if self.test_size >= len(prompts):
            raise ConfigurationError(
                f"test_size={self.test_size} leaves nothing to train on: {self.dataset_name} gives {len(prompts)} prompts"
            )
        rng.shuffle(prompts)
        return prompts[self.test_size :], prompts[: self.test_size]

    def _fitting(self, renderer: Renderer, dataset_name: str) -> list[list[Message]]:
        system: list[Message] = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        prompts = [[*system, *messages] for messages in load_prompts(dataset_name, self.split)]
        if self.max_prompt_tokens is None:
            return prompts
        lengths = [renderer.build_generation_prompt(messages).length for messages in prompts]
        if min(lengths) > self.max_prompt_tokens:
            raise ConfigurationError(
                f"max_prompt_tokens={self.max_prompt_tokens} leaves no prompt of {dataset_name}: the shortest has "
                f"{min(lengths)} tokens"
            )
        fitting = [prompt for prompt, length in zip(prompts, lengths, strict=True) if length <= self.max_prompt_tokens]
        if len(fitting) < len(prompts):
            left_out = len(prompts) - len(fitting)
            logger.warning("%d of %d prompts are longer than max_prompt_tokens: left out", left_out, len(prompts))
        return fitting


@dataclass(frozen=True)
class GroupOfDataset(EnvGroupBuilder):
    """A group that knows which dataset of a composite it came from, and has it as a tag."""

    builder: EnvGroupBuilder
    dataset_index: int

    async def make_envs(self) -> Sequence[Env]:
        return await self.builder.make_envs()

    @property
    def coordinated(self) -> bool:
        return self.builder.coordinated

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        return await self.builder.compute_group_rewards(trajectory_group, env_group)

    def select_trained(self, trajectory_group: list[Trajectory], env_group: Sequence[Env]) -> list[bool] | None:
        return self.builder.select_trained(trajectory_group, env_group)

    def make_records(self, group: TrajectoryGroup, env_group: Sequence[Env]) -> list[Record]:
        return self.builder.make_records(group, env_group)

    def member_roles(self, env_group: Sequence[Env]) -> list[str]:
        return self.builder.member_roles(env_group)

    def describe_members(self, env_group: Sequence[Env]) -> list[dict[str, Any]]:
        return self.builder.describe_members(env_group)

    async def cleanup(self) -> None:
        await self.builder.cleanup()

    def logging_tags(self) -> list[str]:
        return [*self.builder.logging_tags(), f"dataset_{self.dataset_index}"]


class CompositeDataset(RLDataset):
    """Batches with a fixed number of groups from each of several datasets, in their order.

    Batch t has the groups [t n_d, (t + 1) n_d) of dataset d, counted over its batches; a dataset that ends before the longest
    begins again. Which dataset a group came from is told by `GroupOfDataset`.

    Raises ConfigurationError for a dataset without groups; DataValidationError, when it is met, for a batch of another
    size than those before it (only the last of a dataset may be smaller).
    """

    def __init__(self, datasets: Sequence[RLDataset], groups_per_batch: Sequence[int]):
        if len(datasets) != len(groups_per_batch) or not datasets:
            raise ConfigurationError(
                f"{len(datasets)} datasets and {len(groups_per_batch)} numbers of groups: give one per dataset, at least one"
            )
        if min(groups_per_batch) < 1:
            raise ConfigurationError(f"groups_per_batch={list(groups_per_batch)}: each must be at least 1")
        self._datasets = [_Groups(dataset, d) for d, dataset in enumerate(datasets)]
        self._counts = groups_per_batch

    def get_batch(self, index: int) -> list[EnvGroupBuilder]:
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of a dataset with {len(self)} batches")
        return [
            GroupOfDataset(groups[(index * count + place) % len(groups)], d)
            for d, (groups, count) in enumerate(zip(self._datasets, self._counts, strict=True))
            for place in range(count)
        ]

    def __len__(self) -> int:
        return max(-(-len(groups) // count) for groups, count in zip(self._datasets, self._counts, strict=True))


class _Groups:
    """The groups of a dataset under indices of their own. The batch read last is kept."""

    def __init__(self, dataset: RLDataset, number: int):
        if len(dataset) < 1:
            raise ConfigurationError(f"dataset {number} has no batches: there is nothing to train on")
        self._dataset, self._number = dataset, number
        self._last_size = len(dataset.get_batch(len(dataset) - 1))
        self._read, self._batch = 0, dataset.get_batch(0)
        self._size = len(self._batch)
        if min(self._size, self._last_size) < 1:
            raise ConfigurationError(f"dataset {number} has a batch without groups; leave it out")

    def __len__(self) -> int:
        return (len(self._dataset) - 1) * self._size + self._last_size

    def __getitem__(self, index: int) -> EnvGroupBuilder:
        number, place = divmod(index, self._size)
        if number != self._read:
            batch = self._dataset.get_batch(number)
            expected = self._last_size if number == len(self._dataset) - 1 else self._size
            if len(batch) != expected:
                raise DataValidationError(
                    f"dataset {self._number}: batch {number} has {len(batch)} groups, expected {expected}; all batches but "
                    "the last must be of one size"
                )
            self._read, self._batch = number, batch
        return self._batch[place]
