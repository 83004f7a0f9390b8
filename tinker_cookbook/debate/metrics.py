"""What one debate says of its debaters and its judge. Each metric is averaged over the members that report it."""

from tinker_cookbook.debate.judges import Winner
from tinker_cookbook.debate.transcript import Seat, Transcript
from tinker_cookbook.rl.types import Metrics


def member_metrics(transcript: Transcript, seat: Seat) -> Metrics:
    """Metrics of one seat; those of the debate as a whole are reported by seat A alone.

    - debate/won: this seat won (ties and invalid debates count as 0)
    - debate/win_if_correct, win_if_wrong: over decided debates, by whether this seat's answer was right
    - debate/malformed: a turn of this seat holds a control token before its end; the debate is invalid
    - debate/winner_correct, winner_tokens, loser_tokens: over decided debates
    - debate/a_wins (position bias), tie, invalid, judge_retries, agreement: per debate
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
    if seat is Seat.A:
        metrics |= _debate_metrics(transcript, winner, decided)
    return metrics


def _debate_metrics(transcript: Transcript, winner: Winner, decided: bool) -> Metrics:
    assert transcript.verdict is not None
    solutions = [transcript.solution(seat) for seat in Seat]
    metrics: Metrics = {
        "debate/tie": float(winner is Winner.TIE),
        "debate/invalid": float(winner is Winner.INVALID),
        "debate/judge_retries": transcript.verdict.retries,
        "debate/agreement": float(solutions[0] is not None and solutions[0] == solutions[1]),
        "debate/confidence_parsed": sum(transcript.confidence(seat) is not None for seat in Seat) / 2,
    }
    if decided:
        metrics["debate/a_wins"] = float(winner is Winner.A)
        right = [transcript.scores[seat].correct for seat in Seat]
        if right[0] is not None and right[0] != right[1]:
            metrics["debate/judge_accuracy"] = float((winner is Winner.A) == right[0])
    return metrics
