"""Any task as groups of answers that a judge accepts or rejects: the dataset builder, and how its groups are trained."""

from __future__ import annotations

import chz

from tinker_cookbook.debate.oversight import WITH_STEPS, OversightGroupBuilder, OversightProtocol, ProtocolName
from tinker_cookbook.debate.step_judges import ScriptedStepJudge, StepJudgeConfig
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.advantages import AdvantageConfig
from tinker_cookbook.tasks.single_turn import MakeGroup, TaskDatasetBuilder, single_turn_group
from tinker_cookbook.tasks.steps import require_steps
from tinker_cookbook.tasks.types import Task, TaskItem

OVERSIGHT_ADVANTAGE = AdvantageConfig(baseline="mean", scale="token", credit="turn")
"""Answers against the answers to the same question, speeches against the speeches."""


@chz.chz(typecheck=True)
class OversightDatasetBuilder(TaskDatasetBuilder):
    """A task's items as groups of answers under one protocol; the test set are answers alone, scored by the task."""

    protocol: ProtocolName = chz.field(default="debate", doc="debate, consultancy, direct, self_consistency or truth")
    step_judge: StepJudgeConfig = chz.field(default_factory=StepJudgeConfig, doc="who checks a step")
    max_tokens: int | None = chz.field(default=None, doc="longest turn, to tell which questions fit; None: no limit")
    context_window: int | None = chz.field(default=None, doc="of the policy; None: no limit")

    @chz.validate
    def _check_group_size(self) -> None:
        if self.protocol == "debate" and self.group_size % 2:
            raise ConfigurationError(
                f"group_size={self.group_size} is odd, but a debate takes two rollouts; make it even"
            )

    def check(self) -> tuple[Task, list[TaskItem], list[TaskItem]]:
        task, train, test = super().check()
        if self.protocol in WITH_STEPS:
            require_steps(task, f"protocol={self.protocol}")
            self.step_judge.check()
        return task, train, test

    async def make_protocol(self, task: Task, renderer: Renderer) -> OversightProtocol:
        """The protocol with its judge; one that checks no steps opens no weights."""
        judge = await self.step_judge.make(self.seed) if self.protocol in WITH_STEPS else ScriptedStepJudge()
        return OversightProtocol.make(
            self.protocol, task, renderer, judge, self.seed, self.max_tokens, self.context_window
        )

    async def group_makers(self, task: Task, renderer: Renderer) -> tuple[MakeGroup, MakeGroup]:
        protocol = await self.make_protocol(task, renderer)
        longest = protocol.max_prompt_tokens
        return (
            lambda item, key: OversightGroupBuilder(protocol, item, self.group_size, key),
            lambda item, key: single_turn_group(task, item, renderer, 1, max_prompt_tokens=longest),
        )
