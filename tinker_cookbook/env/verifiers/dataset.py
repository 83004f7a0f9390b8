"""A verifiers taskset, or an environment of its older form, for a model: its tasks as a dataset of groups."""
# pyright: reportMissingImports=false

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import chz

from tinker_cookbook.env.dataset import DatasetSettings, Environment, Groups, Place
from tinker_cookbook.env.verifiers.config import IN_PROCESS, environment_config, installed_form
from tinker_cookbook.env.verifiers.legacy import LegacyGroupBuilder, load_legacy, read_rows
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.rl.types import EnvGroupBuilder


@chz.chz(typecheck=True)
class VerifiersKeys:
    """A taskset of verifiers, and who plays it."""

    taskset: str = chz.field(doc="installed taskset of verifiers (0.3.1: environment), module, or path/file.py")
    taskset_args: dict[str, Any] = chz.field(
        default_factory=dict, doc="fields of the taskset's config, as taskset.name=value"
    )
    test_taskset_args: dict[str, Any] | None = chz.field(
        default=None,
        doc="fields that differ in evaluations, as test_taskset.split=test; None: no evaluation (0.3.1: on its eval_dataset)",
    )
    env: str = chz.field(default="", doc="verifiers env that plays it; empty: the taskset's own, else one agent")
    verifiers_args: dict[str, Any] = chz.field(
        default_factory=dict,
        doc="fields of the env's config, as verifiers.name=value; of a role: verifiers.solver.max_turns=3",
    )
    harness: str | None = chz.field(
        default=IN_PROCESS,
        doc="harness of roles that name none; None: verifiers' default, which needs uv and a network",
    )
    max_tasks: int = chz.field(default=10_000, doc="maximum number of tasks from the taskset")


@chz.chz(typecheck=True)
class VerifiersEnvironment(VerifiersKeys, Environment):
    """Groups of episodes, one task per group; every task once per epoch. Needs the extra `verifiers`."""

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

    async def groups(self, settings: DatasetSettings) -> Groups:
        return self._of_rows(settings) if installed_form() == "legacy" else self._of_tasks(settings)

    def _of_tasks(self, settings: DatasetSettings) -> Groups:
        from tinker_cookbook.env.verifiers.episodes import VerifiersGroupBuilder

        renderer, config = settings.renderer(), self.config()
        held_out = None if self.test_taskset_args is None else self.config(**self.test_taskset_args)

        def make(task: Any, episodes: int, place: Place) -> EnvGroupBuilder:
            env_config = held_out if place.is_test and held_out is not None else config
            name = env_config.env_id.replace("/", "_")
            return VerifiersGroupBuilder(env_config, task, episodes, renderer, name, settings.max_prompt_tokens)

        test = [] if held_out is None else read_tasks(held_out, settings.num_test or self.max_tasks)
        return Groups(make, read_tasks(config, self.max_tasks), test)

    def _of_rows(self, settings: DatasetSettings) -> Groups:
        renderer, env = settings.renderer(), load_legacy(self.taskset, self.taskset_args)
        held_out = {**self.taskset_args, **(self.test_taskset_args or {})}

        def make(row: dict[str, Any], episodes: int, place: Place) -> EnvGroupBuilder:
            args = held_out if place.is_test else self.taskset_args
            return LegacyGroupBuilder(self.taskset, args, row, episodes, renderer, settings.max_prompt_tokens)

        test = []
        if self.test_taskset_args is not None or getattr(env, "eval_dataset_source", None) is not None:
            most = settings.num_test or self.max_tasks
            test = read_rows(load_legacy(self.taskset, held_out), self.taskset, most, test=True)
        return Groups(make, read_rows(env, self.taskset, self.max_tasks), test)


def read_tasks(config: Any, most: int) -> list[Any]:
    """The first tasks. Raises ConfigurationError for an empty taskset, DataValidationError for duplicate keys."""
    from verifiers.v1.utils.loaders import load_taskset

    tasks = list(itertools.islice(load_taskset(config.taskset), most))
    if not tasks:
        raise ConfigurationError(f"taskset={config.taskset.id} has no tasks")
    key, count = Counter(task.key for task in tasks).most_common(1)[0]
    if count > 1:
        raise DataValidationError(
            f"taskset={config.taskset.id}: {count} tasks have the key {key!r}; keys must identify tasks"
        )
    return tasks


def load_environment(taskset: str, **fields: Any) -> Environment:
    """`env=tinker_cookbook.env.verifiers.dataset env.taskset=...`, for experiments that mix it with others.

    Args:
        fields: fields of VerifiersEnvironment.
    """
    return VerifiersEnvironment(taskset=taskset, **fields)
