"""The debate as an environment: two envs share a transcript, three simultaneous rounds, then a judge.

Round 1 answers the question and fixes the solution; rounds 2 and 3 each show the opponent's last turn, inserted as token
ids. Every prompt is the previous prompt plus one's own reply plus injected ids, so a seat's whole debate is one datum.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tinker_cookbook.completers import StopCondition
from tinker_cookbook.debate.injection import TurnInjection, make_injection
from tinker_cookbook.debate.judges import Judge, Verdict, Winner
from tinker_cookbook.debate.prompts import CONFIDENCE_REQUEST, DebatePrompts
from tinker_cookbook.debate.records import debate_record, member_metrics
from tinker_cookbook.debate.transcript import NUM_ROUNDS, Seat, Transcript, Turn
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.renderers.replies import decode_reply, reply_text
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
from tinker_cookbook.tasks.types import Task, TaskItem
from tinker_cookbook.utils.lazy import tinker
from tinker_cookbook.utils.misc_utils import gather_all
from tinker_cookbook.utils.terminal import reach


@dataclass(frozen=True)
class DebateProtocol:
    """What is the same for all debates of a run: the task, how it is rendered, and what comes between the turns."""

    task: Task
    renderer: Renderer
    injections: tuple[TurnInjection, ...]
    max_first_prompt: int | None = None
    """longest first prompt with which a debate surely fits the context; a longer question is not debated"""

    @classmethod
    def make(
        cls,
        task: Task,
        renderer: Renderer,
        prompts: DebatePrompts,
        max_tokens: int | None = None,
        context_window: int | None = None,
    ) -> DebateProtocol:
        """`max_tokens` per turn and `context_window`, when both are given, bound the first prompt."""
        injections = tuple(make_injection(renderer, text) for text in (prompts.rebuttal, prompts.closing))
        if max_tokens is None or context_window is None:
            return cls(task, renderer, injections)
        # By round 3 the prompt holds two own turns, two of the opponent's and the text around them, and one turn follows.
        around = sum(len(injection.after_cut) + len(injection.suffix) for injection in injections)
        room = context_window - around - (2 * NUM_ROUNDS - 1) * max_tokens
        if room < 1:
            raise ConfigurationError(
                f"max_tokens={max_tokens} leaves no room for a question: {2 * NUM_ROUNDS - 1} turns of a debate and the text "
                f"around them fill the context of {context_window}; lower max_tokens"
            )
        return cls(task, renderer, injections, room)

    def first_prompt(self, item: TaskItem) -> tinker.ModelInput:
        return self.renderer.build_generation_prompt(self.task.messages(item, CONFIDENCE_REQUEST))


class DebateEnv(Env):
    """One seat of one debate."""

    def __init__(self, protocol: DebateProtocol, transcript: Transcript, seat: Seat):
        self.protocol, self.transcript, self.seat = protocol, transcript, seat
        self._prompt: list[int] = []

    async def initial_observation(self) -> tuple[tinker.ModelInput, StopCondition] | InitialObservationOverflow:
        renderer, limit = self.protocol.renderer, self.protocol.max_first_prompt
        prompt = self.protocol.first_prompt(self.transcript.item)
        self._prompt = prompt.to_ints()
        if limit is not None and prompt.length > limit:
            return InitialObservationOverflow(0.0, {"context_overflow": 1.0})
        return prompt, renderer.get_stop_sequences()

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        renderer, transcript = self.protocol.renderer, self.transcript
        round_ = len(transcript.turns[self.seat])
        malformed = renderer.holds_control_token(action)
        turn = Turn(action, reply_text(renderer, action), decode_reply(renderer, action), malformed)
        await transcript.speak(self.seat, turn)
        reach(f"[debate] Round {round_ + 1}")
        opponent = await transcript.hear(self.seat.opponent, round_)
        done, reward = round_ + 1 == NUM_ROUNDS, 0.0
        if not done:
            injection = self.protocol.injections[round_]
            self._prompt = injection.next_prompt(renderer, self._prompt, action, opponent.tokens)
        metrics: Metrics = {
            f"debate/tokens_r{round_ + 1}": len(action),
            f"debate/stopped_r{round_ + 1}": float((extra or {}).get("stop_reason") == "stop"),
        }
        if round_ == 0:
            score = transcript.scores[self.seat]
            reward, metrics = score.reward, metrics | {"context_overflow": 0.0} | score.metrics
        observation = tinker.ModelInput.from_ints(self._prompt)
        return StepResult(reward, done, observation, renderer.get_stop_sequences(), metrics)


@dataclass(frozen=True)
class DebateGroupBuilder(EnvGroupBuilder):
    """`num_debates` debates about one item: 2 * num_debates envs, of which 2i and 2i + 1 argue against each other.

    Only winners survive into training; members of tied and invalid debates train nothing and are counted.
    """

    protocol: DebateProtocol
    item: TaskItem
    judge: Judge
    num_debates: int
    key: tuple[int, int]
    """batch and group, which name the debate for judges that draw random numbers"""

    @property
    def coordinated(self) -> bool:
        return True

    async def make_envs(self) -> Sequence[DebateEnv]:
        transcripts = [Transcript(self.protocol.task, self.item) for _ in range(self.num_debates)]
        return [DebateEnv(self.protocol, transcript, seat) for transcript in transcripts for seat in Seat]

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        transcripts = _transcripts(env_group)
        await gather_all(self._judge(transcript, i) for i, transcript in enumerate(transcripts))
        return [(0.0, member_metrics(transcript, seat)) for transcript in transcripts for seat in Seat]

    async def _judge(self, transcript: Transcript, index: int) -> None:
        if not transcript.turns[Seat.A]:
            transcript.verdict = Verdict(Winner.INVALID, reasoning="the question is too long for a debate")
            return
        if any(transcript.is_malformed(seat) for seat in Seat):
            transcript.verdict = Verdict(Winner.INVALID, reasoning="a turn holds a control token before its end")
            return
        started = time.perf_counter()
        transcript.verdict = await self.judge(transcript.view((*self.key, index)))
        transcript.judge_seconds = time.perf_counter() - started

    def select_trained(self, trajectory_group: list[Trajectory], env_group: Sequence[Env]) -> list[bool]:
        return [transcript.won(seat) for transcript in _transcripts(env_group) for seat in Seat]

    def make_records(self, group: TrajectoryGroup, env_group: Sequence[Env]) -> list[Record]:
        members = list(zip(group.trajectories_G, group.metrics_G, strict=True))
        return [
            Record("debate", debate_record(transcript, members[2 * i], members[2 * i + 1]))
            for i, transcript in enumerate(_transcripts(env_group))
            if transcript.turns[Seat.A]
        ]

    def member_roles(self, env_group: Sequence[Env]) -> list[str]:
        return [f"{self.protocol.task.name}/{env.seat.name}" for env in env_group if isinstance(env, DebateEnv)]

    def describe_members(self, env_group: Sequence[Env]) -> list[dict[str, Any]]:
        return [
            {
                "question": self.item.question[:100],
                "instance_id": self.item.id,
                "agent": seat.name,
                "ground_truth": self.item.reference,
                "verdict": transcript.verdict.winner.value if transcript.verdict is not None else None,
                "judge": transcript.verdict.raw_response or transcript.verdict.reasoning
                if transcript.verdict
                else None,
            }
            for transcript in _transcripts(env_group)
            for seat in Seat
        ]

    def logging_tags(self) -> list[str]:
        return [self.protocol.task.name]


def _transcripts(env_group: Sequence[Env]) -> list[Transcript]:
    """One per debate, in order."""
    return [env.transcript for env in env_group if isinstance(env, DebateEnv) and env.seat is Seat.A]
