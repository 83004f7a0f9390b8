"""Any task as groups of answers that a judge accepts or rejects: the environment, and how its groups are trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chz

from tinker_cookbook.debate.oversight import WITH_STEPS, OversightGroupBuilder, OversightProtocol, ProtocolName
from tinker_cookbook.debate.step_judges import ScriptedStepJudge, StepJudgeConfig
from tinker_cookbook.env.dataset import DatasetSettings, Place
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.advantages import AdvantageConfig
from tinker_cookbook.rl.types import EnvGroupBuilder
from tinker_cookbook.tasks.single_turn import TaskEnvironment, single_turn_group
from tinker_cookbook.tasks.steps import require_steps
from tinker_cookbook.tasks.types import Task, TaskItem

OVERSIGHT_ADVANTAGE = AdvantageConfig(baseline="mean", scale="token", credit="turn")
"""Answers against the answers to the same question, speeches against the speeches."""


@chz.chz(typecheck=True)
class Oversight(TaskEnvironment):
    """A task's items as groups of answers under one protocol; the test set are answers alone, scored by the task."""

    protocol: ProtocolName = chz.field(default="debate", doc="debate, consultancy, direct, self_consistency or truth")
    step_judge: StepJudgeConfig = chz.field(default_factory=StepJudgeConfig, doc="who checks a step")
    max_tokens: int | None = chz.field(default=None, doc="longest turn, to tell which questions fit; None: no limit")
    context_window: int | None = chz.field(default=None, doc="of the policy; None: no limit")

    def read(self, settings: DatasetSettings) -> tuple[Task, list[TaskItem], list[TaskItem]]:
        if self.protocol == "debate" and settings.group_size % 2:
            raise ConfigurationError(
                f"group_size={settings.group_size} is odd, but a debate takes two rollouts; make it even"
            )
        task, train, test = super().read(settings)
        if self.protocol in WITH_STEPS:
            require_steps(task, f"protocol={self.protocol}")
            self.step_judge.check()
        return task, train, test

    async def make_protocol(self, task: Task, renderer: Renderer, seed: int) -> OversightProtocol:
        """The protocol with its judge; one that checks no steps opens no weights."""
        judge = await self.step_judge.make(seed) if self.protocol in WITH_STEPS else ScriptedStepJudge()
        return OversightProtocol.make(self.protocol, task, renderer, judge, seed, self.max_tokens, self.context_window)

    async def make_group(self, task: Task, settings: DatasetSettings) -> Callable[[Any, int, Place], EnvGroupBuilder]:
        renderer = settings.renderer()
        protocol = await self.make_protocol(task, renderer, settings.seed)
        longest = protocol.max_prompt_tokens

        def make(item: TaskItem, attempts: int, place: Place) -> EnvGroupBuilder:
            if place.is_test:
                return single_turn_group(task, item, renderer, attempts, max_prompt_tokens=longest)
            return OversightGroupBuilder(protocol, item, attempts, place.key)

        return make
