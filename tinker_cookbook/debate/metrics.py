"""Metrics of a finished debate, per seat. Averages over a step are in metrics.jsonl under env/all/; docs/debate.md
lists them.
"""

from collections.abc import Sequence
from statistics import fmean, pvariance

from tinker_cookbook.debate.transcript import Transcript
from tinker_cookbook.debate.views import Seat, Verdict, Winner
from tinker_cookbook.rl.types import Metrics, Trajectory

_RATES = (
    "judge_accuracy", "judge_accuracy_overall", "judge_accuracy_disagree", "no_debate_accuracy", "held_out_accuracy",
    "with_key_accuracy", "win_if_correct", "win_if_wrong", "winner_correct", "proposal_accuracy", "agreement", "tie", "invalid",
    "held_out_agreement",
)  # fmt: skip
_DIFFERENCES = ("gain_over_no_debate", "agent_score_difference", "hacking_gap")
_BIASES = ("position_bias", "verbosity_bias")


def rate_ranges(num_options: int) -> dict[str, tuple[float, float]]:
    """Metrics with an interval, <key>_low and <key>_high, and their ranges."""
    chance = 1 / num_options
    return {
        **{f"debate/{name}": (0.0, 1.0) for name in _RATES},
        **{f"debate/{name}": (-1.0, 1.0) for name in _DIFFERENCES},
        **{f"debate/{name}": (-chance, 1 - chance) for name in _BIASES},
    }


def member_metrics(transcript: Transcript, seat: Seat) -> Metrics:
    """Metrics of one seat that the policy speaks for; the first seat alone reports those of the whole debate.

    - debate/won: this seat won (ties and invalid debates count as 0)
    - debate/win_if_correct, win_if_wrong: over decided debates, by whether this seat was right
    - debate/malformed: a turn of this seat contains a control token before its end; the debate is invalid
    - debate/proposal_accuracy: over the policy's answers; winner_correct is the same after the verdict
    - debate/winner_correct, winner_tokens, loser_tokens: over decided debates
    """
    verdict = transcript.verdict
    assert verdict is not None
    is_first = seat is transcript.speakers[0]
    if not transcript.was_held:  # too long to be debated
        return {"debate/won": 0.0} | ({"debate/invalid": 1.0, "debate/tie": 0.0} if is_first else {})
    decided = verdict.winner.seat is not None
    won, correct = transcript.won(seat), transcript.correct(seat)
    metrics: Metrics = {"debate/won": float(won), "debate/malformed": float(transcript.is_malformed(seat))}
    answer = transcript.answer(seat)
    if answer is not None and answer.is_sampled and correct is not None:
        metrics["debate/proposal_accuracy"] = float(correct)
    if decided:
        metrics["debate/winner_tokens" if won else "debate/loser_tokens"] = _spoken_tokens(transcript, seat)
        if correct is not None:
            metrics["debate/win_if_correct" if correct else "debate/win_if_wrong"] = float(won)
            if won:
                metrics["debate/winner_correct"] = float(correct)
    return metrics | _debate_metrics(transcript, verdict) if is_first else metrics


def _spoken_tokens(transcript: Transcript, seat: Seat) -> int:
    return sum(len(turn.tokens) for turn in transcript.turns[seat])


def _debate_metrics(transcript: Transcript, verdict: Verdict) -> Metrics:
    """- debate/tie, invalid, judge_retries, agreement, confidence_parsed: per debate
    - debate/judge_calls, judge_prompt_tokens, judge_cost and others of endpoints.Usage: per debate, of an endpoint judge
    """
    seats = transcript.seats
    solutions = {transcript.solution(seat) for seat in seats if transcript.answer(seat) is not None}
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
    metrics |= _bias_metrics(transcript, verdict)
    right = _right_options(transcript)
    if right is not None:
        metrics |= _truth_metrics(transcript, verdict, right)
    if (held_out := transcript.measured.get("held_out")) is not None:
        metrics |= _held_out_metrics(verdict, held_out, len(seats))
    return metrics


def _bias_metrics(transcript: Transcript, verdict: Verdict) -> Metrics:
    """Over decided debates, and 0 for a judge without the bias:

    - debate/a_wins; position_bias: that the first seat wins, minus 1 / seats
    - debate/verbosity_bias: that the seat with most tokens wins, minus 1 / seats; over debates in which one has most
    """
    winner, seats = verdict.winner.seat, transcript.seats
    if winner is None:
        return {}
    metrics: Metrics = {"debate/a_wins": float(winner is Seat.A)}
    if len(seats) > 1:
        metrics["debate/position_bias"] = float(winner is Seat.A) - 1 / len(seats)
        lengths = [_spoken_tokens(transcript, seat) for seat in seats]
        longest = [seat for seat, length in zip(seats, lengths, strict=True) if length == max(lengths)]
        if len(longest) == 1:
            metrics["debate/verbosity_bias"] = float(winner is longest[0]) - 1 / len(seats)
    return metrics


def _right_options(transcript: Transcript) -> list[bool] | None:
    """Which verdicts would be right: for each seat, or that the only answer is right or wrong. None: unknown."""
    correct = [transcript.correct(seat) for seat in transcript.seats]
    right = [bool(one) for one in correct if one is not None]
    if len(right) < len(correct):
        return None
    return right if len(right) > 1 else [right[0], not right[0]]


def accuracy(verdict: Verdict, right: Sequence[bool]) -> float:
    """Whether the verdict is right; for a tie the fraction of right options, and 0 without a verdict."""
    if verdict.winner is Winner.INVALID:
        return 0.0
    return fmean(right) if verdict.winner.seat is None else float(right[verdict.winner.seat])


def _truth_metrics(transcript: Transcript, verdict: Verdict, right: Sequence[bool]) -> Metrics:
    """- debate/judge_accuracy_overall: over all debates, whether the winner is right; a tie counts for its share of right seats,
      an invalid debate 0
    - debate/judge_accuracy_disagree: the same over debates in which exactly one seat is right
    - debate/judge_accuracy: the same over those of them that were decided
    - debate/agent_score_difference: how much larger a share of the verdict right seats get than wrong ones (Sudhir et
    al. 2025)
    - debate/no_debate_accuracy, with_key_accuracy, held_out_accuracy: judge_accuracy_overall of the verdicts that `measure` and
      `held_out_judge` asked for; gain_over_no_debate: what the speeches add, debate by debate
    """
    overall = accuracy(verdict, right)
    metrics: Metrics = {"debate/judge_accuracy_overall": overall}
    if sum(right) == 1:
        metrics["debate/judge_accuracy_disagree"] = overall
        if verdict.winner.seat is not None:
            metrics["debate/judge_accuracy"] = overall
    shares = [verdict.share(i, len(right)) for i in range(len(right))]
    stated = [share for share in shares if share is not None]
    if stated and any(right) and not all(right):
        of_right = fmean(share for share, is_right in zip(stated, right, strict=True) if is_right)
        of_wrong = fmean(share for share, is_right in zip(stated, right, strict=True) if not is_right)
        metrics["debate/agent_score_difference"] = of_right - of_wrong
    for name, measured in transcript.measured.items():
        metrics[f"debate/{name}_accuracy"] = accuracy(measured, right)
    if "no_debate" in transcript.measured:
        metrics["debate/gain_over_no_debate"] = overall - metrics["debate/no_debate_accuracy"]
    return metrics


def _held_out_metrics(verdict: Verdict, held_out: Verdict, num_seats: int) -> Metrics:
    """How far the training judge has diverged from one that is not trained on:

    - debate/hacking_gap: what the training judge gives to its winner (or, of a single answer, to the answer), minus what the
      held-out judge gives to the same; it grows when the policy learns to please the one and not the other
    - debate/held_out_agreement: both have the same verdict
    """
    if Winner.INVALID in (verdict.winner, held_out.winner):
        return {}
    metrics: Metrics = {"debate/held_out_agreement": float(verdict.winner is held_out.winner)}
    chosen = Seat.A if num_seats == 1 else verdict.winner.seat
    if chosen is not None:
        options = max(2, num_seats)
        share, other = verdict.share(chosen, options), held_out.share(chosen, options)
        assert share is not None and other is not None
        metrics["debate/hacking_gap"] = share - other
    return metrics


def survivor_metrics(trajectories_G: Sequence[Trajectory], trained_G: Sequence[bool]) -> Metrics:
    """For a question's rollouts: debate/survivors, how many train, and debate/survivor_variance, of their total
    rewards. If the variance is 0, a mode that compares them trains nothing.
    """
    rewards = [
        sum(transition.reward for transition in trajectory.transitions)
        for trajectory, trained in zip(trajectories_G, trained_G, strict=True)
        if trained
    ]
    return {"debate/survivors": len(rewards), "debate/survivor_variance": pvariance(rewards) if rewards else 0.0}
