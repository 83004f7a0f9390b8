"""Ask a judge more than once, in several orders of the seats or several times, and merge the verdicts into one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tinker_cookbook.completers import TokenCompleter
from tinker_cookbook.debate.lm_judge import Judge
from tinker_cookbook.debate.views import DebateView, Seat, Verdict, Winner
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.utils.misc_utils import gather_all


@dataclass(frozen=True)
class BothOrdersJudge(Judge):
    """Asks with the seats in order and in reverse; if the two verdicts differ, the result is a TIE.

    Position bias cancels. Probabilities of soft verdicts are averaged. If one order is INVALID, so is the result. A
    single answer has only one order.
    """

    judge: Judge

    async def __call__(self, view: DebateView) -> Verdict:
        seats = range(len(view.seats))
        if len(seats) == 1:
            return await self.judge(view)
        orders = [tuple(seats), tuple(reversed(seats))]
        shown = [replace(view.in_order(order), key=(*view.key, i)) for i, order in enumerate(orders)]
        verdicts = await gather_all(self.judge(one) for one in shown)
        return _merge_orders([_in_view_order(verdict, order) for verdict, order in zip(verdicts, orders, strict=True)])

    def of_policy(self, policy: TokenCompleter | None, renderer: Renderer) -> Judge:
        return BothOrdersJudge(self.judge.of_policy(policy, renderer))


@dataclass(frozen=True)
class VotesJudge(Judge):
    """Asks `votes` times with different random numbers; the seat with most votes wins, and equal votes are a TIE.

    A TIE counts as a vote for TIE. Calls without a verdict do not count; without any vote the result is INVALID. Shares
    are fractions of the votes, or the mean of soft verdicts.
    """

    judge: Judge
    votes: int

    async def __call__(self, view: DebateView) -> Verdict:
        verdicts = await gather_all(self.judge(replace(view, key=(*view.key, vote))) for vote in range(self.votes))
        return _count_votes(verdicts, view)

    def of_policy(self, policy: TokenCompleter | None, renderer: Renderer) -> Judge:
        return VotesJudge(self.judge.of_policy(policy, renderer), self.votes)


def _in_view_order(verdict: Verdict, order: Sequence[int]) -> Verdict:
    """Map a verdict about seats in this order back to the seats of the view."""

    def seat_of(winner: Winner) -> Winner:
        return winner if winner.seat is None else Winner(Seat(order[winner.seat]).name)

    shares = verdict.shares
    if shares is not None:
        shares = tuple(shares[order.index(i)] for i in range(len(order)))
    votes = tuple(seat_of(vote) for vote in verdict.votes)
    return replace(verdict, winner=seat_of(verdict.winner), shares=shares, votes=votes)


def _merge_orders(verdicts: Sequence[Verdict]) -> Verdict:
    winners = tuple(verdict.winner for verdict in verdicts)
    merged = _merge_calls(verdicts, winners)
    if Winner.INVALID in winners:
        return replace(merged, winner=Winner.INVALID)
    shares = _mean_shares(verdicts)
    winner = winners[0] if len(set(winners)) == 1 else Winner.TIE
    return replace(merged, winner=winner, shares=shares)


def _count_votes(verdicts: Sequence[Verdict], view: DebateView) -> Verdict:
    valid = [verdict for verdict in verdicts if verdict.winner is not Winner.INVALID]
    merged = _merge_calls(verdicts, tuple(verdict.winner for verdict in verdicts))
    if not valid:
        return replace(merged, winner=Winner.INVALID)
    counted = Counter(verdict.winner for verdict in valid)
    most = max(counted[option] for option in view.options)
    leading = [option for option in view.options if counted[option] == most]
    winner = leading[0] if len(leading) == 1 and most > counted[Winner.TIE] else Winner.TIE
    shares = _mean_shares(valid)
    if shares is None:
        options = range(view.num_options)
        shares_by_verdict = [[verdict.share(i, view.num_options) or 0.0 for i in options] for verdict in valid]
        shares = tuple(sum(column) / len(valid) for column in zip(*shares_by_verdict, strict=True))
    return replace(merged, winner=winner, shares=shares)


def _mean_shares(verdicts: Sequence[Verdict]) -> tuple[float, ...] | None:
    """None if any verdict is hard."""
    shares = [verdict.shares for verdict in verdicts if verdict.shares is not None]
    if len(shares) < len(verdicts):
        return None
    return tuple(sum(column) / len(shares) for column in zip(*shares, strict=True))


def _merge_calls(verdicts: Sequence[Verdict], winners: tuple[Winner, ...]) -> Verdict:
    """Merge the calls: the text of all, the last call, the summed usage. The caller sets the winner."""
    usage = Counter[str]()
    for verdict in verdicts:
        usage.update(verdict.usage)
    return Verdict(
        Winner.TIE,
        "\n".join(verdict.reasoning for verdict in verdicts if verdict.reasoning),
        "\n".join(verdict.raw_response for verdict in verdicts if verdict.raw_response),
        verdicts[-1].call,
        retries=sum(verdict.retries for verdict in verdicts),
        usage=dict(usage),
        votes=tuple(
            vote for verdict, winner in zip(verdicts, winners, strict=True) for vote in (verdict.votes or (winner,))
        ),
    )
