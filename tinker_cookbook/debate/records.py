"""A debate as JSON: everything said, as text and as ids with logprobs, and the verdict."""

from typing import Any

from tinker_cookbook.debate.transcript import NUM_ROUNDS, Seat, Transcript
from tinker_cookbook.rl.records import transition_record
from tinker_cookbook.rl.types import Metrics, Trajectory


def debate_record(
    transcript: Transcript, member_a: tuple[Trajectory, Metrics], member_b: tuple[Trajectory, Metrics]
) -> dict[str, Any]:
    """One record of the run's folder, debate_<step>_g<group>_<debate>.json."""
    verdict = transcript.verdict
    assert verdict is not None
    record: dict[str, Any] = {
        "config": {"num_rounds": NUM_ROUNDS},
        "question": transcript.item.question,
        "ground_truth": transcript.item.reference,
        "instance_id": transcript.item.id,
        "verdict": verdict.winner.value,
        "judge_reasoning": verdict.reasoning,
        "agent_a": _agent(transcript, Seat.A, *member_a),
        "agent_b": _agent(transcript, Seat.B, *member_b),
        "metrics": {
            "judge_time_s": transcript.judge_seconds,
            "task": transcript.task.name,
            "judge_retries": verdict.retries,
        },
    }
    if verdict.raw_response or verdict.call is not None:
        record["judge"] = {"raw_response": verdict.raw_response}
    if verdict.call is not None:
        record["judge"] |= {
            "prompt_tokens": verdict.call.prompt_tokens,
            "completion_tokens": verdict.call.completion_tokens,
            "completion_logprobs": verdict.call.completion_logprobs,
            "prompt_token_count": len(verdict.call.prompt_tokens),
            "completion_token_count": len(verdict.call.completion_tokens),
        }
    return record


def _agent(transcript: Transcript, seat: Seat, trajectory: Trajectory, metrics: Metrics) -> dict[str, Any]:
    texts = [turn.text for turn in transcript.turns[seat]]
    score = transcript.scores[seat]
    return {
        "frozen_solution": transcript.solution(seat),
        **{f"r{i}": text for i, text in enumerate(texts, start=1)},
        "metrics": {
            **{f"r{i}": transition.metrics for i, transition in enumerate(trajectory.transitions, start=1)},
            "instance_id": transcript.item.id,
            "task_reward": score.reward,
            "task_reward_metrics": score.metrics,
            **metrics,
        },
        "transitions": [
            transition_record(transition, turn.raw, round=i)
            for i, (transition, turn) in enumerate(
                zip(trajectory.transitions, transcript.turns[seat], strict=True), start=1
            )
        ],
    }
