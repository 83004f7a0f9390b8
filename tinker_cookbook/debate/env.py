"""A debate as an environment: the envs of its seats share a transcript, speak in the protocol's order, and then a
judge decides.

A seat first answers the question, which fixes its solution, unless its answer is assigned; then it argues. The others'
turns are inserted between its turns as token ids (`debate.dialogue`).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeAlias

from tinker_cookbook.completers import StopCondition, TokenCompleter
from tinker_cookbook.debate.dialogue import Dialogue, SeatDialogue
from tinker_cookbook.debate.judges import Judge
from tinker_cookbook.debate.metrics import member_metrics, rate_ranges, survivor_metrics
from tinker_cookbook.debate.modes import TrainingMode, get_mode
from tinker_cookbook.debate.prompts import DebatePrompts
from tinker_cookbook.debate.protocols import ProtocolConfig
from tinker_cookbook.debate.records import debate_record, member_info
from tinker_cookbook.debate.transcript import Transcript, assign_answers, invalid
from tinker_cookbook.debate.views import DebateView, Seat, Verdict, Winner
from tinker_cookbook.env.task import Task, TaskItem
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.run_clients import RunClients
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
from tinker_cookbook.utils.lazy import tinker
from tinker_cookbook.utils.misc_utils import gather_all
from tinker_cookbook.utils.seeds import derive_seed
from tinker_cookbook.utils.terminal import reach

TOO_LONG = "the question is too long for a debate"
FORGED = "a turn holds a control token before its end"

Member: TypeAlias = tuple[Transcript, Seat]
"""A member of a group: a seat of one of its debates."""


class DebateEnv(Env):
    """One seat of one debate. `turn_names` are the names of its turns in metrics, in the order of the rounds (answers
    first).
    """

    def __init__(self, dialogue: Dialogue, transcript: Transcript, seat: Seat, turn_names: Sequence[str] = ()):
        self.dialogue, self.transcript, self.seat = dialogue, transcript, seat
        self._names = turn_names or [f"r{i + 1}" for i in range(dialogue.protocol.num_rounds + 1)]
        self._seat_dialogue = SeatDialogue(dialogue, transcript, seat)

    async def initial_observation(self) -> tuple[tinker.ModelInput, StopCondition] | InitialObservationOverflow:
        if not self.dialogue.fits(self.transcript):
            return InitialObservationOverflow(0.0, {"context_overflow": 1.0})
        prompt = await self._seat_dialogue.open()
        return tinker.ModelInput.from_ints(prompt), self.dialogue.renderer.get_stop_sequences()

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        transcript, seat = self.transcript, self.seat
        slot_index = transcript.next_slot(seat)
        assert slot_index is not None, "the debate is over"
        slot = transcript.slots[slot_index]
        stopped = (extra or {}).get("stop_reason") == "stop"
        is_first = not transcript.sampled_turns(seat)
        await transcript.speak(seat, self._seat_dialogue.turn(action, slot, stopped))
        reach(f"[debate] Round {slot.round + 1}")
        following = transcript.next_slot(seat)
        if following is not None:
            await self._seat_dialogue.go_on(action, following)
        name = self._names[slot.round]
        metrics: Metrics = {f"debate/tokens_{name}": len(action), f"debate/stopped_{name}": float(stopped)}
        reward = 0.0
        if is_first:
            metrics["context_overflow"] = 0.0
        if slot.kind == "answer":
            score = transcript.scores[seat]
            reward, metrics = score.reward, metrics | score.metrics
        observation = tinker.ModelInput.from_ints(self._seat_dialogue.prompt)
        stop = self.dialogue.renderer.get_stop_sequences()
        return StepResult(reward, following is None, observation, stop, metrics)


@dataclass(frozen=True)
class DebateProtocol:
    """Settings shared by all debates of a run: protocol, judges, training mode, and reports."""

    dialogue: Dialogue
    judge: Judge
    mode: TrainingMode = field(default_factory=lambda: get_mode("rs_grpo"))
    measured_by: Mapping[str, Judge] = field(default_factory=dict[str, Judge])
    """judges that are only measured: held_out (another one); no_debate and with_key (the same; answers alone, or with the key)"""
    wrong_answers: Sequence[str] = ()
    """answers to other questions, from which wrong ones are drawn"""
    seed: int = 0
    """of the order of assigned answers"""

    @property
    def task(self) -> Task:
        return self.dialogue.task

    @property
    def config(self) -> ProtocolConfig:
        return self.dialogue.protocol

    @property
    def coordinated(self) -> bool:
        """Whether members of a group depend on each other: they are opponents, or their answers are counted."""
        return self.config.num_speakers > 1 or self.config.name == "self_consistency"

    @property
    def turn_names(self) -> Sequence[str]:
        """The names of a seat's turns in metrics; by default r1, r2, ..."""
        return ()

    async def transcript(self, item: TaskItem, key: tuple[int, ...]) -> Transcript:
        """A new debate."""
        answers: Sequence[str] = ()
        if self.config.answers == "assigned":
            right = self.task.reference_answer(item)
            wrong = wrong_answers(item, right, self.wrong_answers, len(self.config.verdict_seats) - 1)
            answers = assign_answers(len(self.config.verdict_seats), right, wrong, key, self.seed)
        transcript = Transcript(self.task, item, self.config, key, answers)
        await transcript.prepare()
        return transcript

    async def decide(self, transcripts: Sequence[Transcript], policy: TokenCompleter | None) -> None:
        """Ask the judges of a group's debates. `policy` is the one that spoke."""
        await gather_all(self._decide(transcript, policy) for transcript in transcripts)

    async def _decide(self, transcript: Transcript, policy: TokenCompleter | None) -> None:
        if not transcript.was_held:
            transcript.verdict = invalid(TOO_LONG)
            return
        if any(transcript.is_malformed(seat) for seat in transcript.seats):
            transcript.verdict = invalid(FORGED)
            return
        started = time.perf_counter()
        transcript.verdict = await self.ask(self.judge, policy, transcript.view())
        transcript.judge_seconds = time.perf_counter() - started
        for name, judge in self.measured_by.items():
            transcript.measured[name] = await self.ask(judge, policy, _measured_view(name, transcript))

    async def ask(self, judge: Judge, policy: TokenCompleter | None, view: DebateView) -> Verdict:
        return await judge.of_policy(policy, self.dialogue.renderer)(view)

    def is_trained(self, transcript: Transcript, seat: Seat) -> bool:
        is_invalid = transcript.verdict is not None and transcript.verdict.winner is Winner.INVALID
        return not is_invalid and self.mode.is_trained(transcript, seat)

    def metrics(self, members: Sequence[Member], trajectories_G: Sequence[Trajectory]) -> list[Metrics]:
        """Metrics of each member, once its turns have rewards."""
        per_member = [member_metrics(*member) for member in members]
        per_member[0] |= survivor_metrics(trajectories_G, [self.is_trained(*member) for member in members])
        return per_member

    def records(self, members: Sequence[Member]) -> list[Record]:
        """Records of the debates that were held."""
        return [
            debate_record(transcript, {i: seat for i, (other, seat) in enumerate(members) if other is transcript})
            for transcript in _transcripts(members)
            if transcript.was_held
        ]

    def member_info(self, transcript: Transcript, seat: Seat) -> dict[str, Any]:
        """Fields of a member in the training record."""
        return member_info(transcript, seat)

    def rate_ranges(self) -> dict[str, tuple[float, float]]:
        """Metrics with a confidence interval, and their ranges."""
        return rate_ranges(max(2, len(self.config.verdict_seats)))


def make_dialogue(
    task: Task,
    renderer: Renderer,
    protocol: ProtocolConfig | None = None,
    prompts: DebatePrompts | None = None,
    max_tokens: int | None = None,
    context_window: int | None = None,
) -> Dialogue:
    """The dialogue of a protocol, worded by the user, the task and the library, in this order of priority. See
    `Dialogue.make`.
    """
    protocol = protocol or ProtocolConfig()
    wording = (prompts or DebatePrompts()).resolve(task.debate_prompts, protocol.seats)
    return Dialogue.make(task, renderer, protocol, wording, max_tokens, context_window)


def wrong_answers(item: TaskItem, right: str, others: Sequence[str], count: int) -> list[str]:
    """Wrong answers of the item, then answers to other questions. Raises ConfigurationError for too few."""
    wrong = [answer for answer in dict.fromkeys(item.wrong_answers) if answer != right]
    start = derive_seed("wrong answers", item.id) % max(1, len(others))
    for answer in (*others[start:], *others[:start]):
        if len(wrong) >= count:
            break
        if answer != right and answer not in wrong:
            wrong.append(answer)
    if len(wrong) < count:
        raise ConfigurationError(
            f"protocol.answers=assigned: {count} wrong answers are needed for item {item.id}, and there are {len(wrong)}; "
            "give rows the column wrong_answers, a list of texts"
        )
    return wrong[:count]


@dataclass(frozen=True)
class DebateGroupBuilder(EnvGroupBuilder):
    """`num_debates` debates about one item. With k speaking seats, members ki to ki + k - 1 are those of debate i.

    The mode decides the rewards of turns and who survives into training; members of invalid debates train nothing.
    """

    protocol: DebateProtocol
    item: TaskItem
    num_debates: int
    key: tuple[int, int]
    """batch and group, which name the debate for judges that draw random numbers"""
    policy: TokenCompleter | None = None
    """the debating policy, for a judge that is the live policy"""

    @property
    def coordinated(self) -> bool:
        return self.protocol.coordinated

    def with_clients(self, clients: RunClients) -> Self:
        copied = copy.copy(self)  # with its dataset_index, which is not a field
        object.__setattr__(copied, "policy", clients.policy)
        return copied

    async def make_envs(self) -> Sequence[DebateEnv]:
        protocol = self.protocol
        transcripts = [await protocol.transcript(self.item, (*self.key, i)) for i in range(self.num_debates)]
        return [
            DebateEnv(protocol.dialogue, transcript, seat, protocol.turn_names)
            for transcript in transcripts
            for seat in transcript.speakers
        ]

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        members = _members(env_group)
        await self.protocol.decide(_transcripts(members), self.policy)
        for (transcript, seat), trajectory in zip(members, trajectory_group, strict=True):
            if transcript.was_held:
                rewards = self.protocol.mode.turn_rewards(transcript, seat)
                for transition, reward in zip(trajectory.transitions, rewards, strict=True):
                    transition.reward = reward
        return [(0.0, metrics) for metrics in self.protocol.metrics(members, trajectory_group)]

    def select_trained(self, trajectory_group: list[Trajectory], env_group: Sequence[Env]) -> list[bool]:
        return [self.protocol.is_trained(*member) for member in _members(env_group)]

    def describe_records(self, group: TrajectoryGroup, env_group: Sequence[Env]) -> list[Record]:
        return self.protocol.records(_members(env_group))

    def member_roles(self, env_group: Sequence[Env]) -> list[str]:
        return [self.protocol.mode.role(*member) for member in _members(env_group)]

    def describe_members(self, env_group: Sequence[Env]) -> list[dict[str, Any]]:
        return [self.protocol.member_info(*member) for member in _members(env_group)]

    def rate_ranges(self) -> dict[str, tuple[float, float]]:
        return self.protocol.rate_ranges()

    def logging_tags(self) -> list[str]:
        return [self.protocol.task.name]


def _measured_view(name: str, transcript: Transcript) -> DebateView:
    view = transcript.view()
    if name == "held_out":
        return view
    answers = view.without_speeches()
    return replace(answers, reference=transcript.reference) if name == "with_key" else answers


def _members(env_group: Sequence[Env]) -> list[Member]:
    """The members with an env: a retry may drop members of an uncoordinated group."""
    return [(env.transcript, env.seat) for env in env_group if isinstance(env, DebateEnv)]


def _transcripts(members: Sequence[Member]) -> list[Transcript]:
    """One per debate, in order."""
    return list({id(transcript): transcript for transcript, _ in members}.values())
