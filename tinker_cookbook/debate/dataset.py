"""Any task as debates: the dataset builder that joins task, protocol and judge, and how survivors are trained."""

from typing import Literal

import chz

from tinker_cookbook.debate.env import DebateGroupBuilder, DebateProtocol
from tinker_cookbook.debate.judges import JudgeConfig, check_judge, make_judge
from tinker_cookbook.debate.prompts import CONFIDENCE_REQUEST, DebatePrompts
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.advantages import AdvantageConfig
from tinker_cookbook.tasks.single_turn import MakeGroup, TaskDatasetBuilder, single_turn_group
from tinker_cookbook.tasks.types import Task, TaskItem

DebateTrain = Literal["rejection", "rs_grpo"]

ADVANTAGES: dict[DebateTrain, AdvantageConfig] = {
    "rejection": AdvantageConfig(baseline="constant", scale="sequence"),
    "rs_grpo": AdvantageConfig(baseline="mean", scale="sequence"),
}
"""How winners are trained. rejection: 1 / tokens for each token of a winner. rs_grpo: the winner's task reward, as if there had
been no debate, minus the mean over the winners of the same question, / tokens; the same value on all three rounds."""


@chz.chz(typecheck=True)
class DebateDatasetBuilder(TaskDatasetBuilder):
    """A task's items as groups of debates, two rollouts for each; the test set are proposals alone (round 1)."""

    judge: JudgeConfig = chz.field(doc="who decides")
    prompts: DebatePrompts = chz.field(default_factory=DebatePrompts, doc="wording of rounds 2 and 3")
    max_tokens: int | None = chz.field(default=None, doc="longest turn, to tell which questions fit; None: no limit")
    context_window: int | None = chz.field(default=None, doc="of the policy; None: no limit")

    @chz.validate
    def _even_group(self) -> None:
        if self.group_size % 2:
            raise ConfigurationError(
                f"group_size={self.group_size} is odd, but a debate takes two rollouts; make num_rollouts / num_groups even"
            )

    def check(self) -> tuple[Task, list[TaskItem], list[TaskItem]]:
        check_judge(self.judge)
        return super().check()

    @property
    def added_request(self) -> str:
        return CONFIDENCE_REQUEST

    async def group_makers(self, task: Task, renderer: Renderer) -> tuple[MakeGroup, MakeGroup]:
        protocol = DebateProtocol.make(task, renderer, self.prompts, self.max_tokens, self.context_window)
        judge = await make_judge(self.judge if self.judge.seed is not None else chz.replace(self.judge, seed=self.seed))
        longest = protocol.max_first_prompt
        return (
            lambda item, key: DebateGroupBuilder(protocol, item, judge, self.group_size // 2, key),
            lambda item, key: single_turn_group(task, item, renderer, 1, CONFIDENCE_REQUEST, longest),
        )
