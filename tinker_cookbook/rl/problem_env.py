"""Problems with a checkable answer as environments: give question and checks, get a one-turn env and its group."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinker_cookbook.completers import StopCondition
from tinker_cookbook.renderers import Message, Renderer, get_text_content
from tinker_cookbook.rl.records import transition_record
from tinker_cookbook.rl.types import (
    Action,
    ActionExtra,
    Env,
    EnvGroupBuilder,
    Metrics,
    Record,
    StepResult,
    TrajectoryGroup,
)
from tinker_cookbook.utils.lazy import tinker

if TYPE_CHECKING:
    from tinker_cookbook.rl.types import Observation


class ProblemEnv(Env):
    """One question, one answer: reward = format_coef * (format - 1) + correct, each of the two 0 or 1.

    Args:
        convo_prefix: messages before the question (system prompt, examples).
        require_stop_sequence_for_format: an answer that was cut off counts as badly formatted.
    """

    def __init__(
        self,
        renderer: Renderer,
        convo_prefix: list[Message] | None = None,
        format_coef: float = 0.1,
        require_stop_sequence_for_format: bool = True,
    ):
        self.renderer = renderer
        self.convo_prefix = convo_prefix or []
        self.format_coef = format_coef
        self.require_stop_sequence_for_format = require_stop_sequence_for_format
        self.reply = ""

    @abstractmethod
    def get_question(self) -> str: ...

    @abstractmethod
    def check_answer(self, sample_str: str) -> bool: ...

    @abstractmethod
    def check_format(self, sample_str: str) -> bool: ...

    @abstractmethod
    def get_reference_answer(self) -> str: ...

    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        messages: list[Message] = [*self.convo_prefix, {"role": "user", "content": self.get_question()}]
        return self.renderer.build_generation_prompt(messages), self.renderer.get_stop_sequences()

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        message, termination = self.renderer.parse_response(action)
        self.reply = get_text_content(message)
        ended = termination.is_clean or not self.require_stop_sequence_for_format
        well_formed = ended and self.check_format(self.reply)
        correct = self.check_answer(self.reply)
        return StepResult(
            reward=self.format_coef * (float(well_formed) - 1) + float(correct),
            episode_done=True,
            next_observation=tinker.ModelInput.empty(),
            next_stop_condition=self.renderer.get_stop_sequences(),
            metrics={"format": float(well_formed), "correct": float(correct)},
            logs={"question": self.get_question(), "reply": self.reply, "reference": self.get_reference_answer()},
        )


@dataclass(frozen=True)
class ProblemGroupBuilder(EnvGroupBuilder):
    """`num_envs` attempts at the problem that `env_thunk` makes. Pickles when the thunk does (functools.partial)."""

    env_thunk: Callable[[], ProblemEnv]
    num_envs: int
    dataset_name: str = "problems"

    async def make_envs(self) -> Sequence[ProblemEnv]:
        return [self.env_thunk() for _ in range(self.num_envs)]

    def make_records(self, group: TrajectoryGroup, env_group: Sequence[Env]) -> list[Record]:
        records = []
        for i, (trajectory, reward) in enumerate(zip(group.trajectories_G, group.get_total_rewards(), strict=True)):
            transition = trajectory.transitions[-1]
            metrics: Metrics = transition.metrics
            reply = str(transition.logs.get("reply", ""))
            content = {
                "tags": self.logging_tags(),
                "member": i,
                "question": transition.logs.get("question"),
                "ground_truth": transition.logs.get("reference"),
                **transition_record(transition, reply),
                "reward": reward,
                "metrics": metrics,
            }
            records.append(Record("baseline", content))
        return records

    def logging_tags(self) -> list[str]:
        return [self.dataset_name]
