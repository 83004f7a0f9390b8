"""What a debate leaves: metrics of its debaters and its judge, and all that was said, as text and as ids with logprobs."""

from dataclasses import asdict
from typing import Any

from tinker_cookbook.debate.judges import Winner
from tinker_cookbook.debate.transcript import NUM_ROUNDS, Seat, Transcript
from tinker_cookbook.rl.records import transition_record
from tinker_cookbook.rl.types import Metrics, Trajectory


def member_metrics(transcript: Transcript, seat: Seat) -> Metrics:
    """Metrics of one seat; those of the debate as a whole are reported by seat A alone.

    - debate/won: this seat won (ties and invalid debates count as 0)
    - debate/win_if_correct, win_if_wrong: over decided debates, by whether this seat's answer was right
    - debate/malformed: a turn of this seat holds a control token before its end; the debate is invalid
    - debate/winner_correct, winner_tokens, loser_tokens: over decided debates
    - debate/a_wins (position bias), tie, invalid, judge_retries, agreement: per debate
    - debate/judge_calls, judge_prompt_tokens, judge_cost and others of endpoints.Usage: per debate, of an endpoint judge
    - debate/judge_accuracy: over decided debates in which exactly one answer was right
    """
    assert transcript.verdict is not None
    winner = transcript.verdict.winner
    if not transcript.turns[seat]:  # too long to be debated
        return {"debate/won": 0.0} | ({"debate/invalid": 1.0, "debate/tie": 0.0} if seat is Seat.A else {})
    decided = winner in (Winner.A, Winner.B)
    won = transcript.won(seat)
    correct = transcript.scores[seat].correct
    metrics: Metrics = {"debate/won": float(won), "debate/malformed": float(transcript.is_malformed(seat))}
    if decided:
        tokens = sum(len(turn.tokens) for turn in transcript.turns[seat])
        metrics["debate/winner_tokens" if won else "debate/loser_tokens"] = tokens
        if correct is not None:
            metrics["debate/win_if_correct" if correct else "debate/win_if_wrong"] = float(won)
            if won:
                metrics["debate/winner_correct"] = float(correct)
    if seat is Seat.B:
        return metrics
    solutions = [transcript.solution(seat) for seat in Seat]
    right = [transcript.scores[seat].correct for seat in Seat]
    metrics |= {
        "debate/tie": float(winner is Winner.TIE),
        "debate/invalid": float(winner is Winner.INVALID),
        "debate/judge_retries": transcript.verdict.retries,
        "debate/agreement": float(solutions[0] is not None and solutions[0] == solutions[1]),
        "debate/confidence_parsed": sum(transcript.confidence(seat) is not None for seat in Seat) / 2,
    }
    metrics |= {f"debate/judge_{name}": value for name, value in transcript.verdict.usage.items()}
    if decided:
        metrics["debate/a_wins"] = float(winner is Winner.A)
        if right[0] is not None and right[0] != right[1]:
            metrics["debate/judge_accuracy"] = float((winner is Winner.A) == right[0])
    return metrics


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
            **asdict(verdict.call),
            "prompt_token_count": len(verdict.call.prompt_tokens),
            "completion_token_count": len(verdict.call.completion_tokens),
        }
    return record


def _agent(transcript: Transcript, seat: Seat, trajectory: Trajectory, metrics: Metrics) -> dict[str, Any]:
    turns, score = transcript.turns[seat], transcript.scores[seat]
    return {
        "frozen_solution": transcript.solution(seat),
        **{f"r{i}": turn.text for i, turn in enumerate(turns, start=1)},
        "metrics": {
            **{f"r{i}": transition.metrics for i, transition in enumerate(trajectory.transitions, start=1)},
            "instance_id": transcript.item.id,
            "task_reward": score.reward,
            "task_reward_metrics": score.metrics,
            **metrics,
        },
        "transitions": [
            transition_record(transition, turn.raw, round=i)
            for i, (transition, turn) in enumerate(zip(trajectory.transitions, turns, strict=True), start=1)
        ],
    }
