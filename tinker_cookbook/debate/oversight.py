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

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from tinker_cookbook.completers import StopCondition
from tinker_cookbook.debate.injection import TurnInjection, make_injection
from tinker_cookbook.debate.step_judges import StepJudge
from tinker_cookbook.debate.transcript import Turn
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.renderers.replies import decode_reply, reply_text
from tinker_cookbook.rl.records import transition_record
from tinker_cookbook.rl.types import (
    Action,
    ActionExtra,
    Env,
    EnvGroupBuilder,
    InitialObservationOverflow,
    Metrics,
    Record,
    StepResult,
    Trajectory,
    TrajectoryGroup,
)
from tinker_cookbook.tasks.steps import Step, require_steps
from tinker_cookbook.tasks.types import Task, TaskItem, parse_solution
from tinker_cookbook.utils.lazy import tinker
from tinker_cookbook.utils.misc_utils import gather_all
from tinker_cookbook.utils.reward_threads import call_reward
from tinker_cookbook.utils.seeds import derive_seed

ProtocolName = Literal["debate", "consultancy", "direct", "self_consistency", "truth"]
PROTOCOLS: tuple[ProtocolName, ...] = get_args(ProtocolName)
WITH_SPEECH: tuple[ProtocolName, ...] = ("debate", "consultancy")
WITH_STEPS: tuple[ProtocolName, ...] = (*WITH_SPEECH, "direct")


@dataclass(frozen=True)
class OversightProtocol:
    """What is the same for all groups of a run."""

    name: ProtocolName
    task: Task
    renderer: Renderer
    judge: StepJudge
    seed: int
    """of the steps that nobody chooses"""
    request: TurnInjection | None
    """what asks for the speech, between the two turns; None without a speech"""
    max_prompt_tokens: int | None = None
    """a question with a longer prompt is not asked"""

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
        request = None
        if name in WITH_STEPS:
            stepwise = require_steps(task, f"protocol={name}")
            if name in WITH_SPEECH:
                text = stepwise.objection_request if name == "debate" else stepwise.support_request
                request = make_injection(renderer, text)
        room = None
        if max_tokens is not None and context_window is not None:
            # An answer; then the other's answer in the request, and the speech.
            around = 0 if request is None else len(request.after_cut) + len(request.suffix)
            room = context_window - around - max_tokens * {"debate": 3, "consultancy": 2}.get(name, 1)
            if room < 1:
                raise ConfigurationError(
                    f"max_tokens={max_tokens} leaves no room for a question in the context of {context_window}; lower max_tokens"
                )
        return cls(name, task, renderer, judge, seed, request, room)


@dataclass
class Member:
    """What one member of a group has said, and what became of it."""

    answered: asyncio.Event = field(default_factory=asyncio.Event)
    answer: Turn | None = None
    speech: Turn | None = None
    correct: bool = False
    checked: Step | None = None
    """the step that the judge looked at"""
    accepted: bool | None = None
    """None: no verdict could be had"""


class OversightEnv(Env):
    """An answer, and in some protocols a speech about one's own answer or another's."""

    def __init__(self, protocol: OversightProtocol, item: TaskItem, members: Sequence[Member], index: int):
        self.protocol, self.item, self.members, self.index = protocol, item, members, index
        self._prompt: list[int] = []

    async def initial_observation(self) -> tuple[tinker.ModelInput, StopCondition] | InitialObservationOverflow:
        renderer, limit = self.protocol.renderer, self.protocol.max_prompt_tokens
        prompt = renderer.build_generation_prompt(self.protocol.task.messages(self.item))
        self._prompt = prompt.to_ints()
        if limit is not None and prompt.length > limit:
            return InitialObservationOverflow(0.0, {"context_overflow": 1.0})
        return prompt, renderer.get_stop_sequences()

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        protocol, renderer, own = self.protocol, self.protocol.renderer, self.members[self.index]
        malformed = renderer.holds_control_token(action)
        turn = Turn(action, reply_text(renderer, action), decode_reply(renderer, action), malformed)
        stopped = float((extra or {}).get("stop_reason") == "stop")
        if own.answer is not None:
            own.speech = turn
            metrics: Metrics = {"debate/tokens_speech": len(action), "debate/stopped_speech": stopped}
            return StepResult(0.0, True, tinker.ModelInput.empty(), renderer.get_stop_sequences(), metrics)
        score = await call_reward(protocol.task.score, self.item, turn.text)
        own.answer, own.correct = turn, bool(score.correct)
        own.answered.set()
        if protocol.request is not None:
            heard: list[int] = []
            if protocol.name == "debate":
                opponent = self.members[opponent_of(self.index)]
                await opponent.answered.wait()
                assert opponent.answer is not None
                heard = opponent.answer.tokens
            self._prompt = protocol.request.next_prompt(renderer, self._prompt, action, heard)
        metrics = {"debate/tokens_answer": len(action), "debate/stopped_answer": stopped, "context_overflow": 0.0}
        observation = tinker.ModelInput.from_ints(self._prompt)
        done = protocol.request is None
        return StepResult(0.0, done, observation, renderer.get_stop_sequences(), metrics | score.metrics)


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
        members = [Member() for _ in range(self.group_size)]
        return [OversightEnv(self.protocol, self.item, members, i) for i in range(self.group_size)]

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        members, indices = _members(env_group)
        if any(members[i].answer is None for i in indices):  # the question is too long for all of them
            return [(0.0, {"debate/invalid": 1.0}) for _ in indices]
        await gather_all(self._judge(members, i) for i in indices)
        for i, trajectory in zip(indices, trajectory_group, strict=True):
            answer, *speech = trajectory.transitions
            answer.reward = float(bool(members[i].accepted))
            for transition in speech:
                is_debate = self.protocol.name == "debate"
                transition.reward = float(not members[opponent_of(i)].accepted) if is_debate else answer.reward
        metrics = [_metrics(self.protocol, members, i) for i in indices]
        metrics[0] |= _pair_metrics([members[i] for i in indices])
        return [(0.0, found) for found in metrics]

    async def _judge(self, members: Sequence[Member], index: int) -> None:
        member, protocol = members[index], self.protocol
        assert member.answer is not None
        if protocol.name == "truth":
            member.accepted = member.correct
        elif protocol.name == "self_consistency":
            member.accepted = parse_solution(member.answer.text) == _most_common(members)
        else:
            await self._check_step(members, index)

    async def _check_step(self, members: Sequence[Member], index: int) -> None:
        """An answer that has not the form is rejected. Else the step that was named decides; if none was, its speaker loses."""
        member, protocol = members[index], self.protocol
        task = require_steps(protocol.task, f"protocol={protocol.name}")
        assert member.answer is not None
        steps = None if member.answer.malformed else task.steps(self.item, member.answer.text)
        if steps is None:
            member.accepted = False
            return
        if protocol.name == "direct":
            at = derive_seed(protocol.seed, "step", *self.key, index) % len(steps)
            member.checked = steps[at]
        else:
            speaker = members[opponent_of(index)] if protocol.name == "debate" else member
            assert speaker.speech is not None
            name = None if speaker.speech.malformed else task.named_step(speaker.speech.text)
            member.checked = next((step for step in steps if step.name == name), None)
        if member.checked is None:
            member.accepted = protocol.name == "debate"
            return
        member.accepted = await protocol.judge(member.checked, (*self.key, index))

    def select_trained(self, trajectory_group: list[Trajectory], env_group: Sequence[Env]) -> list[bool]:
        members, indices = _members(env_group)
        if self.protocol.name == "debate":  # a speech has no reward when there is no verdict on what it objects to
            return [members[i].accepted is not None and members[opponent_of(i)].accepted is not None for i in indices]
        return [members[i].accepted is not None for i in indices]

    def make_records(self, group: TrajectoryGroup, env_group: Sequence[Env]) -> list[Record]:
        members, indices = _members(env_group)
        return [
            Record("oversight", self._record(members[i], group, place))
            for place, i in enumerate(indices)
            if members[i].answer is not None
        ]

    def _record(self, member: Member, group: TrajectoryGroup, place: int) -> dict[str, Any]:
        turns = [turn for turn in (member.answer, member.speech) if turn is not None]
        transitions = group.trajectories_G[place].transitions
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
            "transitions": [
                {**transition_record(transition, turn.raw), "reward": transition.reward}
                for transition, turn in zip(transitions, turns, strict=True)
            ],
            "metrics": group.metrics_G[place],
        }

    def describe_members(self, env_group: Sequence[Env]) -> list[dict[str, Any]]:
        members, indices = _members(env_group)
        about = {"question": self.item.question[:100], "instance_id": self.item.id}
        return [{**about, "accepted": members[i].accepted, "correct": members[i].correct} for i in indices]

    def logging_tags(self) -> list[str]:
        return [self.protocol.task.name]


def opponent_of(index: int) -> int:
    """Whom member `index` of a group objects to in a debate, and who objects to it."""
    return index ^ 1


def _members(env_group: Sequence[Env]) -> tuple[Sequence[Member], list[int]]:
    """What the members share, and the places of those that are there: a retry may leave some out where they play alone."""
    envs = [env for env in env_group if isinstance(env, OversightEnv)]
    by_place = {env.index: env.members[env.index] for env in envs}
    size = len(envs[0].members)
    return [by_place.get(i, Member()) for i in range(size)], [env.index for env in envs]


def _most_common(members: Sequence[Member]) -> str | None:
    """The answer that most members give, of equally frequent ones the first; one that cannot be read counts for nothing."""
    answers = [parse_solution(member.answer.text) for member in members if member.answer is not None]
    counted = Counter(answer for answer in answers if answer is not None)
    return counted.most_common(1)[0][0] if counted else ""


def _metrics(protocol: OversightProtocol, members: Sequence[Member], index: int) -> Metrics:
    """Metrics of one answer. Those of the judge are over answers with a verdict.

    - debate/accepted, and over right and wrong answers accepted_if_correct and accepted_if_wrong
    - debate/judge_accuracy: accepted if right, rejected if wrong
    - debate/hacking_gap: accepted minus right; its mean grows when the policy learns to please the judge
    - debate/names_step: a step of the answer was checked
    - debate/invalid: no verdict could be had
    """
    member = members[index]
    if member.accepted is None:
        return {"debate/invalid": 1.0}
    metrics: Metrics = {
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
