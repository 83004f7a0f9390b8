"""How a finished debate trains: the reward of each turn, who survives into training, and the baseline of the
advantages.

rejection           winners, each with the same weight
rs_grpo             winners, by the task's reward against the other winners of the question
judge               both sides, by the verdict: zero-sum
soft_judge          the same, by the probability that the judge gives each side
spiral              the same as judge, each seat against its own running mean
mixed               both sides, by verdict and task together
solution_argument   answers by the task's reward against the answers to the question, speeches by the verdict
negatives           winners up, losers down by half as much
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from tinker_cookbook.debate.judges import JudgeConfig
from tinker_cookbook.debate.protocols import ProtocolConfig
from tinker_cookbook.debate.rewards import TERMS, DebateReward
from tinker_cookbook.debate.transcript import Transcript
from tinker_cookbook.debate.views import Seat
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.plugins import Kind, Registry
from tinker_cookbook.rl.advantages import AdvantageConfig

DebateTrain: TypeAlias = str
"""The name of a mode, or a custom one as `package.module:object`, `path/file.py:object`."""

LOSER_WEIGHT = 0.5
"""How much a loser counts in `negatives`. Below 1, because pushing a reply down does not say what to prefer to it."""


class TrainingMode(ABC):
    """Rewards of a debate with a verdict. Picklable."""

    name: str
    advantage: AdvantageConfig
    """how its rewards become advantages, unless the user says otherwise"""

    @abstractmethod
    def turn_rewards(self, transcript: Transcript, seat: Seat) -> list[float]:
        """One for each turn that the policy spoke for the seat, in order."""

    @abstractmethod
    def is_trained(self, transcript: Transcript, seat: Seat) -> bool:
        """Whether the seat survives into training. An INVALID debate never does; this method is not called for it."""

    def role(self, transcript: Transcript, seat: Seat) -> str:
        """The role for the running means of advantage.baseline=role."""
        return f"{transcript.task.name}/{seat.name}"

    def check(self, protocol: ProtocolConfig, judge: JudgeConfig) -> None:  # noqa: B027
        """Raise ConfigurationError for debates that this mode has no meaningful rewards for. If all rewards are equal,
        the run reports it (`rl.untrained`).
        """

    def check_advantage(self, chosen: AdvantageConfig) -> None:
        """Raise ConfigurationError for advantages that this mode cannot train with."""
        if self.advantage.baseline == "constant" and chosen != self.advantage:
            raise ConfigurationError(
                f"debate_train={self.name} trains each winner with the same weight, whatever its reward; leave preset and "
                "advantage out, or use debate_train=rs_grpo"
            )


@dataclass(frozen=True)
class Mode(TrainingMode):
    """A mode of the library: who survives, with which reward, and how turns share the reward."""

    name: str
    survivors: Literal["winners", "decided"]
    """winners alone, or both sides of a debate that has a winner"""
    reward: DebateReward
    advantage: AdvantageConfig
    by_turn: bool = False
    """the answer gets the task's reward and each speech the other terms; else the debate has one reward"""
    loser_weight: float = 1.0
    """what losers' rewards are multiplied by"""

    def turn_rewards(self, transcript: Transcript, seat: Seat) -> list[float]:
        turns = transcript.sampled_turns(seat)
        weight = 1.0 if transcript.won(seat) else self.loser_weight
        answer_reward = weight * self.reward.only("task")(transcript, seat)
        other_reward = weight * self.reward.without("task")(transcript, seat)
        if self.by_turn:
            return [answer_reward if turn.kind == "answer" else other_reward for turn in turns]
        rewards = [answer_reward if turn.kind == "answer" else 0.0 for turn in turns]
        answers = any(turn.kind == "answer" for turn in turns)
        rewards[-1] += other_reward if answers else answer_reward + other_reward  # a critic gives no answer
        return rewards

    def is_trained(self, transcript: Transcript, seat: Seat) -> bool:
        verdict = transcript.verdict
        if self.survivors == "winners":
            return transcript.won(seat)
        return verdict is not None and verdict.winner.seat is not None

    def check(self, protocol: ProtocolConfig, judge: JudgeConfig) -> None:
        problem, is_soft = None, judge.tells_probabilities
        if "soft" in self.reward.names and not is_soft:
            problem = (
                f"trains on a verdict's probability, and judge={judge.name} gives none; use judge=lm judge.soft=True, "
                "judge.votes=5, or debate_train=judge"
            )
        elif self.by_turn and (protocol.name not in ("debate", "consultancy") or protocol.answers == "assigned"):
            problem = (
                f"compares answers with answers and speeches with speeches, and in protocol={protocol.name} with "
                f"answers={protocol.answers} not every seat has both; use debate_train=judge"
            )
        elif self.by_turn and protocol.num_rounds == 0:
            problem = "needs speeches, and protocol.rounds=0 has none; use debate_train=mixed"
        if problem is not None:
            raise ConfigurationError(f"debate_train={self.name} {problem}")

    def check_advantage(self, chosen: AdvantageConfig) -> None:
        super().check_advantage(chosen)
        if self.survivors == "decided" and chosen.baseline == "constant":
            raise ConfigurationError(
                f"debate_train={self.name} with advantage.baseline=constant: winners and losers would be trained alike; use "
                "another baseline, or debate_train=rejection, which trains winners alone"
            )


_EPISODE = AdvantageConfig(baseline="mean", scale="sequence")
_BY_TURN = AdvantageConfig(baseline="zscore", later_baseline="none", credit="turn", scale="turn")
_JUDGE, _TASK = DebateReward.parse("judge"), DebateReward.parse("task")

_LIBRARY = (
    Mode("rejection", "winners", _TASK, AdvantageConfig(baseline="constant", scale="sequence")),
    Mode("rs_grpo", "winners", _TASK, _EPISODE),  # as without a debate, among the winners of the question
    Mode("judge", "decided", _JUDGE, _EPISODE),
    Mode("soft_judge", "decided", DebateReward.parse("soft"), _EPISODE),
    Mode("spiral", "decided", _JUDGE, AdvantageConfig(baseline="role", scale="sequence")),
    Mode("mixed", "decided", DebateReward.parse("judge:0.5,task:0.5"), _EPISODE),
    Mode("solution_argument", "decided", DebateReward.parse("task,judge"), _BY_TURN, by_turn=True),
    Mode(
        "negatives",
        "decided",
        _JUDGE,
        AdvantageConfig(baseline="none", scale="sequence"),
        loser_weight=LOSER_WEIGHT,
    ),
)
MODES: Registry[TrainingMode] = Registry(
    Kind(
        key="debate_train",
        wanted="a TrainingMode",
        example="""
brief = Mode(  # from tinker_cookbook.debate.modes
    "brief", "decided", DebateReward.parse("judge,length:0.5"), AdvantageConfig(baseline="mean", scale="sequence")
)
""",
        problem=lambda part: (
            None if isinstance(part, TrainingMode) else f"is not a TrainingMode, but {type(part).__name__}"
        ),
    ),
    {mode.name: mode for mode in _LIBRARY},
)
"""The library's modes, and those of `register_mode`."""


def register_mode(mode: TrainingMode) -> None:
    """Register a custom mode under its name. Raises ConfigurationError for a name that is taken."""
    MODES.register(mode.name, mode)


def get_mode(name: str, debate_reward: str | None = None) -> TrainingMode:
    """The mode of this name, or of `package.module:object`, with another reward if one is given (`rewards.DebateReward.parse`).

    Raises:
        ConfigurationError: an unknown name or term, or a mode whose reward cannot be replaced.
    """
    mode = MODES.resolve(name)
    if debate_reward is None:
        return mode
    if not isinstance(mode, Mode) or mode.advantage.baseline == "constant":
        raise ConfigurationError(
            f"debate_reward={debate_reward!r} with debate_train={name}, which gives every survivor the same weight; use "
            f"another mode. Terms: {', '.join(TERMS.names())}"
        )
    return replace(mode, reward=DebateReward.parse(debate_reward))
