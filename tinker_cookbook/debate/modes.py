"""How a finished debate trains: what each turn is worth, who survives into training, and against whom it is measured.

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

from tinker_cookbook.debate.judges import JUDGES, JudgeConfig
from tinker_cookbook.debate.protocols import ProtocolConfig
from tinker_cookbook.debate.rewards import TERMS, DebateReward
from tinker_cookbook.debate.transcript import Transcript
from tinker_cookbook.debate.views import Seat
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl.advantages import AdvantageConfig
from tinker_cookbook.tasks.types import Task

DebateTrain: TypeAlias = str
"""The name of a mode."""

LOSER_WEIGHT = 0.5
"""How much a loser counts in `negatives`. Below 1: what is pushed down has nowhere in particular to go."""
TRUTHFUL = ("key", "scripted:truth")
CERTAIN = ("key", "confidence")
"""Judges that say the same however often they are asked, as scripted ones do: the winner has all votes."""
UNDECIDED = ("scripted:TIE", "scripted:INVALID")
SAME_OF_ONE = ("scripted:A", "scripted:B", "scripted:longer")
"""Judges that say the same of every single answer: its denial has no words."""
SAME_SEAT = ("scripted:A", "scripted:B")
"""Judges that favour a seat, whoever sits there."""
COMPARED = ("mean", "zscore", "leave_one_out", "role_mean")
"""Baselines that are made of the rewards of others: where these are equal nothing trains."""
VERDICT_TERMS = frozenset({"judge", "soft", "win"})


def compares(advantage: AdvantageConfig) -> bool:
    """Whether every turn is measured against others of its question."""
    later = advantage.later_baseline or advantage.baseline
    return advantage.baseline in COMPARED and (advantage.credit == "episode" or later in COMPARED)


class TrainingMode(ABC):
    """Rewards of a debate that has its verdict. Picklable."""

    name: str
    advantage: AdvantageConfig
    """how its rewards become advantages, unless the user says otherwise"""

    @abstractmethod
    def turn_rewards(self, transcript: Transcript, seat: Seat) -> list[float]:
        """One for each turn that the policy said for the seat, in order."""

    @abstractmethod
    def is_trained(self, transcript: Transcript, seat: Seat) -> bool:
        """Whether the seat survives into training. An INVALID debate never does; its transcript is not asked about."""

    def role(self, transcript: Transcript, seat: Seat) -> str:
        """By which advantage.baseline=role keeps its running means."""
        return f"{transcript.task.name}/{seat.name}"

    def check(  # noqa: B027
        self, protocol: ProtocolConfig, judge: JudgeConfig, task: Task, advantage: AdvantageConfig | None = None
    ) -> None:
        """Raise ConfigurationError for a combination that cannot train anything. `advantage`: None for the mode's own."""

    def check_group(self, protocol: ProtocolConfig, num_debates: int, advantage: AdvantageConfig) -> None:  # noqa: B027
        """Raise ConfigurationError when groups of so many debates leave nobody to be compared with."""


@dataclass(frozen=True)
class Mode(TrainingMode):
    """A mode of the library: who survives, with which reward, and how the reward is shared out among the turns."""

    name: str
    survivors: Literal["winners", "decided"]
    """winners alone, or both sides of a debate that has a winner"""
    reward: DebateReward
    advantage: AdvantageConfig
    by_turn: bool = False
    """the task's reward goes to the answer, all else to each speech; else the whole reward is that of the debate"""
    loser_weight: float = 1.0
    """what losers' rewards are multiplied by"""

    def turn_rewards(self, transcript: Transcript, seat: Seat) -> list[float]:
        turns = transcript.sampled_turns(seat)
        weight = 1.0 if transcript.won(seat) else self.loser_weight
        of_answer = weight * self.reward.only("task")(transcript, seat)
        of_rest = weight * self.reward.without("task")(transcript, seat)
        if self.by_turn:
            return [of_answer if turn.kind == "answer" else of_rest for turn in turns]
        rewards = [of_answer if turn.kind == "answer" else 0.0 for turn in turns]
        rewards[-1] += of_rest
        return rewards

    def is_trained(self, transcript: Transcript, seat: Seat) -> bool:
        verdict = transcript.verdict
        if self.survivors == "winners":
            return transcript.won(seat)
        return verdict is not None and verdict.winner.seat is not None

    def check(
        self, protocol: ProtocolConfig, judge: JudgeConfig, task: Task, advantage: AdvantageConfig | None = None
    ) -> None:
        advantage = advantage or self.advantage
        problems = (
            self._no_winner(protocol, judge),
            self._no_answer(protocol, advantage),
            self._no_probability(judge),
            self._no_turns(protocol),
            self._no_verdict(advantage),
            self._same_verdicts(protocol, judge, advantage),
            self._equal_winners(judge, task, advantage),
        )
        if problem := next(filter(None, problems), None):
            raise ConfigurationError(f"debate_train={self.name} {problem}")

    def _no_winner(self, protocol: ProtocolConfig, judge: JudgeConfig) -> str | None:
        if judge.name in UNDECIDED:
            return f"with judge={judge.name} cannot learn: no debate has a winner; use another judge"
        if judge.name in SAME_SEAT and judge.both_orders and len(protocol.places) > 1:
            return (
                f"with judge={judge.name} and judge.both_orders=true cannot learn: the two orders never agree, so that "
                "every debate is a tie; use another judge"
            )
        return None

    def _no_answer(self, protocol: ProtocolConfig, advantage: AdvantageConfig) -> str | None:
        if self.reward.names == {"task"} and protocol.answers == "assigned" and advantage.baseline != "constant":
            return (
                "rewards the answer, and protocol.answers=assigned leaves none to the policy: nothing would train; use "
                "debate_train=judge, or protocol.answers=proposed"
            )
        return None

    def _no_probability(self, judge: JudgeConfig) -> str | None:
        is_soft = judge.soft or judge.votes > 1 or judge.name not in JUDGES
        if "soft" in self.reward.names and not is_soft:
            return (
                f"trains on a verdict's probability, and judge={judge.name} gives none; use judge=lm judge.soft=True, "
                "judge.votes=5, or debate_train=judge"
            )
        return None

    def _no_turns(self, protocol: ProtocolConfig) -> str | None:
        if self.by_turn and (protocol.name not in ("debate", "consultancy") or protocol.answers == "assigned"):
            return (
                f"compares answers with answers and speeches with speeches, and in protocol={protocol.name} with "
                f"answers={protocol.answers} not every seat has both; use debate_train=judge"
            )
        if self.by_turn and protocol.num_rounds == 0:
            return "needs speeches, and protocol.rounds=0 has none; use debate_train=mixed"
        return None

    def _no_verdict(self, advantage: AdvantageConfig) -> str | None:
        if self.survivors == "decided" and advantage.baseline == "constant":
            return (
                "with advantage.baseline=constant cannot learn: winners and losers would be trained alike; use another "
                "baseline, or debate_train=rejection, which trains winners alone"
            )
        return None

    def _same_verdicts(self, protocol: ProtocolConfig, judge: JudgeConfig, advantage: AdvantageConfig) -> str | None:
        goes_by_verdict_alone = self.reward.names <= VERDICT_TERMS and compares(advantage)
        if len(protocol.places) == 1 and judge.name in SAME_OF_ONE:
            nobody_survives = self.survivors == "winners" and judge.name == "scripted:B"
            if nobody_survives or goes_by_verdict_alone:
                return (
                    f"with judge={judge.name} cannot learn under protocol={protocol.name}: of a single answer this judge "
                    "always says the same, so that no reward differs; use judge=lm, key, confidence or scripted:truth"
                )
        elif judge.name in SAME_SEAT and goes_by_verdict_alone and advantage.baseline == "role_mean":
            return (
                f"with judge={judge.name} and advantage.baseline=role_mean cannot learn: a seat is compared with the same "
                "seat of other debates, and its verdict is always the same; use another judge or baseline"
            )
        return None

    def _equal_winners(self, judge: JudgeConfig, task: Task, advantage: AdvantageConfig) -> str | None:
        if self.survivors == "decided" or not compares(advantage):
            return None
        knows = judge.name in TRUTHFUL and task.pays_zero_or_one
        is_sure = str(judge.name).startswith("scripted:") or judge.name in CERTAIN
        equal = {"judge", "win"} | ({"task"} if knows else set()) | ({"soft"} if is_sure else set())
        if not self.reward.names <= equal:
            return None
        if "task" in self.reward.names:
            return (
                f"with judge={judge.name} cannot learn: this judge knows the truth, so every winner is right, and "
                f"task={task.name} pays 1 for every right answer; within a question no winner's reward differs. Use "
                "debate_train=judge or rejection, a judge that can be wrong, or a reward that varies among right answers"
            )
        return (
            f"with debate_reward={','.join(sorted(self.reward.names))} cannot learn: winners alone train, each has won, and "
            "within a question no winner's reward differs; use debate_train=judge or rejection"
        )

    def check_group(self, protocol: ProtocolConfig, num_debates: int, advantage: AdvantageConfig) -> None:
        if not compares(advantage):
            return
        of_a_debate = 1 if self.survivors == "winners" or advantage.baseline == "role_mean" else protocol.num_speakers
        if num_debates * of_a_debate > 1:
            return
        said = f"debate_train={self.name} compares"
        whom, how = f"the winners of a question (advantage.baseline={advantage.baseline})", "there is one winner"
        if self.survivors == "decided":
            whom, how = f"what a question's rollouts got (advantage.baseline={advantage.baseline})", "each is alone"
        raise ConfigurationError(
            f"{said} {whom}, and with one debate per question {how}: nothing would train. Raise num_rollouts, or use "
            "debate_train=rejection or advantage.baseline=role"
        )


_EPISODE = AdvantageConfig(baseline="mean", scale="sequence")
_BY_TURN = AdvantageConfig(baseline="zscore", later_baseline="none", credit="turn", scale="turn")
_JUDGE, _TASK = DebateReward.parse("judge"), DebateReward.parse("task")

_LIBRARY = (
    Mode("rejection", "winners", _TASK, AdvantageConfig(baseline="constant", scale="sequence")),
    Mode("rs_grpo", "winners", _TASK, _EPISODE),
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
MODES: dict[str, TrainingMode] = {mode.name: mode for mode in _LIBRARY}
"""Name -> mode: the library's, and those of `register_mode`."""

ADVANTAGES = {mode.name: mode.advantage for mode in _LIBRARY}
"""Of the library's modes. rejection: 1 / tokens for each token of a winner. rs_grpo: the winner's task reward, as if there had
been no debate, minus the mean over the winners of the same question, / tokens; the same value on all of its turns."""


def register_mode(mode: TrainingMode) -> None:
    """Make a mode of one's own known under its name. Raises ConfigurationError for a name that is taken."""
    if mode.name in MODES:
        raise ConfigurationError(f"debate_train={mode.name!r} is taken; choose another")
    MODES[mode.name] = mode


def get_mode(name: str, debate_reward: str | None = None) -> TrainingMode:
    """The mode of this name, with another reward if one is given (`rewards.DebateReward.parse`).

    Raises:
        ConfigurationError: an unknown name or term, or a mode whose reward cannot be replaced.
    """
    if name not in MODES:
        raise ConfigurationError(f"debate_train={name!r} is unknown; use {', '.join(MODES)}")
    mode = MODES[name]
    if debate_reward is None:
        return mode
    if not isinstance(mode, Mode) or mode.advantage.baseline == "constant":
        raise ConfigurationError(
            f"debate_reward={debate_reward!r} with debate_train={name}, which gives every survivor the same weight; use "
            f"another mode. Terms: {', '.join(TERMS)}"
        )
    return replace(mode, reward=DebateReward.parse(debate_reward))
