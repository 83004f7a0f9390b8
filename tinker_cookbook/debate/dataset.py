"""Any task as debates: the environment that joins task, protocol, judge and mode of training."""

from collections.abc import Callable
from typing import Any

import chz

from tinker_cookbook.debate.env import (
    DebateGroupBuilder,
    DebateProtocol,
    answer_request,
    make_dialogue,
    wrong_answers,
)
from tinker_cookbook.debate.judges import Judge, JudgeConfig, check_judge, make_judge
from tinker_cookbook.debate.modes import MODES, DebateTrain, TrainingMode, get_mode
from tinker_cookbook.debate.prompts import DebatePrompts
from tinker_cookbook.debate.protocols import ProtocolConfig
from tinker_cookbook.debate.rewards import TERMS
from tinker_cookbook.env.dataset import DatasetSettings, Place
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.advantages import AdvantageConfig
from tinker_cookbook.rl.types import EnvGroupBuilder
from tinker_cookbook.tasks.registry import get_task
from tinker_cookbook.tasks.single_turn import TaskEnvironment, single_turn_group
from tinker_cookbook.tasks.types import Task, TaskItem

MEASURED = ("no_debate", "with_key")
"""Views of a debate that its judge can be measured on: the answers alone, and with the answer key beside them."""


@chz.chz(typecheck=True)
class Debates(TaskEnvironment):
    """A task's items as groups of debates; the test set are answers alone."""

    protocol: ProtocolConfig = chz.field(default_factory=ProtocolConfig, doc="who answers, who argues, in which order")
    judge: JudgeConfig = chz.field(doc="who decides")
    held_out_judge: JudgeConfig | None = chz.field(
        default=None, doc="another judge of the same debates, which is measured and never trained on"
    )
    measure: tuple[str, ...] = chz.field(
        default=(), doc="what else the judge is shown, to be measured: no_debate (the answers alone), with_key"
    )
    debate_train: DebateTrain = chz.field(
        default="rs_grpo", doc=f"who survives into training, and with which reward: {', '.join(MODES)}"
    )
    debate_reward: str | None = chz.field(
        default=None,
        doc=f"another reward of the mode: a weighted sum of {', '.join(TERMS)} or functions of your own, e.g. judge:0.5,task:0.5",
    )
    advantage: AdvantageConfig | None = chz.field(
        default=None, doc="how the run makes advantages of rewards, to tell what cannot learn; None: as the mode does"
    )
    prompts: DebatePrompts = chz.field(default_factory=DebatePrompts, doc="wording of the turns")
    max_tokens: int | None = chz.field(default=None, doc="longest turn, to tell which questions fit; None: no limit")
    context_window: int | None = chz.field(default=None, doc="of the policy; None: no limit")

    @chz.validate
    def _known_measures(self) -> None:
        if unknown := set(self.measure) - set(MEASURED):
            raise ConfigurationError(f"measure={','.join(sorted(unknown))} is unknown; use {', '.join(MEASURED)}")

    def read(self, settings: DatasetSettings) -> tuple[Task, list[TaskItem], list[TaskItem]]:
        if settings.group_size % self.protocol.num_speakers:
            raise ConfigurationError(_not_whole(settings.group_size, self.protocol.num_speakers))
        for judge in (self.judge, self.held_out_judge):
            if judge is not None:
                check_judge(judge)
                _check_confidence(judge, self.protocol)
        task, train, test = super().read(settings)
        self.prompts.settle(task.debate_prompts)
        mode, advantage = self.mode, self.advantage or self.mode.advantage
        mode.check(self.protocol, self.judge, task, advantage)
        mode.check_group(self.protocol, settings.group_size // self.protocol.num_speakers, advantage)
        if self.protocol.answers == "assigned":
            others = _references(task, train)
            for item in train:
                wrong_answers(item, task.reference_answer(item), others, len(self.protocol.places) - 1)
        return task, train, test

    @property
    def mode(self) -> TrainingMode:
        """Raises ConfigurationError for an unknown mode or reward."""
        return get_mode(self.debate_train, self.debate_reward)

    @property
    def added_request(self) -> str:
        task = get_task(self.task, self.reward_fn)
        return answer_request(self.protocol, self.prompts.settle(task.debate_prompts, self.protocol.seats))

    async def make_protocol(self, task: Task, renderer: Renderer, seed: int) -> DebateProtocol:
        """The protocol with its judges."""
        dialogue = make_dialogue(task, renderer, self.protocol, self.prompts, self.max_tokens, self.context_window)
        judge = await _make_judge(self.judge, seed)
        measured: dict[str, Judge] = dict.fromkeys(self.measure, judge)
        if self.held_out_judge is not None:
            measured["held_out"] = await _make_judge(self.held_out_judge, seed)
        others = _references(task, self.load()[1]) if self.protocol.answers == "assigned" else []
        return DebateProtocol(dialogue, judge, self.mode, measured, others, seed)

    async def make_group(self, task: Task, settings: DatasetSettings) -> Callable[[Any, int, Place], EnvGroupBuilder]:
        renderer = settings.renderer()
        protocol = await self.make_protocol(task, renderer, settings.seed)
        longest = protocol.dialogue.max_first_prompt

        def make(item: TaskItem, attempts: int, place: Place) -> EnvGroupBuilder:
            if place.is_test:
                return single_turn_group(task, item, renderer, attempts, self.added_request, longest)
            return DebateGroupBuilder(protocol, item, attempts // self.protocol.num_speakers, place.key)

        return make


async def _make_judge(config: JudgeConfig, seed: int) -> Judge:
    return await make_judge(config if config.seed is not None else chz.replace(config, seed=seed))


def _references(task: Task, items: list[TaskItem]) -> list[str]:
    return list(dict.fromkeys(task.reference_answer(item) for item in items))


def _check_confidence(judge: JudgeConfig, protocol: ProtocolConfig) -> None:
    if judge.name == "confidence" and protocol.answers == "assigned":
        raise ConfigurationError(
            "judge=confidence with protocol.answers=assigned: nobody states a confidence in an answer that is assigned; use "
            "another judge"
        )


def _not_whole(group_size: int, speakers: int) -> str:
    if speakers == 2:
        return f"group_size={group_size} is odd, but a debate takes two rollouts; make num_rollouts / num_groups even"
    return (
        f"group_size={group_size} is no multiple of {speakers}, but a debate takes {speakers} rollouts; make "
        f"num_rollouts / num_groups a multiple of {speakers}"
    )
