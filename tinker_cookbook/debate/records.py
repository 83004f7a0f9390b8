"""Records of a debate: all turns, as text and as ids with logprobs, and the judge's prompts and replies."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from tinker_cookbook.debate.transcript import Transcript
from tinker_cookbook.debate.views import DebateView, JudgeCall, Seat, SeatView, Verdict
from tinker_cookbook.rl.types import Record, RecordedMember


def debate_record(transcript: Transcript, members: Mapping[int, Seat]) -> Record:
    """One record in the run's folder, debate_<step>_g<group>_<debate>.json. `members`: the seat of each member."""
    verdict = transcript.verdict
    assert verdict is not None
    record: dict[str, Any] = {
        "config": {"num_rounds": len(transcript.slots)},
        "protocol": {
            "name": transcript.protocol.name,
            "answers": transcript.protocol.answers,
            "order": transcript.protocol.order,
            "rounds": transcript.protocol.num_rounds,
            "seats": transcript.protocol.seats,
            "quotes": transcript.protocol.quotes,
        },
        "question": transcript.item.question,
        "ground_truth": transcript.item.reference,
        "instance_id": transcript.item.id,
        "verdict": verdict.winner.value,
        "judge_reasoning": verdict.reasoning,
        **{_agent_key(seat): _agent(transcript, seat) for seat in transcript.seats},
        "metrics": {
            "judge_time_s": transcript.judge_seconds,
            "task": transcript.task.name,
            "judge_retries": verdict.retries,
        },
        "view": view_record(transcript.view()),
        "judge": _judge(verdict),
        "measured": {
            name: {"verdict": measured.winner.value, **_judge(measured)}
            for name, measured in transcript.measured.items()
        },
    }
    speeches = [_speeches(transcript, seat, member) for member, seat in members.items()]
    return Record("debate", {key: value for key, value in record.items() if value not in ({}, None)}, speeches)


def member_info(transcript: Transcript, seat: Seat) -> dict[str, Any]:
    """Info of a rollout, for rollouts.parquet: its debate and seat, and the debate's outcome.

    - debate: which debate of the group; protocol; agent: the seat; role
    - rounds: of each turn, 0 for the answer
    - assigned_answers: by seat, if answers are assigned
    - verdict; judge: its reply; measured_verdicts: of judges used only for measurement, by name
    """
    verdict, protocol = transcript.verdict, transcript.protocol
    info: dict[str, Any] = {
        **member_place(transcript, seat),
        "protocol": protocol.name,
        "ground_truth": transcript.item.reference,
        "verdict": None if verdict is None else verdict.winner.value,
        "judge": None if verdict is None else verdict.raw_response or verdict.reasoning,
    }
    if protocol.answers == "assigned":
        info["assigned_answers"] = {other.name: transcript.solution(other) for other in transcript.seats}
    if transcript.measured:
        info["measured_verdicts"] = {name: measured.winner.value for name, measured in transcript.measured.items()}
    return info


def member_place(transcript: Transcript, seat: Seat) -> dict[str, Any]:
    """A rollout's question, debate, seat and rounds."""
    return {
        "question": transcript.item.question[:100],
        "instance_id": transcript.item.id,
        "debate": transcript.key[-1],
        "agent": seat.name,
        "role": transcript.role(seat),
        "rounds": [turn.round for turn in transcript.sampled_turns(seat)],
    }


def view_record(view: DebateView) -> dict[str, Any]:
    """The judge's view and the truth about it: enough to judge the debate again."""
    return asdict(view)


def read_view(record: Mapping[str, Any]) -> DebateView:
    """Read the view from a `view_record`. Raises KeyError or TypeError if it is invalid."""
    seats = tuple(SeatView(**seat) for seat in record["seats"])
    return DebateView(record["context"], seats, tuple(record["key"]), record.get("reference"))


def _judge(verdict: Verdict) -> dict[str, Any]:
    """The judge's prompt, reply, shares and votes; empty if it has none."""
    words = judge_words(verdict.raw_response, verdict.call)
    if verdict.shares is not None:
        words["shares"] = list(verdict.shares)
    if verdict.votes:
        words["votes"] = [vote.value for vote in verdict.votes]
    return words


def judge_words(raw_response: str, call: JudgeCall | None) -> dict[str, Any]:
    """A judge's reply and its tokens, if there are any."""
    words: dict[str, Any] = {"raw_response": raw_response} if raw_response or call is not None else {}
    if call is not None:
        words |= {
            **asdict(call),
            "prompt_token_count": len(call.prompt_tokens),
            "completion_token_count": len(call.completion_tokens),
        }
    return words


def _agent_key(seat: Seat) -> str:
    return f"agent_{seat.name.lower()}"


def _agent(transcript: Transcript, seat: Seat) -> dict[str, Any]:
    score = transcript.scores.get(seat)
    rewards = {} if score is None else {"task_reward": score.reward, "task_reward_metrics": score.metrics}
    return {
        "role": transcript.role(seat),
        "frozen_solution": transcript.solution(seat),
        **{f"r{i}": turn.text for i, turn in enumerate(transcript.turns[seat], start=1)},
        "metrics": {"instance_id": transcript.item.id, **rewards},
        "transitions": [],
    }


def _speeches(transcript: Transcript, seat: Seat, member: int) -> RecordedMember:
    """The policy's turns for a seat: its last turns, because an assigned answer comes first."""
    texts = [turn.raw for turn in transcript.sampled_turns(seat)]
    first = len(transcript.turns[seat]) - len(texts) + 1
    return RecordedMember(member, "speeches", texts, under=_agent_key(seat), first_round=first)
