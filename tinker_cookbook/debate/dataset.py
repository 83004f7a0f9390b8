"""Any task as debates: the dataset builder that joins task, protocol and judge, and how survivors are trained."""

from __future__ import annotations

from typing import Literal

import chz

from tinker_cookbook.debate.env import DebateGroupBuilder, DebateProtocol
from tinker_cookbook.debate.judges import JudgeConfig, check_judge, make_judge
from tinker_cookbook.debate.prompts import CONFIDENCE_REQUEST, DebatePrompts
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.rl.data_processing import AdvantageConfig
from tinker_cookbook.rl.item_dataset import ItemDataset, evaluation_set
from tinker_cookbook.rl.problem_env import OneTurnGroupBuilder
from tinker_cookbook.rl.types import RLDatasetBuilder
from tinker_cookbook.tasks.single_turn import load_task_items, single_turn_group
from tinker_cookbook.tasks.types import Task, TaskItem
from tinker_cookbook.tokenizer_utils import get_tokenizer

DebateTrain = Literal["rejection", "rs_grpo"]

ADVANTAGES: dict[DebateTrain, AdvantageConfig] = {
    "rejection": AdvantageConfig(baseline="constant", scale="sequence"),
    "rs_grpo": AdvantageConfig(baseline="mean", scale="sequence"),
}
"""How winners are trained. rejection: 1 / tokens for each token of a winner. rs_grpo: the winner's task reward, as if there had
been no debate, minus the mean over the winners of the same question, / tokens; the same value on all three rounds."""


@chz.chz(typecheck=True)
class DebateDatasetBuilder(RLDatasetBuilder):
    """A task's items as groups of debates; the test set are proposals alone (round 1), one per test item."""

    task: str = chz.field(doc="qa, summary, or a registered task")
    dataset: str | None = chz.field(default=None, doc="shipped name, .jsonl file or hub id; None: the task's own")
    test_dataset: str | None = chz.field(
        default=None, doc="where test items come from, if not the dataset's test split"
    )
    reward_fn: str | None = chz.field(default=None, doc="reward spec; None: the task's own")
    model_name: str = chz.field(doc="whose tokenizer to use")
    renderer_name: str = chz.field(doc="how messages become tokens")
    judge: JudgeConfig = chz.field(doc="who decides")
    prompts: DebatePrompts = chz.field(default_factory=DebatePrompts, doc="wording of rounds 2 and 3")
    num_groups: int = chz.field(doc="questions per batch", validator=chz.validators.gt(0))
    group_size: int = chz.field(doc="rollouts per question, two for each debate", validator=chz.validators.gt(0))
    num_batches: int = chz.field(doc="training batches", validator=chz.validators.gt(0))
    seed: int = chz.field(default=0, doc="order of the items")
    max_test_items: int | None = chz.field(default=None, doc="evaluate on this many test items")
    max_tokens: int | None = chz.field(default=None, doc="longest turn, to tell which questions fit; None: no limit")
    context_window: int | None = chz.field(default=None, doc="of the policy; None: no limit")

    @chz.validate
    def _even_group(self) -> None:
        if self.group_size % 2:
            raise ConfigurationError(
                f"group_size={self.group_size} is odd, but a debate takes two rollouts; make num_rollouts / num_groups even"
            )

    def check(self) -> tuple[Task, list[TaskItem], list[TaskItem]]:
        """Task, training and test items, read and checked. Raises ConfigurationError or DataFormatError."""
        check_judge(self.judge)
        return load_task_items(self.task, self.reward_fn, self.dataset, self.test_dataset, self.num_groups)

    async def __call__(self) -> tuple[ItemDataset[DebateGroupBuilder], ItemDataset[OneTurnGroupBuilder] | None]:
        task, train, test = self.check()
        renderer = get_renderer(self.renderer_name, get_tokenizer(self.model_name), model_name=self.model_name)
        protocol = DebateProtocol.make(task, renderer, self.prompts, self.max_tokens, self.context_window)
        judge = await make_judge(self.judge)

        def debates(item: TaskItem, key: tuple[int, int]) -> DebateGroupBuilder:
            return DebateGroupBuilder(protocol, item, judge, self.group_size // 2, key)

        def proposal(item: TaskItem, key: tuple[int, int]) -> OneTurnGroupBuilder:
            return single_turn_group(
                task, item, renderer, 1, CONFIDENCE_REQUEST, max_prompt_tokens=protocol.max_first_prompt
            )

        train_set = ItemDataset(train, debates, self.num_groups, self.num_groups * self.num_batches, self.seed)
        return train_set, evaluation_set(test[: self.max_test_items], proposal)
