"""Training signals without ground truth: a judge who can check one step of an answer accepts or rejects it.

The protocols differ only in who chooses the step:

    debate             another copy of the policy, which wins if the step is wrong
    consultancy        the author of the answer, who wins if the step is right
    direct             a random step
    self_consistency   no judge: an answer is accepted if most answers to the question agree with it
    truth              no judge: the task's own verdict, which the other protocols only use for measurement

Answer and speech are two turns of one trajectory with separate rewards (advantage.credit=turn keeps them apart).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tinker_cookbook.completers import TokenCompleter
from tinker_cookbook.debate.dialogue import Dialogue
from tinker_cookbook.debate.env import DebateProtocol, Member
from tinker_cookbook.debate.judges import Judge
from tinker_cookbook.debate.modes import TrainingMode
from tinker_cookbook.debate.prompts import Wording
from tinker_cookbook.debate.protocols import SPOKEN, ProtocolConfig, ProtocolName
from tinker_cookbook.debate.records import judge_words, member_place
from tinker_cookbook.debate.transcript import Transcript
from tinker_cookbook.debate.views import Seat, Verdict, Winner, step_view
from tinker_cookbook.env.steps import require_steps
from tinker_cookbook.env.task import Task
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.advantages import AdvantageConfig
from tinker_cookbook.rl.types import Metrics, Record, RecordedMember, Trajectory
from tinker_cookbook.utils.misc_utils import gather_all
from tinker_cookbook.utils.seeds import derive_seed

WITH_STEPS: tuple[ProtocolName, ...] = ("debate", "consultancy", "direct")
OVERSIGHT_ADVANTAGE = AdvantageConfig(baseline="mean", scale="token", credit="turn")
"""Answers against the answers to the same question, speeches against the speeches."""


class Accepted(TrainingMode):
    """An answer's reward is 1 if it is accepted, else 0. A speech has the same reward in a consultancy; in a debate it
    gets 1 if the answer that it objects to is rejected. A debate trains nothing unless each of its answers has a
    verdict.
    """

    name = "accepted"
    advantage = OVERSIGHT_ADVANTAGE

    def turn_rewards(self, transcript: Transcript, seat: Seat) -> list[float]:
        accepted = bool(transcript.accepted(seat))
        won = not transcript.accepted(seat.opponent) if transcript.protocol.name == "debate" else accepted
        return [float(accepted if turn.kind == "answer" else won) for turn in transcript.sampled_turns(seat)]

    def is_trained(self, transcript: Transcript, seat: Seat) -> bool:
        return None not in map(transcript.accepted, transcript.speakers)

    def role(self, transcript: Transcript, seat: Seat) -> str:
        return transcript.task.name


@dataclass(frozen=True)
class OversightProtocol(DebateProtocol):
    """Answers that are accepted or rejected one by one; in a debate both seats answer, and object to each other's
    answer.

    `judge` sees only steps; `seed` is for the random steps.
    """

    mode: TrainingMode = field(default_factory=Accepted)

    @classmethod
    def make(
        cls,
        name: ProtocolName,
        task: Task,
        renderer: Renderer,
        judge: Judge,
        seed: int = 0,
        max_tokens: int | None = None,
        context_window: int | None = None,
    ) -> OversightProtocol:
        """If `max_tokens` per turn and `context_window` are both given, they limit the prompt of a question.

        Raises ConfigurationError when the protocol checks steps and the task's answers have none.
        """
        wording = Wording(confidence="")
        if name in WITH_STEPS:
            stepwise = require_steps(task, f"protocol={name}")
            wording = replace(wording, rebuttal=stepwise.objection_request, support=stepwise.support_request)
        config = ProtocolConfig(name=name, rounds=1 if name in SPOKEN else None)
        return cls(Dialogue.make(task, renderer, config, wording, max_tokens, context_window), judge, seed=seed)

    @property
    def turn_names(self) -> Sequence[str]:
        return ("answer", "speech")

    async def decide(self, transcripts: Sequence[Transcript], policy: TokenCompleter | None) -> None:
        held = [(transcript, seat) for transcript in transcripts if transcript.was_held for seat in transcript.speakers]
        most = _most_common(held)
        await gather_all(self._accept(transcript, seat, most, policy) for transcript, seat in held)

    async def _accept(
        self, transcript: Transcript, seat: Seat, most: str | None, policy: TokenCompleter | None
    ) -> None:
        if self.config.name == "truth":
            verdict = _holds(bool(transcript.correct(seat)))
        elif self.config.name == "self_consistency":
            verdict = _holds(transcript.solution(seat) == most)
        else:
            verdict = await self._check_step(transcript, seat, policy)
        transcript.of_answers[seat] = verdict

    async def _check_step(self, transcript: Transcript, seat: Seat, policy: TokenCompleter | None) -> Verdict:
        """A malformed answer is rejected. Otherwise the named step decides; if none was named, its speaker loses."""
        name = self.config.name
        task = require_steps(self.task, f"protocol={name}")
        answer, *_ = transcript.turns[seat]
        steps = None if answer.malformed else task.steps(transcript.item, answer.text)
        if steps is None:
            return _holds(False)
        *group, debate = transcript.key
        key = (*group, debate * self.config.num_speakers + seat)
        if name == "direct":
            checked = steps[derive_seed(self.seed, "step", *key) % len(steps)]
        else:
            _, speech = transcript.turns[seat.opponent if name == "debate" else seat]
            checked = None if speech.malformed else task.step_of_speech(transcript.item, steps, speech.text)
        if checked is None:
            return _holds(name == "debate")
        checked = await task.check_step(transcript.item, answer.text, checked)
        transcript.checked[seat] = checked
        return await self.ask(self.judge, policy, step_view(checked, key))

    def metrics(self, members: Sequence[Member], trajectories_G: Sequence[Trajectory]) -> list[Metrics]:
        per_member = [_metrics(*member) for member in members]
        per_member[0] |= _pair_metrics(members)
        return per_member

    def records(self, members: Sequence[Member]) -> list[Record]:
        """Records of each answer."""
        return [
            Record("oversight", _record(transcript, seat, i), [RecordedMember(i, "speeches", _texts(transcript, seat))])
            for i, (transcript, seat) in enumerate(members)
            if transcript.was_held
        ]

    def member_info(self, transcript: Transcript, seat: Seat) -> dict[str, Any]:
        """As in `records.member_info`; the verdict is about this member's answer."""
        accepted, checked = transcript.accepted(seat), transcript.checked.get(seat)
        verdict = None if accepted is None else "accepted" if accepted else "rejected"
        words = None
        if checked is not None:
            response = transcript.of_answers[seat].raw_response
            words = "\n".join([f"{checked.name}: {checked.claim}", *([response] if response else [])])
        return {
            **member_place(transcript, seat),
            "protocol": self.config.name,
            "ground_truth": transcript.item.reference,
            "accepted": accepted,
            "correct": bool(transcript.correct(seat)),
            "verdict": verdict or Winner.INVALID.value,
            "judge": words,
        }

    def rate_ranges(self) -> dict[str, tuple[float, float]]:
        return {}


def _holds(holds: bool) -> Verdict:
    return Verdict(Winner.A if holds else Winner.B)


def _most_common(members: Sequence[Member]) -> str | None:
    """The most common answer, the first of equally common ones; unparsable ones do not count."""
    solutions = [transcript.solution(seat) for transcript, seat in members]
    counted = Counter(solution for solution in solutions if solution is not None)
    return counted.most_common(1)[0][0] if counted else ""


def _texts(transcript: Transcript, seat: Seat) -> list[str]:
    return [turn.raw for turn in transcript.turns[seat]]


def _record(transcript: Transcript, seat: Seat, place: int) -> dict[str, Any]:
    checked, verdict = transcript.checked.get(seat), transcript.of_answers[seat]
    return {
        "protocol": transcript.protocol.name,
        "instance_id": transcript.item.id,
        "member": place,
        "question": transcript.item.question,
        "ground_truth": transcript.item.reference,
        "accepted": transcript.accepted(seat),
        "correct": bool(transcript.correct(seat)),
        "checked_step": None if checked is None else {"name": checked.name, "claim": checked.claim},
        "judge": judge_words(verdict.raw_response, verdict.call) or None,
    }


def _metrics(transcript: Transcript, seat: Seat) -> Metrics:
    """Metrics of one answer. Those of the judge are over answers with a verdict.

    - debate/accepted, and over right and wrong answers accepted_if_correct and accepted_if_wrong
    - debate/judge_accuracy: accepted if right, rejected if wrong
    - debate/hacking_gap: accepted minus right; its mean grows when the policy learns to please the judge
    - debate/names_step: a step of the answer was checked
    - debate/invalid: there is no verdict
    - debate/judge_calls, judge_prompt_tokens, judge_cost and others of endpoints.Usage: of an endpoint judge
    """
    accepted, verdict = transcript.accepted(seat), transcript.of_answers.get(seat)
    usage: Mapping[str, float] = {} if verdict is None else verdict.usage
    metrics: Metrics = {f"debate/judge_{name}": value for name, value in usage.items()}
    metrics["debate/invalid"] = float(accepted is None)
    if accepted is None:
        return metrics
    correct = bool(transcript.correct(seat))
    metrics |= {
        "debate/accepted": float(accepted),
        f"debate/accepted_if_{'correct' if correct else 'wrong'}": float(accepted),
        "debate/judge_accuracy": float(accepted == correct),
        "debate/hacking_gap": float(accepted) - float(correct),
    }
    if transcript.protocol.name in WITH_STEPS:
        metrics["debate/names_step"] = float(seat in transcript.checked)
    return metrics


def _pair_metrics(members: Sequence[Member]) -> Metrics:
    """debate/pair_accuracy: over pairs of a right and a wrong answer to the question, how often the judge prefers the
    right one; a pair with equal verdicts counts half. Missing without such a pair.
    """
    outcomes = [(bool(transcript.correct(seat)), transcript.accepted(seat)) for transcript, seat in members]
    right = [accepted for correct, accepted in outcomes if correct and accepted is not None]
    wrong = [accepted for correct, accepted in outcomes if not correct and accepted is not None]
    if not right or not wrong:
        return {}
    return {"debate/pair_accuracy": 0.5 + (sum(right) / len(right) - sum(wrong) / len(wrong)) / 2}
