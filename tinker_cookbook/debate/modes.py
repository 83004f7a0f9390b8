"""How a finished debate trains: what each turn is worth, and who survives into training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tinker_cookbook.debate.judges import JudgeConfig
from tinker_cookbook.debate.protocols import ProtocolConfig
from tinker_cookbook.debate.transcript import Transcript
from tinker_cookbook.debate.views import Seat
from tinker_cookbook.rl.advantages import AdvantageConfig
from tinker_cookbook.tasks.types import Task

DebateTrain = Literal["rejection", "rs_grpo"]

ADVANTAGES: dict[DebateTrain, AdvantageConfig] = {
    "rejection": AdvantageConfig(baseline="constant", scale="sequence"),
    "rs_grpo": AdvantageConfig(baseline="mean", scale="sequence"),
}
"""How winners are trained. rejection: 1 / tokens for each token of a winner. rs_grpo: the winner's task reward, as if there had
been no debate, minus the mean over the winners of the same question, / tokens; the same value on all of its turns."""


class TrainingMode(ABC):
    """Rewards of a debate that has its verdict. Picklable."""

    name: str

    @abstractmethod
    def turn_rewards(self, transcript: Transcript, seat: Seat) -> list[float]:
        """One for each turn that the policy said for the seat, in order."""

    @abstractmethod
    def is_trained(self, transcript: Transcript, seat: Seat) -> bool:
        """Whether the seat survives into training. An INVALID debate never does; its transcript is not asked about."""

    def role(self, transcript: Transcript, seat: Seat) -> str:
        """By which advantage.baseline=role keeps its running means."""
        return f"{transcript.task.name}/{seat.name}"

    def check(self, protocol: ProtocolConfig, judge: JudgeConfig, task: Task) -> None:  # noqa: B027
        """Raise ConfigurationError for a combination that cannot train anything."""


@dataclass(frozen=True)
class WinnersMode(TrainingMode):
    """Winners alone survive; the reward of an answer is the task's, that of a speech 0."""

    name: str

    def turn_rewards(self, transcript: Transcript, seat: Seat) -> list[float]:
        return [
            transcript.scores[seat].reward if turn.kind == "answer" else 0.0 for turn in transcript.sampled_turns(seat)
        ]

    def is_trained(self, transcript: Transcript, seat: Seat) -> bool:
        return transcript.won(seat)


MODES: Mapping[str, TrainingMode] = {name: WinnersMode(name) for name in ADVANTAGES}


def get_mode(name: str) -> TrainingMode:
    """The mode of this name. Raises KeyError for an unknown one."""
    return MODES[name]
