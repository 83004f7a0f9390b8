"""A judge that is asked in both orders, several times, or for its probabilities; the live policy; and what a bias does then."""

import asyncio
import dataclasses
import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any, ClassVar

import numpy as np
import pytest
import tinker

from tests.debate.arena import ITEM, RIGHT, WRONG, decode, make_renderer, speech, three_turns
from tests.fakes import ScriptedCompleter
from tinker_cookbook.completers import TinkerTokenCompleter
from tinker_cookbook.debate.asking import BothOrdersJudge, VotesJudge
from tinker_cookbook.debate.env import DebateGroupBuilder, DebateProtocol, make_dialogue
from tinker_cookbook.debate.judges import (
    SCRIPTS,
    ConfidenceJudge,
    Judge,
    JudgeConfig,
    KeyJudge,
    MockJudge,
    ScriptedJudge,
    make_judge,
)
from tinker_cookbook.debate.lm_judge import LiveJudge, LMJudge, SoftJudge, label_logprobs, soft_verdict
from tinker_cookbook.debate.protocols import ProtocolConfig
from tinker_cookbook.debate.views import DebateView, Seat, SeatView, Verdict, Winner, step_view
from tinker_cookbook.endpoints import LikelyToken
from tinker_cookbook.env.steps import Step
from tinker_cookbook.env.tasks import get_task
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.utils.seeds import derive_seed

RENDERER = make_renderer("qwen3_instruct")
GOOD, BAD = SeatView(["good"], 0.9, 1.0, correct=True), SeatView(["bad one"], 0.4, 0.0, correct=False)
VIEW = DebateView("Q", (GOOD, BAD), (3, 1))


def ask(by: Judge, view: DebateView = VIEW) -> Verdict:
    return asyncio.run(_called(by, view))


async def _called(by: Judge, view: DebateView) -> Verdict:
    return await by(view)


@dataclasses.dataclass(frozen=True)
class By(Judge):
    decide: Callable[[DebateView], Verdict]

    async def __call__(self, view: DebateView) -> Verdict:
        return self.decide(view)


class TestBothOrders:
    @pytest.mark.parametrize("seats", [(GOOD, BAD), (BAD, GOOD)])
    def test_a_judge_that_goes_by_content_is_heard(self, seats: tuple[SeatView, ...]) -> None:
        verdict = ask(BothOrdersJudge(ScriptedJudge(SCRIPTS["truth"])), dataclasses.replace(VIEW, seats=seats))
        own = Winner.A if seats[0] is GOOD else Winner.B
        assert (verdict.winner, verdict.votes) == (own, (own, own))

    @pytest.mark.parametrize("always", ["A", "B"])
    def test_one_that_goes_by_position_ties(self, always: str) -> None:
        verdict = ask(BothOrdersJudge(ScriptedJudge(SCRIPTS[always])))
        assert verdict.winner is Winner.TIE and set(verdict.votes) == {Winner.A, Winner.B}

    def test_with_three_seats_the_order_is_reversed(self) -> None:
        view = dataclasses.replace(VIEW, seats=(BAD, BAD, GOOD))
        assert ask(BothOrdersJudge(ScriptedJudge(SCRIPTS["truth"])), view).winner is Winner.C
        assert ask(BothOrdersJudge(ScriptedJudge(SCRIPTS["A"])), view).winner is Winner.TIE

    def test_without_a_verdict_in_one_order_there_is_none(self) -> None:
        by = By(lambda view: Verdict(Winner.INVALID if view.seats[0] is GOOD else Winner.A))
        assert ask(BothOrdersJudge(by)).winner is Winner.INVALID

    def test_shares_are_those_of_the_seats_and_averaged(self) -> None:
        """It gives the good one 0.8, and whoever is shown first 0.1 more: the position cancels."""

        def decide(view: DebateView) -> Verdict:
            first = 0.9 if view.seats[0] is GOOD else 0.3
            return Verdict(Winner.A if first > 0.5 else Winner.B, shares=(first, 1 - first))

        verdict = ask(BothOrdersJudge(By(decide)))
        assert verdict.winner is Winner.A and verdict.shares == pytest.approx((0.8, 0.2))
        assert verdict.share(Seat.B, 2) == pytest.approx(0.2)

    def test_a_single_answer_is_asked_about_once(self) -> None:
        verdict = ask(BothOrdersJudge(ScriptedJudge(SCRIPTS["A"])), dataclasses.replace(VIEW, seats=(GOOD,)))
        assert verdict.winner is Winner.A and verdict.votes == ()


class TestVotes:
    def says(self, *winners: str) -> Judge:
        return VotesJudge(By(lambda view: Verdict(Winner(winners[view.key[-1]]))), len(winners))

    @pytest.mark.parametrize(
        ("votes", "winner", "shares"),
        [
            ("A B A", "A", (2 / 3, 1 / 3)), ("A B", "TIE", (0.5, 0.5)), ("B TIE INVALID B", "B", (1 / 6, 5 / 6)),
            ("A TIE", "TIE", (0.75, 0.25)), ("TIE TIE A", "TIE", (2 / 3, 1 / 3)),
        ],
    )  # fmt: skip
    def test_most_votes_win(self, votes: str, winner: str, shares: tuple[float, float]) -> None:
        verdict = ask(self.says(*votes.split()))
        assert verdict.winner is Winner(winner) and verdict.shares == pytest.approx(shares)
        assert verdict.votes == tuple(map(Winner, votes.split()))

    def test_without_any_vote_it_is_invalid(self) -> None:
        verdict = ask(self.says("INVALID", "INVALID"))
        assert verdict.winner is Winner.INVALID and verdict.share(Seat.A, 2) is None

    def test_each_vote_draws_its_own_random_numbers(self) -> None:
        verdict = ask(VotesJudge(MockJudge(0), 40))
        assert 8 < verdict.votes.count(Winner.A) < 32
        assert verdict.votes == ask(VotesJudge(MockJudge(0), 40)).votes


class Likes:
    """A sampling client that knows how likely each verdict is, by the label."""

    def __init__(self, **probabilities: float):
        self.probabilities, self.asked = probabilities, list[list[int]]()

    async def compute_logprobs(self, prompt: tinker.ModelInput) -> list[float | None]:
        tokens = prompt.to_ints()
        self.asked.append(tokens)
        label = decode(RENDERER, tokens).rpartition("<VERDICT>")[2].removesuffix("</VERDICT>")
        said = RENDERER.encode_text(f"<VERDICT>{label}</VERDICT>")
        each = math.log(self.probabilities[label]) / len(said)
        return [None, *[-5.0] * (len(tokens) - len(said) - 1), *[each] * len(said)]


class TestSoft:
    def test_probabilities_of_the_labels_sum_to_one_and_a_tie_is_shared(self) -> None:
        client: Any = Likes(A=0.3, B=0.1, TIE=0.2)
        verdict = ask(SoftJudge(client, RENDERER))
        assert verdict.winner is Winner.A and verdict.shares == pytest.approx((4 / 6, 2 / 6))
        assert len(client.asked) == 3 and verdict.reasoning == "A=0.500 B=0.167 TIE=0.333"

    def test_a_step_is_right_or_wrong_and_nothing_else(self) -> None:
        client: Any = Likes(RIGHT=0.2, WRONG=0.6)
        view = step_view(Step("a", "43 makes 130", True), (0, 0, 0))
        verdict = asyncio.run(SoftJudge(client, RENDERER)(view))
        assert verdict.winner is Winner.B and verdict.shares == pytest.approx((0.25, 0.75)) and len(client.asked) == 2

    def test_equally_likely_labels_tie(self) -> None:
        client: Any = Likes(A=0.25, B=0.25, TIE=0.01)
        assert ask(SoftJudge(client, RENDERER)).winner is Winner.TIE

    def test_a_debate_that_is_too_long_is_invalid(self) -> None:
        client: Any = Likes(A=1, B=1, TIE=1)
        assert ask(SoftJudge(client, RENDERER, max_prompt_tokens=3)).winner is Winner.INVALID and client.asked == []

    def test_it_does_not_underflow(self) -> None:
        assert soft_verdict([-2000.0, -2001.0, -math.inf]).shares == pytest.approx(
            (1 / (1 + math.exp(-1)), 1 / (1 + math.e))
        )

    def test_only_a_language_model_tells_probabilities(self) -> None:
        with pytest.raises(ConfigurationError, match=r"use judge\.name=lm, live, endpoint"):
            JudgeConfig(name="mock", soft=True)
        with pytest.raises(ConfigurationError, match="every vote would be the same"):
            JudgeConfig(name="lm", soft=True, votes=3)

    def test_the_live_policy_scores_the_verdicts_as_it_is_now(self) -> None:
        client: Any = Likes(A=0.1, B=0.3, TIE=0.2)
        live = asyncio.run(make_judge(JudgeConfig(name="live", soft=True)))
        judge = live.of_policy(TinkerTokenCompleter(client, max_tokens=8, context_window=4096), RENDERER)
        verdict = ask(judge)
        assert verdict.winner is Winner.B and verdict.shares == pytest.approx((2 / 6, 4 / 6))
        with pytest.raises(ConfigurationError, match="ScriptedCompleter does not score given tokens"):
            live.of_policy(ScriptedCompleter({}), RENDERER)


def tokens(*said: str, **likely: float) -> list[LikelyToken]:
    """Tokens of a reply; in the place of the one that is `?`, first, these are likely."""
    return [
        LikelyToken(next(iter(likely)), {text: math.log(p) for text, p in likely.items()})
        if text == "?"
        else LikelyToken(text, {text: 0.0})
        for text in said
    ]


class TestSoftEndpoint:
    LABELS: ClassVar = [Winner.A, Winner.B, Winner.TIE]

    @pytest.mark.parametrize(
        ("reply", "expected"),
        [
            (tokens("<VERDICT>", "?", "</VERDICT>", A=0.6, B=0.3, T=0.1), (0.6, 0.3, 0.1)),
            (tokens("Well. <VER", "DICT>", "?", "</", A=0.5, **{" A": 0.1, "B</": 0.2, "TIE": 0.05}), (0.6, 0.2, 0.05)),
            (tokens("<VERDICT", "?", "</VERDICT>", **{">B": 0.7, ">A": 0.2, ">": 0.1}), (0.2, 0.7, 0)),
            (tokens("<VERDICT>", " ", "?", B=0.9, Answer=0.1), (0, 0.9, 0)),
        ],
    )
    def test_the_labels_in_the_place_of_the_verdict(
        self, reply: list[LikelyToken], expected: tuple[float, ...]
    ) -> None:
        found = label_logprobs(reply, self.LABELS)
        assert found is not None and [math.exp(one) for one in found] == pytest.approx(expected)

    @pytest.mark.parametrize(
        "reply",
        [
            tokens("who knows"), tokens("<VERDICT>"), tokens("<VERDICT>", "?", yes=0.9, no=0.1),
            tokens("<VERDICT>", "A", "</VERDICT>", "<VERDICT>", "B"), [],
        ],
    )  # fmt: skip
    def test_a_reply_without_a_verdict_has_none(self, reply: list[LikelyToken]) -> None:
        assert label_logprobs(reply, self.LABELS) is None


class TestKey:
    @pytest.mark.parametrize(
        ("correct", "winner"),
        [
            ((True, False), "A"),
            ((False, True), "B"),
            ((True, True), "TIE"),
            ((False, False), "TIE"),
            ((None, True), "INVALID"),
        ],
    )
    def test_it_finds_for_the_one_that_is_right(self, correct: Sequence[bool | None], winner: str) -> None:
        seats = tuple(SeatView(["x"], correct=one) for one in correct)
        assert ask(KeyJudge(), dataclasses.replace(VIEW, seats=seats)).winner is Winner(winner)

    @pytest.mark.parametrize(("correct", "winner"), [(True, "A"), (False, "B")])
    def test_of_a_single_answer_whether_it_holds(self, correct: bool, winner: str) -> None:
        seat = SeatView(["x"], 0.7 if correct else 0.2, float(correct), correct)
        view = dataclasses.replace(VIEW, seats=(seat,))
        judges = (KeyJudge(), ScriptedJudge(SCRIPTS["truth"]), ConfidenceJudge())
        assert [ask(by, view).winner for by in judges] == [Winner(winner)] * 3


class TestLive:
    def group(self, judge: Judge, says: str) -> tuple[Any, ScriptedCompleter]:
        builder = DebateGroupBuilder(DebateProtocol(make_dialogue(get_task("qa"), RENDERER), judge), ITEM, 1, (4, 2))

        class Policy(ScriptedCompleter):
            """Says its lines as a debater and a verdict as a judge."""

            def fork(self, *key):
                if key and key[0] == "judge":
                    return ScriptedCompleter({0: [speech(RENDERER, says)]})
                return super().fork(*key)

        policy = Policy({i: three_turns(RENDERER, text) for i, text in enumerate((RIGHT, WRONG))})
        return asyncio.run(do_group_rollout(builder, policy)), policy

    def test_the_policy_that_debates_is_asked(self) -> None:
        group, _ = self.group(BothOrdersJudge(VotesJudge(LiveJudge(max_retries=0), 2)), "<VERDICT>B</VERDICT>")
        assert group.records[0].content["verdict"] == "TIE"  # B in both orders
        group, _ = self.group(LiveJudge(max_retries=0), "<VERDICT>B</VERDICT>")
        assert group.is_trained() == [False, True]

    def test_without_a_policy_there_is_no_such_judge(self) -> None:
        with pytest.raises(ConfigurationError, match="judge=live is the policy that debates"):
            ask(LiveJudge())


def test_config_wraps_the_judge() -> None:
    judge = asyncio.run(make_judge(JudgeConfig(name="mock", votes=3, both_orders=True)))
    assert judge == BothOrdersJudge(VotesJudge(MockJudge(0), 3))
    assert asyncio.run(make_judge(JudgeConfig(name="live"))) == LiveJudge(None, 1)


def leaning(view: DebateView) -> Winner:
    """Weighs content and position alike: the truth half of the time, else whoever is shown first."""
    by_content = derive_seed("which", *view.key) & 1
    return SCRIPTS["truth"](view) if by_content else Winner.A


SYMMETRIC = [
    ScriptedJudge(SCRIPTS["truth"]),
    ScriptedJudge(SCRIPTS["longer"]),
    MockJudge(0),
    KeyJudge(),
    ConfidenceJudge(),
]


class TestNoSeatIsFavoured:
    """Debates of the same policy in either seat: a symmetric judge pays both the same, in expectation and by numbers."""

    DEBATES = 300

    def shares(self, judge: Judge, config: ProtocolConfig | None = None) -> tuple[float, float]:
        """Mean share of A and of B where each seat is right in half of the debates, by the same draws."""
        rng, found = np.random.default_rng(0), [list[float](), list[float]()]
        for i in range(self.DEBATES):
            seats = [
                SeatView(["said " * int(length)], round(float(sure), 2), float(right), bool(right))
                for right, length, sure in zip(rng.integers(0, 2, 2), rng.integers(1, 9, 2), rng.random(2), strict=True)
            ]
            for shown in (seats, seats[::-1]):  # whoever is A here is B in the other
                verdict = ask(judge, DebateView("Q", tuple(shown), (0, i)))
                for seat in (0, 1):
                    share = verdict.share(seat, 2)
                    assert share is not None
                    found[seat].append(share)
        return fmean(found[0]), fmean(found[1])

    @pytest.mark.parametrize("judge", SYMMETRIC, ids=lambda judge: type(judge).__name__)
    def test_a_symmetric_judge_gives_both_seats_the_same(self, judge: Judge) -> None:
        a, b = self.shares(judge)
        assert a + b == pytest.approx(1)
        assert a == pytest.approx(0.5, abs=0 if not isinstance(judge, MockJudge) else 0.06)

    def test_a_bias_to_a_position_shows_and_both_orders_take_it_away(self) -> None:
        """Half of the verdicts find for A whatever is said: A has 0.75, and 0.5 once both orders are asked."""
        biased = ScriptedJudge(leaning)
        assert self.shares(biased)[0] == pytest.approx(0.75, abs=0.05)
        assert self.shares(BothOrdersJudge(biased))[0] == pytest.approx(0.5, abs=0.03)

    def test_so_does_the_reward_of_each_seat_in_played_debates(self) -> None:
        """The same lines in either seat, by a symmetric judge: each seat wins as often, and its answers are worth as much."""
        answers = [(RIGHT, WRONG), (WRONG, RIGHT), (RIGHT, RIGHT), (WRONG, WRONG)] * 2
        members = [three_turns(RENDERER, text, name) for pair in answers for text, name in zip(pair, "AB", strict=True)]
        builder = DebateGroupBuilder(
            DebateProtocol(make_dialogue(get_task("qa"), RENDERER), ScriptedJudge(SCRIPTS["truth"])), ITEM, 8, (0, 0)
        )
        group = asyncio.run(do_group_rollout(builder, ScriptedCompleter(dict(enumerate(members)))))
        by_seat = [list(zip(group.get_total_rewards(), group.is_trained(), strict=True))[seat::2] for seat in (0, 1)]
        won = [sum(reward for reward, trained in members if trained) for members in by_seat]
        assert won == [2.0, 2.0]
        assert [sum(trained for _, trained in members) for members in by_seat] == [2, 2]


def test_an_lm_judge_reads_only_labels_that_are_options() -> None:
    completer = ScriptedCompleter({0: [speech(RENDERER, "<VERDICT>C</VERDICT>")]})
    three = dataclasses.replace(VIEW, seats=(GOOD, BAD, BAD))
    assert ask(LMJudge(completer, RENDERER, max_retries=0), three).winner is Winner.C
    completer = ScriptedCompleter({0: [speech(RENDERER, "<VERDICT>C</VERDICT>")]})
    assert ask(LMJudge(completer, RENDERER, max_retries=0)).winner is Winner.INVALID
