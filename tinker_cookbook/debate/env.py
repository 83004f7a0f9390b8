"""The debate as an environment: two envs share a transcript, three simultaneous rounds, then a judge.

Round 1 answers the question and fixes the solution; rounds 2 and 3 each show the opponent's last turn, inserted as token
ids. Every prompt is the previous prompt plus one's own reply plus injected ids, so a seat's whole debate is one datum.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import tinker

from tinker_cookbook.completers import StopCondition
from tinker_cookbook.debate.injection import TurnInjection, make_injection
from tinker_cookbook.debate.judges import Judge
from tinker_cookbook.debate.metrics import member_metrics
from tinker_cookbook.debate.prompts import CONFIDENCE_REQUEST, DebatePrompts
from tinker_cookbook.debate.records import debate_record
from tinker_cookbook.debate.transcript import NUM_ROUNDS, Seat, Transcript, Turn
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.types import (
    Action,
    ActionExtra,
    Env,
    EnvGroupBuilder,
    Metrics,
    Observation,
    Record,
    StepResult,
    Trajectory,
    TrajectoryGroup,
)
from tinker_cookbook.tasks.replies import decode_reply
from tinker_cookbook.tasks.types import Task, TaskItem
from tinker_cookbook.utils.misc_utils import gather_all


@dataclass(frozen=True)
class DebateProtocol:
    """What is the same for all debates of a run: the task, how it is rendered, and what comes between the turns."""

    task: Task
    renderer: Renderer
    injections: tuple[TurnInjection, ...]

    @classmethod
    def make(cls, task: Task, renderer: Renderer, prompts: DebatePrompts) -> DebateProtocol:
        return cls(
            task, renderer, tuple(make_injection(renderer, text) for text in (prompts.rebuttal, prompts.closing))
        )

    def first_prompt(self, item: TaskItem) -> tinker.ModelInput:
        return self.renderer.build_generation_prompt(self.task.messages(item, CONFIDENCE_REQUEST))


class DebateEnv(Env):
    """One seat of one debate."""

    def __init__(self, protocol: DebateProtocol, transcript: Transcript, seat: Seat):
        self.protocol, self.transcript, self.seat = protocol, transcript, seat
        self._prompt: list[int] = []

    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        prompt = self.protocol.first_prompt(self.transcript.item)
        self._prompt = prompt.to_ints()
        return prompt, self.protocol.renderer.get_stop_sequences()

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        renderer, transcript = self.protocol.renderer, self.transcript
        round_ = len(transcript.turns[self.seat])
        transcript.speak(self.seat, Turn(action, decode_reply(renderer, action)))
        opponent = await transcript.hear(self.seat.opponent, round_)
        score = transcript.scores[self.seat]
        done = round_ + 1 == NUM_ROUNDS
        if not done:
            injection = self.protocol.injections[round_]
            self._prompt = injection.next_prompt(renderer, self._prompt, action, opponent.tokens)
        first = round_ == 0
        metrics: Metrics = {f"debate/tokens_r{round_ + 1}": len(action)}
        metrics[f"debate/stopped_r{round_ + 1}"] = float((extra or {}).get("stop_reason") == "stop")
        return StepResult(
            reward=score.reward if first else 0.0,
            episode_done=done,
            next_observation=tinker.ModelInput.from_ints(self._prompt),
            next_stop_condition=renderer.get_stop_sequences(),
            metrics=metrics | score.metrics if first else metrics,
        )


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
        started = time.perf_counter()
        transcript.verdict = await self.judge(transcript.view((*self.key, index)))
        transcript.judge_seconds = time.perf_counter() - started

    def select_trained(self, trajectory_group: list[Trajectory], env_group: Sequence[Env]) -> list[bool]:
        return [transcript.won(seat) for transcript in _transcripts(env_group) for seat in Seat]

    def make_records(self, group: TrajectoryGroup, env_group: Sequence[Env]) -> list[Record]:
        members = [(t, m) for t, m in zip(group.trajectories_G, group.metrics_G, strict=True)]
        return [
            Record("debate", debate_record(transcript, members[2 * i], members[2 * i + 1]))
            for i, transcript in enumerate(_transcripts(env_group))
        ]

    def logging_tags(self) -> list[str]:
        return [self.protocol.task.name]


def _transcripts(env_group: Sequence[Env]) -> list[Transcript]:
    """One per debate, in order."""
    return [env.transcript for env in env_group if isinstance(env, DebateEnv) and env.seat is Seat.A]
