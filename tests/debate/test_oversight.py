"""Answers accepted or rejected by a judge of one step: who names the step, what each turn is worth, what is counted."""

import asyncio
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import pytest

from tests.debate.arena import TRAIL_ITEM, decode, make_renderer, reply_ids, speech, trail
from tests.fakes import ScriptedCompleter, said
from tests.waiting import HANG_SECONDS
from tinker_cookbook.completers import MessageCompleter, TokensWithLogprobs
from tinker_cookbook.debate.asking import VotesJudge
from tinker_cookbook.debate.env import DebateGroupBuilder
from tinker_cookbook.debate.erring import ErringJudge
from tinker_cookbook.debate.judges import FunctionJudge, Judge, KeyJudge, LMJudge, StepJudgeConfig, make_judge
from tinker_cookbook.debate.oversight import OversightProtocol
from tinker_cookbook.debate.prompts import CHECK_SYSTEM
from tinker_cookbook.debate.views import DebateView, Verdict, Winner, step_view
from tinker_cookbook.env.steps import Step
from tinker_cookbook.env.tasks import get_task
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Message
from tinker_cookbook.rl.advantages import AdvantageConfig
from tinker_cookbook.rl.minibatch import prepare_minibatch
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import TrajectoryGroup

RENDERER = make_renderer("qwen3_instruct")
RIGHT, WRONG, ITEM = trail(), trail("c"), TRAIL_ITEM


@dataclass(frozen=True)
class SilentJudge(Judge):
    """Has no verdict on this claim."""

    about: str

    async def __call__(self, view: DebateView) -> Verdict:
        if view.rounds_a == [self.about]:
            return Verdict(Winner.INVALID)
        return await KeyJudge()(view)


def claim_of(name: str) -> str:
    """Of a step of the right answer."""
    return next(step.claim for step in get_task("collatz").steps(ITEM, RIGHT) if step.name == name)  # type: ignore[attr-defined]


def play(
    name: str, members: Sequence[Sequence[str]], judge: Judge | None = None, key: tuple[int, int] = (0, 0)
) -> tuple[TrajectoryGroup, ScriptedCompleter]:
    protocol = OversightProtocol.make(name, get_task("collatz"), RENDERER, judge or KeyJudge())
    builder = DebateGroupBuilder(protocol, ITEM, len(members) // protocol.config.num_speakers, key)
    turns: dict[int, Sequence[TokensWithLogprobs]] = {
        i: [speech(RENDERER, text) for text in member] for i, member in enumerate(members)
    }
    policy = ScriptedCompleter(turns)

    async def bounded() -> TrajectoryGroup:
        async with asyncio.timeout(HANG_SECONDS):
            return await do_group_rollout(pickle.loads(pickle.dumps(builder)), policy)

    return asyncio.run(bounded()), policy


def rewards(group: TrajectoryGroup) -> list[list[float]]:
    return [[transition.reward for transition in trajectory.transitions] for trajectory in group.trajectories_G]


class TestDebate:
    def test_the_opponent_s_step_decides(self) -> None:
        """Member 0 is right and finds the mistake; member 1 can only point at a step that holds."""
        group, policy = play("debate", [[RIGHT, "c is wrong."], [WRONG, "b is wrong."]])
        assert rewards(group) == [[1.0, 1.0], [0.0, 0.0]]
        assert WRONG in decode(RENDERER, policy.heard[0][1])
        assert RIGHT in decode(RENDERER, policy.heard[1][1])
        assert group.metrics_G[0]["debate/pair_accuracy"] == 1.0
        assert [metrics["debate/judge_accuracy"] for metrics in group.metrics_G] == [1.0, 1.0]

    @pytest.mark.parametrize("objection", ["a is wrong.", "Everything is wrong.", "z is wrong."])
    def test_an_objection_that_misses_lets_a_wrong_answer_pass(self, objection: str) -> None:
        group, _ = play("debate", [[RIGHT, objection], [WRONG, "b is wrong."]])
        assert rewards(group) == [[1.0, 0.0], [1.0, 0.0]]
        assert group.metrics_G[1]["debate/hacking_gap"] == 1.0
        assert group.metrics_G[0]["debate/pair_accuracy"] == 0.5

    def test_an_answer_without_the_form_is_rejected_whatever_is_said(self) -> None:
        group, _ = play("debate", [["<SOLUTION>161</SOLUTION>", "a is wrong."], [RIGHT, "a is wrong."]])
        assert rewards(group) == [[0.0, 0.0], [1.0, 1.0]]

    def test_without_a_verdict_nobody_involved_trains(self) -> None:
        members = [[RIGHT, "c is wrong."], [WRONG, "b is wrong."], [RIGHT, "c is wrong."], [WRONG, "a is wrong."]]
        group, _ = play("debate", members, SilentJudge(claim_of("b")))
        assert group.is_trained() == [False, False, True, True]
        assert [metrics["debate/invalid"] for metrics in group.metrics_G] == [1.0, 0.0, 0.0, 0.0]

    def test_each_turn_is_credited_with_its_own_reward(self) -> None:
        """Answers 1 0 1 1 and speeches 1 0 0 0, each against the mean of its kind."""
        members = [[RIGHT, "c is wrong."], [WRONG, "b is wrong."], [RIGHT, "a is wrong."], [WRONG, "d is wrong."]]
        group, _ = play("debate", members)
        assert rewards(group) == [[1.0, 1.0], [0.0, 0.0], [1.0, 0.0], [1.0, 0.0]]
        batch = asyncio.run(prepare_minibatch([group], AdvantageConfig(credit="turn")))
        found = []
        for datum, trajectory in zip(batch.data_D, group.trajectories_G, strict=True):
            values = datum.loss_fn_inputs["advantages"].to_numpy()[datum.loss_fn_inputs["mask"].to_numpy() > 0]
            first = len(trajectory.transitions[0].ac.tokens)
            assert len(set(values[:first])) == len(set(values[first:])) == 1
            found.append((float(values[0]), float(values[first])))
        assert found == [(0.25, 0.75), (-0.75, -0.25), (0.25, -0.25), (0.25, -0.25)]


class TestControls:
    """One part of a debate, or of direct judging, is another."""

    TURNS = ((RIGHT, "c is wrong."), (WRONG, "b is wrong."))

    def test_a_speech_that_earns_nothing(self) -> None:
        """It decides as in a debate."""
        group, _ = play("debate_unpaid", self.TURNS)
        assert rewards(group) == [[1.0, 0.0], [0.0, 0.0]]
        assert [metrics["debate/names_step"] for metrics in group.metrics_G] == [1.0, 1.0]

    def test_a_random_step_in_place_of_the_named_one(self) -> None:
        """The speech is paid as in a debate, whatever it names; one step in twelve finds the mistake, as in direct judging."""
        drawn, direct = [], []
        for i in range(40):
            group, policy = play("debate_random_step", self.TURNS, key=(i, 0))
            (right, found), (wrong, missed) = rewards(group)
            assert (right, missed) == (1.0, 0.0) and found == 1.0 - wrong
            assert WRONG in decode(RENDERER, policy.heard[0][1]), "the speech is heard and asked for as in a debate"
            drawn.append(wrong)
            direct.append(rewards(play("direct", [[WRONG]], key=(i, 0))[0])[0][0])
        assert 0 < sum(1 - one for one in drawn) < 12 and 0 < sum(1 - one for one in direct) < 12

    def test_a_rebuttal_hears_the_objection_and_the_last_word_counts(self) -> None:
        """Member 0 corrects itself; member 1 had named the right step of nothing and stays with it."""
        turns = [[RIGHT, "a is wrong.", "c is wrong."], [WRONG, "b is wrong.", "d is wrong."]]
        group, policy = play("debate_rebuttal", turns)
        assert rewards(group) == [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]
        assert "b is wrong." in decode(RENDERER, policy.heard[0][2])
        assert WRONG not in decode(RENDERER, policy.heard[0][2]).partition("a is wrong.")[2]
        assert "debate/tokens_rebuttal" in group.trajectories_G[0].transitions[2].metrics
        turns = [[RIGHT, "c is wrong.", "Nothing more."], [WRONG, "b is wrong.", "d is wrong."]]
        group, _ = play("debate_rebuttal", turns)
        assert rewards(group)[0] == [1.0, 1.0, 1.0], "the objection stands"

    @pytest.mark.parametrize(("name", "checks"), [("direct_2", 2), ("direct_3", 3), ("direct_all", 12)])
    def test_more_checks_find_more(self, name: str, checks: int) -> None:
        found, seen = 0, []
        for i in range(60):
            VIEWS.clear()
            group, _ = play(name, [[WRONG]], Noting(), key=(i, 0))
            claims = [view.rounds_a[0] for view in VIEWS]
            seen.append(len(claims))
            rejected = rewards(group)[0][0] == 0.0
            assert len(set(claims)) == len(claims) <= checks and group.metrics_G[0]["debate/judge_checks"] == len(
                claims
            )
            assert rejected == (group.records[0].content["checked_step"]["name"] == "c")
            assert len({view.key for view in VIEWS}) == len(claims), "each check has its own random numbers"
            found += rejected
        assert max(seen) == checks or checks == 12
        assert found / 60 == pytest.approx(checks / 12, abs=0.15), "a single mistake among twelve steps"

    def test_the_form_alone(self) -> None:
        group, _ = play("format", [[RIGHT], [WRONG], ["<SOLUTION>161</SOLUTION>"]], Noting())
        assert rewards(group) == [[1.0], [1.0], [0.0]]
        assert "debate/judge_checks" not in group.metrics_G[0]

    def test_an_unknown_signal(self) -> None:
        with pytest.raises(
            ConfigurationError, match="protocol=duel is not an oversight signal; use debate, consultancy"
        ):
            play("duel", [[RIGHT]])


class TestErrors:
    """A judge that errs as often as it is told to."""

    @pytest.mark.parametrize(("accepts", "rejects"), [(0.2, 0.0), (0.0, 0.3), (0.4, 0.1), (0.0, 0.0)])
    def test_rates_hold_for_each_kind_of_error_by_itself(self, accepts: float, rejects: float) -> None:
        config = StepJudgeConfig(error_rate=0.5, false_accepts=accepts, false_rejects=rejects)
        judge = asyncio.run(make_judge(config, seed=1))
        found = {True: 0, False: 0}
        for holds in found:
            step = Step("c", "5 makes 16", holds)
            for i in range(1000):
                verdict = asyncio.run(judge(step_view(step, (i, 0))))
                found[holds] += (verdict.winner is Winner.A) is not holds
        assert found[True] / 1000 == pytest.approx(rejects, abs=0.04)
        assert found[False] / 1000 == pytest.approx(accepts, abs=0.04)
        assert (found[True] == 0) == (rejects == 0) and (found[False] == 0) == (accepts == 0)

    def test_errors_are_the_same_again_and_others_with_another_seed(self) -> None:
        steps = [step_view(Step("c", "5 makes 16", True), (i, 0)) for i in range(60)]

        def verdicts(seed: int) -> list[Winner]:
            judge = asyncio.run(make_judge(StepJudgeConfig(error_rate=0.5), seed=seed))
            return [asyncio.run(judge(view)).winner for view in steps]

        assert verdicts(1) == verdicts(1) != verdicts(2)

    def test_other_verdicts_stay(self) -> None:
        for winner in (Winner.TIE, Winner.INVALID):
            judge = ErringJudge(FunctionJudge(lambda view, winner=winner: winner), 0.99, 0.99, 0)
            assert asyncio.run(judge(step_view(Step("c", "5 makes 16", True), (0, 0)))).winner is winner

    def test_rates_are_shares(self) -> None:
        with pytest.raises(ConfigurationError, match=r"step_judge.false_accepts=1.5: a share from 0 to below 1"):
            StepJudgeConfig(false_accepts=1.5)


class TestBias:
    """A judge that favours something, as often as it is told to."""

    RIGHT_STEP, WRONG_STEP = Step("c", "5 makes 16", True), Step("c", "136 makes 63", False)

    def share_accepted(self, bias: str, step: Step, place: float, spoken: Literal["right", "wrong"] | None) -> float:
        judge = asyncio.run(make_judge(StepJudgeConfig(bias=bias, bias_rate=0.3), seed=1))
        verdicts = [asyncio.run(judge(step_view(step, (i, 0), place, spoken))).winner for i in range(1000)]
        assert verdicts == [asyncio.run(judge(step_view(step, (i, 0), place, spoken))).winner for i in range(1000)]
        return sum(winner is Winner.A for winner in verdicts) / 1000

    @pytest.mark.parametrize(
        ("bias", "step", "place", "spoken", "accepted"),
        [
            ("position", WRONG_STEP, 0.25, "wrong", 0.3),
            ("position", WRONG_STEP, 0.5, "right", 0.0),
            ("position", RIGHT_STEP, 0.25, None, 1.0),
            ("length", WRONG_STEP, 0.9, None, 0.3),
            ("length", Step("c", "36 makes 63", False), 0.0, None, 0.0),
            ("sycophancy", WRONG_STEP, 0.0, "right", 0.3),
            ("sycophancy", RIGHT_STEP, 0.0, "wrong", 0.7),
            ("sycophancy", WRONG_STEP, 0.0, None, 0.0),
        ],
    )
    def test_it_applies_where_it_should_and_has_its_size(
        self, bias: str, step: Step, place: float, spoken: Literal["right", "wrong"] | None, accepted: float
    ) -> None:
        found = self.share_accepted(bias, step, place, spoken)
        assert found == accepted if accepted in (0.0, 1.0) else found == pytest.approx(accepted, abs=0.04)

    def test_judges_of_each_signal_are_told_place_and_speech(self) -> None:
        for name, turns, found in (
            ("debate", [[RIGHT, "c is wrong."], [WRONG, "b is wrong."]], {(1 / 12, "wrong"), (2 / 12, "wrong")}),
            ("consultancy", [[RIGHT, "d is right."]], {(3 / 12, "right")}),
        ):
            VIEWS.clear()
            play(name, turns, Noting())
            assert {(view.seats[0].place, view.seats[0].spoken) for view in VIEWS} == found
        VIEWS.clear()
        play("direct_all", [[RIGHT]], Noting())
        assert sorted((view.seats[0].place, view.seats[0].spoken) for view in VIEWS) == [
            (i / 12, None) for i in range(12)
        ]

    def test_an_unknown_bias(self) -> None:
        with pytest.raises(
            ConfigurationError, match=r"step_judge.bias=age is unknown; use position, length, sycophancy"
        ):
            StepJudgeConfig(bias="age")


VIEWS: list[DebateView] = []
"""What `Noting` was shown. Protocols are pickled, so a judge cannot keep it."""


class Noting(Judge):
    """Makes no mistake."""

    async def __call__(self, view: DebateView) -> Verdict:
        VIEWS.append(view)
        return await KeyJudge()(view)


def right_at_b(view: DebateView) -> str:
    return "A" if view.rounds_a == [claim_of("b")] else "B"


def torn(view: DebateView) -> str:
    return "TIE"


class TestOtherJudges:
    """Whoever judges debates can check a step."""

    members = ([RIGHT, "c is wrong."], [WRONG, "b is wrong."])

    def test_of_one_s_own_by_votes(self) -> None:
        judge = VotesJudge(FunctionJudge(right_at_b), 3)
        group, _ = play("debate", self.members, judge)
        assert rewards(group) == [[1.0, 1.0], [0.0, 0.0]]

    def test_a_tie_is_no_verdict(self) -> None:
        group, _ = play("consultancy", [[RIGHT, "a is right."], [WRONG, "Trust me."]], FunctionJudge(torn))
        assert group.is_trained() == [False, True] and group.metrics_G[0]["debate/invalid"] == 1.0


class TestBaselines:
    def test_a_consultant_points_at_what_holds_and_wins(self) -> None:
        group, _ = play("consultancy", [[WRONG, "a is right."], [WRONG, "c is right."], [RIGHT, "c is right."]])
        assert rewards(group) == [[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]

    def test_a_consultant_who_names_nothing_loses(self) -> None:
        assert rewards(play("consultancy", [[RIGHT, "Trust me."]])[0]) == [[0.0, 0.0]]

    @pytest.mark.slow
    def test_direct_judging_looks_at_each_step_about_equally_often(self) -> None:
        checks = 720
        accepted = sum(rewards(play("direct", [[WRONG]] * 12, key=(0, i))[0]).count([1.0]) for i in range(checks // 12))
        assert accepted / checks == pytest.approx(11 / 12, abs=0.03)
        assert rewards(play("direct", [[RIGHT]] * 3)[0]) == [[1.0]] * 3

    def test_most_common_answer_is_accepted_even_if_it_is_wrong(self) -> None:
        group, _ = play("self_consistency", [[RIGHT], [WRONG], [WRONG], ["no idea"]])
        assert rewards(group) == [[0.0], [1.0], [1.0], [0.0]]
        assert group.metrics_G[0]["debate/pair_accuracy"] == pytest.approx(0.5 + (0 - 2 / 3) / 2)

    def test_where_no_answer_can_be_read_none_is_accepted(self) -> None:
        assert rewards(play("self_consistency", [["no idea"], ["none"]])[0]) == [[0.0], [0.0]]

    def test_truth(self) -> None:
        assert rewards(play("truth", [[RIGHT], [WRONG]])[0]) == [[1.0], [0.0]]

    def test_a_task_without_steps_has_no_step_to_check(self) -> None:
        with pytest.raises(ConfigurationError, match="task=qa"):
            OversightProtocol.make("direct", get_task("qa"), RENDERER, KeyJudge())
        OversightProtocol.make("self_consistency", get_task("qa"), RENDERER, KeyJudge())

    def test_turns_that_do_not_fit_the_context_are_an_error(self) -> None:
        with pytest.raises(ConfigurationError, match="max_tokens=400"):
            OversightProtocol.make("debate", get_task("collatz"), RENDERER, KeyJudge(), 0, 400, 1024)


REPLIES = {
    "<VERDICT>WRONG</VERDICT>": [0.0, 1.0],
    "Right? <VERDICT>RIGHT</VERDICT>": [1.0, 0.0],
    "Hm.": [0.0, 1.0],
}
"""What a judge says of the step that the first member objects to, and the rewards of the answer and of that objection."""


class TestWordsOfTheJudge:
    """What a language model says of a step is kept, as ids and as text."""

    members = ([RIGHT, "c is wrong."], [WRONG, "Nothing is wrong."])

    @pytest.mark.parametrize(("reply", "expected"), REPLIES.items())
    def test_as_tokens(self, reply: str, expected: list[float]) -> None:
        answered = said(reply_ids(RENDERER, reply))
        group, _ = play("debate", self.members, LMJudge(ScriptedCompleter({0: [answered]}), RENDERER, max_retries=0))
        assert [rewards(group)[1][0], rewards(group)[0][1]] == expected
        unjudged, judged = (record.content for record in group.records)
        claim = judged["checked_step"]["claim"]
        asked: list[Message] = [{"role": "system", "content": CHECK_SYSTEM}, {"role": "user", "content": claim}]
        prompt = RENDERER.build_generation_prompt(asked).to_ints()
        assert judged["judge"] == {
            "raw_response": reply,
            "prompt_tokens": prompt,
            "completion_tokens": answered.tokens,
            "completion_logprobs": answered.maybe_logprobs,
            "prompt_token_count": len(prompt),
            "completion_token_count": len(answered.tokens),
        }
        assert unjudged["judge"] is None and unjudged["checked_step"] is None  # nobody named a step of it
        assert group.member_info_G[1]["judge"] == f"c: {claim}\n{reply}"
        assert group.metrics_G[1]["debate/invalid"] == float("VERDICT" not in reply)

    def test_as_messages_and_what_they_took(self) -> None:
        group, _ = play("consultancy", [[WRONG, "c is right."]], LMJudge(Endpoint()))
        (record,) = group.records
        assert record.content["judge"] == {"raw_response": "Surely <VERDICT>WRONG</VERDICT>"}
        assert rewards(group) == [[0.0, 0.0]] and group.metrics_G[0]["debate/judge_calls"] == 1.0

    def test_a_script_has_no_words(self) -> None:
        group, _ = play("debate", self.members)
        assert [record.content["judge"] for record in group.records] == [None, None]
        assert group.member_info_G[1]["judge"] == f"c: {group.records[1].content['checked_step']['claim']}"


class Endpoint(MessageCompleter):
    """Finds everything wrong."""

    async def __call__(self, messages: list[Message]) -> Message:
        return {"role": "assistant", "content": "Surely <VERDICT>WRONG</VERDICT>"}

    def usage(self) -> dict[str, float]:
        return {"calls": 1.0}


class TestSteps:
    task = get_task("collatz")

    def test_every_step_is_checked_against_the_one_before(self) -> None:
        steps = self.task.steps(ITEM, WRONG)  # type: ignore[attr-defined]
        assert [step.name for step in steps if not step.holds] == ["c"]
        assert steps[0].claim == "43 makes 130"

    @pytest.mark.parametrize(
        "text",
        ["", "a130 b65", RIGHT.replace("c196", "c196 c196"), RIGHT.replace("<SOLUTION>", "<SOLUTION>1"), f"h1 {RIGHT}"],
    )
    def test_another_form_has_no_steps(self, text: str) -> None:
        assert self.task.steps(ITEM, text) is None  # type: ignore[attr-defined]
