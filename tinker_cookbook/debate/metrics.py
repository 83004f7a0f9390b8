"""Metrics of a finished debate, per seat."""

from tinker_cookbook.debate.transcript import Transcript
from tinker_cookbook.debate.views import Seat, Winner
from tinker_cookbook.rl.types import Metrics


def member_metrics(transcript: Transcript, seat: Seat) -> Metrics:
    """Metrics of one seat that the policy speaks for; those of the debate as a whole are reported by the first alone.

    - debate/won: this seat won (ties and invalid debates count as 0)
    - debate/win_if_correct, win_if_wrong: over decided debates, by whether this seat was right
    - debate/malformed: a turn of this seat holds a control token before its end; the debate is invalid
    - debate/winner_correct, winner_tokens, loser_tokens: over decided debates
    - debate/a_wins (position bias), tie, invalid, judge_retries, agreement: per debate
    - debate/judge_calls, judge_prompt_tokens, judge_cost and others of endpoints.Usage: per debate, of an endpoint judge
    - debate/judge_accuracy: over decided debates in which exactly one seat was right, or the only answer was judged
    """
    verdict = transcript.verdict
    assert verdict is not None
    is_first = seat is transcript.speakers[0]
    if not transcript.was_held:  # too long to be debated
        return {"debate/won": 0.0} | ({"debate/invalid": 1.0, "debate/tie": 0.0} if is_first else {})
    decided = verdict.winner.seat is not None
    won, correct = transcript.won(seat), transcript.correct(seat)
    metrics: Metrics = {"debate/won": float(won), "debate/malformed": float(transcript.is_malformed(seat))}
    if decided:
        tokens = sum(len(turn.tokens) for turn in transcript.turns[seat])
        metrics["debate/winner_tokens" if won else "debate/loser_tokens"] = tokens
        if correct is not None:
            metrics["debate/win_if_correct" if correct else "debate/win_if_wrong"] = float(won)
            if won:
                metrics["debate/winner_correct"] = float(correct)
    return metrics | _debate_metrics(transcript) if is_first else metrics


def _debate_metrics(transcript: Transcript) -> Metrics:
    verdict, places = transcript.verdict, transcript.seats
    assert verdict is not None
    solutions = {transcript.solution(seat) for seat in places if transcript.answer(seat) is not None}
    answers = [transcript.confidence(seat) for seat in transcript.scores]
    metrics: Metrics = {
        "debate/tie": float(verdict.winner is Winner.TIE),
        "debate/invalid": float(verdict.winner is Winner.INVALID),
        "debate/judge_retries": verdict.retries,
    }
    if len(transcript.scores) > 1:
        metrics["debate/agreement"] = float(len(solutions) == 1 and None not in solutions)
    if transcript.protocol.answers == "proposed":
        metrics["debate/confidence_parsed"] = sum(answer is not None for answer in answers) / len(answers)
    metrics |= {f"debate/judge_{name}": value for name, value in verdict.usage.items()}
    if (winner := verdict.winner.seat) is not None:
        metrics["debate/a_wins"] = float(winner is Seat.A)
        right = [transcript.correct(seat) for seat in places]
        if len(places) == 1:
            right.append(None if right[0] is None else not right[0])
        if None not in right and sum(map(bool, right)) == 1:
            metrics["debate/judge_accuracy"] = float(bool(right[winner]))
    return metrics
