"""A verifiers taskset, or an environment of its older form, for a model: its tasks as a dataset of groups."""
# pyright: reportMissingImports=false

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import chz

from tinker_cookbook.environments.base import DatasetSettings, Environment
from tinker_cookbook.environments.verifiers.config import IN_PROCESS, environment_config, installed_form
from tinker_cookbook.environments.verifiers.legacy import LegacyGroupBuilder, load_legacy, read_rows
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.renderers import Renderer, get_renderer
from tinker_cookbook.rl.item_dataset import ItemDataset, evaluation_set
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset, RLDatasetBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.utils.fields import fill


@chz.chz(typecheck=True)
class VerifiersDatasetBuilder(RLDatasetBuilder):
    """Groups of episodes, one task to a group; every task once per epoch. Needs the extra `verifiers`."""

    taskset: str = chz.field(doc="installed taskset of verifiers (0.3.1: environment), module, or path/file.py")
    taskset_args: dict[str, Any] = chz.field(default_factory=dict, doc="fields of its config")
    test_taskset_args: dict[str, Any] | None = chz.field(
        default=None,
        doc="those that differ for evaluations, {'split': 'test'}; None: none is held (0.3.1: on its eval_dataset)",
    )
    env: str = chz.field(default="", doc="verifiers env that plays it; empty: the taskset's own, else one agent")
    verifiers_args: dict[str, Any] = chz.field(default_factory=dict, doc="fields of the env's config, roles included")
    harness: str | None = chz.field(
        default=IN_PROCESS, doc="of roles that name none; None: verifiers' own, which needs uv and a network"
    )
    max_tasks: int = chz.field(default=10_000, doc="most tasks that are taken from the taskset")
    model_name: str = chz.field(doc="whose tokenizer to use")
    renderer_name: str = chz.field(doc="how messages become tokens")
    groups_per_batch: int = chz.field(doc="tasks per batch")
    group_size: int = chz.field(doc="episodes of each")
    num_batches: int = chz.field(doc="training batches")
    num_test: int = chz.field(doc="tasks of an evaluation")
    seed: int = chz.field(doc="seed of the order of tasks")
    max_prompt_tokens: int | None = chz.field(default=None, doc="longest prompt; None: no limit")

    @chz.validate
    def _check(self) -> None:
        if installed_form() == "v1":
            self.config()
            return
        for name, default in (("env", ""), ("verifiers_args", {}), ("harness", IN_PROCESS)):
            if (given := getattr(self, name)) != default:
                raise ConfigurationError(
                    f"{name}={given!r}: verifiers 0.3.1 has no such part; its environments take taskset_args alone"
                )
        load_legacy(self.taskset, self.taskset_args)

    def config(self, **differs: Any) -> Any:
        """verifiers' EnvConfig. Raises ConfigurationError."""
        args = {**self.taskset_args, **differs}
        return environment_config(self.taskset, args, self.env, self.verifiers_args, self.harness)

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        renderer = get_renderer(self.renderer_name, get_tokenizer(self.model_name), model_name=self.model_name)
        return self._of_rows(renderer) if installed_form() == "legacy" else self._of_tasks(renderer)

    def _of_tasks(self, renderer: Renderer) -> tuple[RLDataset, RLDataset | None]:
        from tinker_cookbook.environments.verifiers.episodes import VerifiersGroupBuilder

        def group(config: Any, size: int, task: Any, key: tuple[int, int]) -> EnvGroupBuilder:
            name = config.env_id.replace("/", "_")
            return VerifiersGroupBuilder(config, task, size, renderer, name, self.max_prompt_tokens)

        config, test = self.config(), None
        training = self._training(read_tasks(config, self.max_tasks), partial(group, config, self.group_size))
        if self.test_taskset_args is not None:
            held_out = self.config(**self.test_taskset_args)
            test = evaluation_set(read_tasks(held_out, self.num_test), partial(group, held_out, 1))
        return training, test

    def _of_rows(self, renderer: Renderer) -> tuple[RLDataset, RLDataset | None]:
        def group(args: dict[str, Any], size: int, row: dict[str, Any], key: tuple[int, int]) -> EnvGroupBuilder:
            return LegacyGroupBuilder(self.taskset, args, row, size, renderer, self.max_prompt_tokens)

        args, test = self.taskset_args, None
        env = load_legacy(self.taskset, args)
        rows = read_rows(env, self.taskset, self.max_tasks)
        training = self._training(rows, partial(group, args, self.group_size))
        if self.test_taskset_args is not None or getattr(env, "eval_dataset_source", None) is not None:
            held_out = {**args, **(self.test_taskset_args or {})}
            rows = read_rows(load_legacy(self.taskset, held_out), self.taskset, self.num_test, test=True)
            test = evaluation_set(rows, partial(group, held_out, 1))
        return training, test

    def _training(self, items: list[Any], group: Callable[[Any, tuple[int, int]], EnvGroupBuilder]) -> RLDataset:
        total = self.groups_per_batch * self.num_batches
        return ItemDataset(items, group, self.groups_per_batch, total, self.seed)


def read_tasks(config: Any, most: int) -> list[Any]:
    """The first tasks. Raises ConfigurationError for a taskset without any, DataValidationError for two of one key."""
    from verifiers.v1.utils.loaders import load_taskset

    tasks = list(itertools.islice(load_taskset(config.taskset), most))
    if not tasks:
        raise ConfigurationError(f"taskset={config.taskset.id} has no tasks")
    key, count = Counter(task.key for task in tasks).most_common(1)[0]
    if count > 1:
        raise DataValidationError(
            f"taskset={config.taskset.id}: {count} tasks have the key {key!r}; keys tell tasks apart"
        )
    return tasks


class VerifiersEnvironment(Environment):
    """A taskset of verifiers for any model. `fields` are those of VerifiersDatasetBuilder."""

    def __init__(self, fields: Mapping[str, Any]):
        self.fields = dict(fields)

    def build(self, settings: DatasetSettings) -> RLDatasetBuilder:
        return fill(VerifiersDatasetBuilder, settings, **self.fields)


def load_environment(taskset: str, **fields: Any) -> Environment:
    """`env=tinker_cookbook.environments.verifiers.dataset env.taskset=...`, for experiments that mix it with others.

    Args:
        fields: those of VerifiersDatasetBuilder that DatasetSettings lacks.
    """
    return VerifiersEnvironment({"taskset": taskset, **fields})
