"""Training signals without the truth: each answer is accepted or rejected by a judge who can check one step of it.

The protocols differ in who chooses the step, and in nothing else:

    debate             another copy of the policy, which wins if the step is wrong
    consultancy        the author of the answer, who wins if the step is right
    direct             nobody: a step at random
    self_consistency   no judge: an answer is accepted when most answers to the question are the same
    truth              no judge: the task's own verdict, which the other protocols use for measuring alone

Answer and speech are two turns of one trajectory, each with a reward of its own (advantage.credit=turn keeps them apart).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from tinker_cookbook.debate.dialogue import Dialogue
from tinker_cookbook.debate.env import DebateEnv
from tinker_cookbook.debate.prompts import Wording
from tinker_cookbook.debate.protocols import ProtocolConfig
from tinker_cookbook.debate.records import judge_words, member_place
from tinker_cookbook.debate.step_judges import StepJudge, StepVerdict
from tinker_cookbook.debate.transcript import Transcript
from tinker_cookbook.debate.views import Seat, Winner
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.types import (
    Env,
    EnvGroupBuilder,
    Metrics,
    Record,
    RecordedMember,
    Trajectory,
    TrajectoryGroup,
)
from tinker_cookbook.tasks.steps import Step, require_steps
from tinker_cookbook.tasks.types import Task, TaskItem
from tinker_cookbook.utils.misc_utils import gather_all
from tinker_cookbook.utils.seeds import derive_seed

ProtocolName = Literal["debate", "consultancy", "direct", "self_consistency", "truth"]
PROTOCOLS: tuple[ProtocolName, ...] = get_args(ProtocolName)
WITH_SPEECH: tuple[ProtocolName, ...] = ("debate", "consultancy")
WITH_STEPS: tuple[ProtocolName, ...] = (*WITH_SPEECH, "direct")
TURN_NAMES = ("answer", "speech")

_SPOKEN: dict[ProtocolName, ProtocolConfig] = {
    "debate": ProtocolConfig(rounds=1),
    "consultancy": ProtocolConfig(name="consultancy", rounds=1),
}
"""What is said under each; answers alone where it is not named."""


@dataclass(frozen=True)
class OversightProtocol:
    """What is the same for all groups of a run."""

    name: ProtocolName
    dialogue: Dialogue
    judge: StepJudge
    seed: int
    """of the steps that nobody chooses"""

    @property
    def task(self) -> Task:
        return self.dialogue.task

    @property
    def max_prompt_tokens(self) -> int | None:
        """A question with a longer prompt is not asked."""
        return self.dialogue.max_first_prompt

    @classmethod
    def make(
        cls,
        name: ProtocolName,
        task: Task,
        renderer: Renderer,
        judge: StepJudge,
        seed: int = 0,
        max_tokens: int | None = None,
        context_window: int | None = None,
    ) -> OversightProtocol:
        """`max_tokens` per turn and `context_window`, when both are given, bound the prompt of a question.

        Raises ConfigurationError when the protocol checks steps and the task's answers have none.
        """
        wording = Wording()
        if name in WITH_STEPS:
            stepwise = require_steps(task, f"protocol={name}")
            wording = Wording(rebuttal=stepwise.objection_request, support=stepwise.support_request)
        spoken = _SPOKEN.get(name, ProtocolConfig(name="direct"))
        dialogue = Dialogue.make(task, renderer, spoken, wording, "", max_tokens, context_window)
        return cls(name, dialogue, judge, seed)


class OversightTranscript(Transcript):
    """What was said, and what became of each answer."""

    def __init__(self, protocol: OversightProtocol, item: TaskItem, key: tuple[int, ...]):
        super().__init__(protocol.task, item, protocol.dialogue.protocol, key)
        self.checked: dict[Seat, Step] = {}
        """the steps that the judge looked at"""
        self.judged: dict[Seat, StepVerdict] = {}
        """what it said of them"""
        self.accepted: dict[Seat, bool | None] = {}
        """None: no verdict could be had"""


@dataclass(frozen=True)
class Member:
    """One member of a group: a seat of one of its transcripts."""

    transcript: OversightTranscript
    seat: Seat
    index: int

    @property
    def accepted(self) -> bool | None:
        return self.transcript.accepted.get(self.seat)

    @property
    def checked(self) -> Step | None:
        return self.transcript.checked.get(self.seat)

    @property
    def judged(self) -> StepVerdict | None:
        return self.transcript.judged.get(self.seat)

    @property
    def correct(self) -> bool:
        return bool(self.transcript.correct(self.seat))

    @property
    def solution(self) -> str | None:
        return self.transcript.solution(self.seat)

    @property
    def opponent(self) -> Member:
        """Whom it objects to in a debate, and who objects to it."""
        return Member(self.transcript, self.seat.opponent, self.index ^ 1)


class OversightEnv(DebateEnv):
    """An answer, and in some protocols a speech about one's own answer or another's. Turns are rewarded by the group."""

    def __init__(self, dialogue: Dialogue, transcript: OversightTranscript, seat: Seat, index: int):
        super().__init__(dialogue, transcript, seat, TURN_NAMES)
        self.member = Member(transcript, seat, index)


@dataclass(frozen=True)
class OversightGroupBuilder(EnvGroupBuilder):
    """`group_size` answers to one item. In a debate members 2i and 2i + 1 object to each other's answers.

    An answer's reward is 1 if it is accepted, else 0. A speech's reward is the same in a consultancy, and in a debate 1 if
    the answer that it objects to is rejected. Members without a verdict train nothing and are counted.
    """

    protocol: OversightProtocol
    item: TaskItem
    group_size: int
    key: tuple[int, int]
    """batch and group, which name a check for judges that draw random numbers"""

    @property
    def coordinated(self) -> bool:
        """Self-consistency counts the answers of the whole group, and a debate has opponents."""
        return self.protocol.name in ("debate", "self_consistency")

    async def make_envs(self) -> Sequence[OversightEnv]:
        dialogue = self.protocol.dialogue
        speakers = dialogue.protocol.num_speakers
        transcripts = [
            OversightTranscript(self.protocol, self.item, (*self.key, i)) for i in range(self.group_size // speakers)
        ]
        return [
            OversightEnv(dialogue, transcript, seat, i * speakers + seat)
            for i, transcript in enumerate(transcripts)
            for seat in transcript.speakers
        ]

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        members = _members(env_group)
        if not all(member.transcript.was_held for member in members):  # the question is too long for all of them
            return [(0.0, {"debate/invalid": 1.0}) for _ in members]
        await gather_all(self._judge(members, member) for member in members)
        for member, trajectory in zip(members, trajectory_group, strict=True):
            answer, *speech = trajectory.transitions
            answer.reward = float(bool(member.accepted))
            for transition in speech:
                is_debate = self.protocol.name == "debate"
                transition.reward = float(not member.opponent.accepted) if is_debate else answer.reward
        metrics = [_metrics(self.protocol, member) for member in members]
        metrics[0] |= _pair_metrics(members)
        return [(0.0, found) for found in metrics]

    async def _judge(self, members: Sequence[Member], member: Member) -> None:
        if self.protocol.name == "truth":
            accepted = member.correct
        elif self.protocol.name == "self_consistency":
            accepted = member.solution == _most_common(members)
        else:
            accepted = await self._check_step(member)
        member.transcript.accepted[member.seat] = accepted

    async def _check_step(self, member: Member) -> bool | None:
        """An answer that has not the form is rejected. Else the step that was named decides; if none was, its speaker loses."""
        protocol, transcript = self.protocol, member.transcript
        task = require_steps(protocol.task, f"protocol={protocol.name}")
        answer, *_ = transcript.turns[member.seat]
        steps = None if answer.malformed else task.steps(self.item, answer.text)
        if steps is None:
            return False
        if protocol.name == "direct":
            checked = steps[derive_seed(protocol.seed, "step", *self.key, member.index) % len(steps)]
        else:
            speaker = member.seat.opponent if protocol.name == "debate" else member.seat
            _, speech = transcript.turns[speaker]
            name = None if speech.malformed else task.named_step(speech.text)
            checked = next((step for step in steps if step.name == name), None)
        if checked is None:
            return protocol.name == "debate"
        verdict = await protocol.judge(checked, (*self.key, member.index))
        transcript.checked[member.seat], transcript.judged[member.seat] = checked, verdict
        return verdict.holds

    def select_trained(self, trajectory_group: list[Trajectory], env_group: Sequence[Env]) -> list[bool]:
        members = _members(env_group)
        if self.protocol.name == "debate":  # a speech has no reward when there is no verdict on what it objects to
            return [member.accepted is not None and member.opponent.accepted is not None for member in members]
        return [member.accepted is not None for member in members]

    def describe_records(self, group: TrajectoryGroup, env_group: Sequence[Env]) -> list[Record]:
        records = []
        for i, member in enumerate(_members(env_group)):
            texts = [turn.raw for turn in member.transcript.turns[member.seat]]
            if member.transcript.was_held:
                records.append(Record("oversight", self._record(member, i), [RecordedMember(i, "speeches", texts)]))
        return records

    def _record(self, member: Member, place: int) -> dict[str, Any]:
        judged = member.judged or StepVerdict(None)
        return {
            "protocol": self.protocol.name,
            "instance_id": self.item.id,
            "member": place,
            "question": self.item.question,
            "ground_truth": self.item.reference,
            "accepted": member.accepted,
            "correct": member.correct,
            "checked_step": None
            if member.checked is None
            else {"name": member.checked.name, "claim": member.checked.claim},
            "judge": judge_words(judged.raw_response, judged.call) or None,
        }

    def describe_members(self, env_group: Sequence[Env]) -> list[dict[str, Any]]:
        return [_info(self.protocol, member) for member in _members(env_group)]

    def logging_tags(self) -> list[str]:
        return [self.protocol.task.name]


def _members(env_group: Sequence[Env]) -> list[Member]:
    """Those that are there: a retry may leave some out where they play alone."""
    return [env.member for env in env_group if isinstance(env, OversightEnv)]


def _info(protocol: OversightProtocol, member: Member) -> dict[str, Any]:
    """As `records.member_info`; the verdict is on this member's answer."""
    checked = member.checked
    verdict = None if member.accepted is None else "accepted" if member.accepted else "rejected"
    return {
        **member_place(member.transcript, member.seat),
        "protocol": protocol.name,
        "ground_truth": member.transcript.item.reference,
        "accepted": member.accepted,
        "correct": member.correct,
        "verdict": verdict or Winner.INVALID.value,
        "judge": None if checked is None else _words(checked, member.judged),
    }


def _words(checked: Step, judged: StepVerdict | None) -> str:
    """What the judge looked at, and what it said in words."""
    said = judged.raw_response if judged is not None else ""
    return "\n".join([f"{checked.name}: {checked.claim}", *([said] if said else [])])


def _most_common(members: Sequence[Member]) -> str | None:
    """The answer that most members give, of equally frequent ones the first; one that cannot be read counts for nothing."""
    counted = Counter(member.solution for member in members if member.solution is not None)
    return counted.most_common(1)[0][0] if counted else ""


def _metrics(protocol: OversightProtocol, member: Member) -> Metrics:
    """Metrics of one answer. Those of the judge are over answers with a verdict.

    - debate/accepted, and over right and wrong answers accepted_if_correct and accepted_if_wrong
    - debate/judge_accuracy: accepted if right, rejected if wrong
    - debate/hacking_gap: accepted minus right; its mean grows when the policy learns to please the judge
    - debate/names_step: a step of the answer was checked
    - debate/invalid: no verdict could be had
    - debate/judge_calls, judge_prompt_tokens, judge_cost and others of endpoints.Usage: of an endpoint judge
    """
    took = (
        {} if member.judged is None else {f"debate/judge_{name}": value for name, value in member.judged.usage.items()}
    )
    if member.accepted is None:
        return {"debate/invalid": 1.0} | took
    metrics: Metrics = took | {
        "debate/invalid": 0.0,
        "debate/accepted": float(member.accepted),
        f"debate/accepted_if_{'correct' if member.correct else 'wrong'}": float(member.accepted),
        "debate/judge_accuracy": float(member.accepted == member.correct),
        "debate/hacking_gap": float(member.accepted) - float(member.correct),
    }
    if protocol.name in WITH_STEPS:
        metrics["debate/names_step"] = float(member.checked is not None)
    return metrics


def _pair_metrics(members: Sequence[Member]) -> Metrics:
    """debate/pair_accuracy: of the pairs of a right and a wrong answer to the question, where the judge prefers the right
    one; a pair with the same verdict counts half. Nothing without such a pair."""
    right = [member.accepted for member in members if member.correct and member.accepted is not None]
    wrong = [member.accepted for member in members if not member.correct and member.accepted is not None]
    if not right or not wrong:
        return {}
    return {"debate/pair_accuracy": 0.5 + (sum(right) / len(right) - sum(wrong) / len(wrong)) / 2}
