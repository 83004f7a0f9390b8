"""How several speeches, or estimates of every step, come to the one step that the judge checks, and what they earn."""

import asyncio
from collections.abc import Sequence

import pytest

from tests.debate.arena import TRAIL_ITEM, decode, make_renderer, speech, trail
from tests.debate.test_oversight import play, rewards
from tests.fakes import ScriptedCompleter
from tinker_cookbook.debate.dispute import MOST_TURNS, WORST_SCORE, estimator_score, most_doubted, narrow
from tinker_cookbook.debate.env import DebateGroupBuilder
from tinker_cookbook.debate.judges import KeyJudge
from tinker_cookbook.debate.oversight import OversightProtocol
from tinker_cookbook.debate.transcript import Turn
from tinker_cookbook.env.shipped.questions.code_inputs import CodeInputsTask
from tinker_cookbook.env.shipped.questions.collatz import LABELS, CollatzTask
from tinker_cookbook.env.shipped.questions.sorting import SortingTask, trace
from tinker_cookbook.env.steps import Step
from tinker_cookbook.env.task import TaskItem
from tinker_cookbook.env.tasks import get_task
from tinker_cookbook.rl.rollouts import do_group_rollout

RENDERER, ROLES = make_renderer("qwen3_instruct"), make_renderer("role_colon")
RIGHT, WRONG = trail(), trail("c")
COLLATZ, SORTING = CollatzTask(), SortingTask()


def numbered(count: int, wrong: int = -1) -> list[Step]:
    """Steps of sorting, one of which fails."""
    return [Step(str(i), f"claim {i}", i != wrong) for i in range(1, count + 1)]


def said(*texts: str) -> list[Turn]:
    return [Turn([], text, text, kind="speech", round=i) for i, text in enumerate(texts, start=1)]


class TestNarrowing:
    @pytest.mark.parametrize(
        ("steps", "turns"), [(1, 1), (2, 1), (3, 2), (6, 3), (12, 4), (13, 4), (24, 5), (48, 6), (64, 6)]
    )
    def test_an_honest_examiner_needs_the_logarithm_of_the_steps(self, steps: int, turns: int) -> None:
        longest = 0
        for wrong in range(1, steps + 1):
            answer, speeches = numbered(steps, wrong), said(*[f"step {wrong} is wrong"] * turns)
            found = narrow(SORTING, TRAIL_ITEM, answer, speeches)
            assert found.is_over and found.named is answer[wrong - 1] and found.left == (answer[wrong - 1],)
            early = narrow(SORTING, TRAIL_ITEM, answer, speeches[:-1])
            longest = max(longest, turns - early.is_over)
        assert longest == turns <= MOST_TURNS

    @pytest.mark.parametrize(
        ("speeches", "left", "named", "is_over"),
        [
            ((), "1 2 3 4 5", None, False),
            (("step 3 is wrong",), "1 2 3", "3", False),
            (("step 4 is wrong",), "4 5", "4", False),
            (("step 2 is wrong", "step 3 is wrong"), "3", "3", True),
            (("step 3 is wrong", "step 1 is wrong"), "1 2", "1", False),
            (("step 3 is wrong", "step 4 is wrong"), "1 2 3", "3", True),
            (("step 3 is wrong", "hm"), "1 2 3", "3", True),
            (("hm",), "1 2 3 4 5", None, True),
            (("step 6 is wrong",), "1 2 3 4 5", None, True),
        ],
        ids=[
            "nothing",
            "first half",
            "second half",
            "to the end",
            "reconsidered",
            "gone back",
            "silent",
            "mute",
            "no such",
        ],
    )
    def test_what_is_left(self, speeches: tuple[str, ...], left: str, named: str | None, is_over: bool) -> None:
        found = narrow(SORTING, TRAIL_ITEM, numbered(5), said(*speeches))
        assert " ".join(step.name for step in found.left) == left
        assert (None if found.named is None else found.named.name, found.is_over) == (named, is_over)

    def test_a_turn_with_a_control_token_ends_it(self) -> None:
        turn = Turn([], "step 2 is wrong", "step 2 is wrong", malformed=True, kind="speech", round=1)
        assert narrow(SORTING, TRAIL_ITEM, numbered(4), [turn]).named is None

    def test_a_step_of_one_s_own_is_none_of_what_is_left(self) -> None:
        """A task whose speakers may write down any input: one that is not among the steps of the answer is no half of it."""
        item, steps = TaskItem("i", "", '{"id": "p", "function": "f", "tests": []}'), [Step("[1]", "", True)]
        task = CodeInputsTask()
        task.step_of_speech = lambda item, steps, speech: Step("[7]", "", True)  # type: ignore[method-assign]
        assert narrow(task, item, steps, said("input [7] is wrong")).named is None


class TestBisection:
    def test_the_step_that_is_left_decides(self) -> None:
        """Member 0 gets from the half a to f over a to c to the mistake at c; member 1 finds a step that holds."""
        members = [[RIGHT, "f is wrong.", "c is wrong.", "c is wrong."], [WRONG, *["l is wrong."] * 3]]
        group, policy = play("bisection", members)
        assert rewards(group) == [[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]]
        names = [record.content["checked_step"]["name"] for record in group.records]
        assert names == ["l", "c"] and [one["debate/judge_checks"] for one in group.metrics_G] == [1.0, 1.0]
        asked = [decode(RENDERER, prompt).rpartition("<|im_start|>user\n")[2] for prompt in policy.heard[0]]
        assert [text.partition("<|im_end|>")[0] for text in asked[2:]] == [
            "The steps a to f are left. Which step is wrong there?",
            "The steps a to c are left. Which step is wrong there?",
        ]
        assert "l is wrong" not in decode(RENDERER, policy.heard[0][-1]), (
            "what is said against one's answer goes unheard"
        )

    def test_at_one_check_an_honest_examiner_finds_what_chance_does_not(self) -> None:
        found, by_chance = 0, 0
        for i, label in enumerate(LABELS):
            examined, _ = play("bisection", [[RIGHT, *[f"{label} is wrong."] * 4], [trail(label), "hm"]], key=(i, 0))
            drawn, _ = play("direct", [[trail(label)]], key=(i, 0))
            checks = examined.metrics_G[1]["debate/judge_checks"], drawn.metrics_G[0]["debate/judge_checks"]
            assert checks == (1.0, 1.0)
            found += rewards(examined)[1][0] == 0.0
            by_chance += rewards(drawn)[0][0] == 0.0
        assert found == 12 and by_chance <= 4

    def test_who_reconsiders_too_late_lets_the_answer_pass(self) -> None:
        group, _ = play("bisection", [[RIGHT, "h is wrong.", "c is wrong."], [WRONG, "hm"]])
        assert rewards(group) == [[1.0, 0.0, 0.0], [1.0, 0.0]]
        assert [one["debate/names_step"] for one in group.metrics_G] == [0.0, 1.0]

    def test_there_is_nothing_to_narrow_in_an_answer_without_the_form(self) -> None:
        group, _ = play("bisection", [[RIGHT, "c is wrong."], ["<SOLUTION>161</SOLUTION>", "b is wrong.", "hm"]])
        assert rewards(group) == [[1.0, 1.0], [0.0, 0.0, 0.0]]

    def test_where_earlier_turns_are_rendered_anew(self) -> None:
        """With a renderer whose prompts are rendered from the messages."""
        protocol = OversightProtocol.make("bisection", SORTING, ROLES, KeyJudge())
        item = TaskItem("i", "7 3 9 1", "1 3 7 9")
        wrong = trace([7, 3, 9, 1]).replace("2: 3 7", "2: 7 3")
        members = [[trace([7, 3, 9, 1]), "step 1 is wrong", "step 2 is wrong"], [wrong, "step 9 is wrong"]]
        turns = {i: [speech(ROLES, text) for text in member] for i, member in enumerate(members)}
        policy = ScriptedCompleter(turns)
        group = asyncio.run(do_group_rollout(DebateGroupBuilder(protocol, item, 1, (0, 0)), policy))
        assert rewards(group) == [[1.0, 1.0, 1.0], [0.0, 0.0]]
        assert "The steps 1 to 2 are left." in decode(ROLES, policy.heard[0][-1])


class TestEstimates:
    steps = COLLATZ.steps(TRAIL_ITEM, WRONG) or []

    @pytest.mark.parametrize(
        ("speech", "expected"),
        [
            ("c 5%", {"c": 0.05}),
            ("c: 5 %, d = 40% and l (100%)", {"c": 0.05, "d": 0.4}),
            ("c is wrong: 130 makes 65.", {"c": 0.0}),
            ("abc 5%", None),
            ("c 500%", None),
            ("c 5", None),
            ("I doubt it.", None),
        ],
    )
    def test_what_a_speech_gives(self, speech: str, expected: dict[str, float] | None) -> None:
        wanted = None if expected is None else [expected.get(step.name, 1.0) for step in self.steps]
        assert COLLATZ.estimates(TRAIL_ITEM, self.steps, speech) == wanted

    def test_the_most_doubted_is_checked_and_of_equals_any(self) -> None:
        def chosen(text: str, seeds: Sequence[int] = (0,)) -> set[str]:
            found = [most_doubted(COLLATZ, TRAIL_ITEM, self.steps, said(text)[0], seed) for seed in seeds]
            return {one.step.name for one in found if one is not None}

        assert chosen("a 60% c 20% d 40%") == {"c"}
        assert chosen("c 20% d 20%", range(40)) == {"c", "d"}
        assert len(chosen("c 100%", range(200))) == 12
        assert most_doubted(COLLATZ, TRAIL_ITEM, self.steps, said("so")[0], 0) is None

    @pytest.mark.parametrize(
        ("estimate", "holds", "score"),
        [
            (0.0, False, (12 / 13) ** 2),
            (0.0, True, (1 / 13) ** 2 - 1),
            (1.0, True, (1 / 13) ** 2),
            (1.0, False, (12 / 13) ** 2 - 1),
            (12 / 13, True, 0.0),
            (12 / 13, False, 0.0),
            (0.25, False, (12 / 13) ** 2 - 0.0625),
        ],
    )
    def test_the_score(self, estimate: float, holds: bool, score: float) -> None:
        assert estimator_score(estimate, holds, 12) == pytest.approx(score, abs=1e-15)

    @pytest.mark.parametrize("belief", [0.0, 0.1, 0.5, 0.9, 1.0])
    def test_saying_what_one_believes_is_best_and_doubting_what_is_surely_wrong_pays_most(self, belief: float) -> None:
        def expected(estimate: float, truth: float) -> float:
            return truth * estimator_score(estimate, True, 12) + (1 - truth) * estimator_score(estimate, False, 12)

        grid = [i / 100 for i in range(101)]
        assert max(grid, key=lambda estimate: expected(estimate, belief)) == belief
        assert expected(belief, belief) == pytest.approx((12 / 13 - belief) ** 2)
        assert expected(0.02, 0.02) > 100 * expected(0.98, 0.98)


class TestEstimator:
    def test_the_score_of_the_step_that_it_doubts_most(self) -> None:
        group, _ = play("prover_estimator", [[RIGHT, "b 70% c 25%"], [WRONG, "b 40%"]])
        known = 12 / 13
        expected = [[1.0, known**2 - 0.0625], [0.0, (1 - known) ** 2 - 0.36]]
        assert rewards(group) == [pytest.approx(one) for one in expected]
        scores = [metrics["debate/estimator_score"] for metrics in group.metrics_G]
        assert scores == [pytest.approx(one[1]) for one in expected]
        assert not any("honest_wins" in name for metrics in group.metrics_G for name in metrics)

    def test_without_estimates_the_answer_passes_and_the_score_is_the_worst(self) -> None:
        group, _ = play("prover_estimator", [[RIGHT, "So be it."], [WRONG, "c is wrong."]])
        assert rewards(group) == [[1.0, WORST_SCORE], [1.0, pytest.approx((1 / 13) ** 2 - 1)]]
        assert all(estimator_score(p, holds, 12) > WORST_SCORE for p in (0.0, 0.5, 1.0) for holds in (True, False))

    def test_an_answer_without_the_form_has_nothing_to_estimate(self) -> None:
        group, _ = play("prover_estimator", [[RIGHT, "c 20%"], ["<SOLUTION>161</SOLUTION>", "a 100%"]])
        assert [turns[1] for turns in rewards(group)] == [0.0, pytest.approx((1 / 13) ** 2)]

    def test_it_is_asked_about_every_step(self) -> None:
        _, policy = play("prover_estimator", [[RIGHT, "c 20%"], [WRONG, "a 50%"]])
        asked = decode(RENDERER, policy.heard[0][1])
        assert WRONG in asked and "Which steps are wrong there?" in asked
        assert "such as: NAME 20%" in SORTING.estimate_request and SORTING.estimate_request.count("{opponent}") == 1


class TestAssignedConsultancy:
    FOR = ([WRONG, "a is right."], [RIGHT, "c is right."])
    AGAINST = ([RIGHT, "c is wrong."], [WRONG, "b is wrong."])

    def test_every_other_pair_argues_for_its_own_answers_and_the_rest_against_each_other_s(self) -> None:
        group, policy = play("consultancy_assigned", [*self.FOR, *self.AGAINST])
        assert rewards(group) == [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]
        asked = [decode(RENDERER, policy.heard[i][1]) for i in range(4)]
        assert [("may the judge check?" in text, "wrong there?" in text) for text in asked] == [
            (True, False), (True, False), (False, True), (False, True),
        ]  # fmt: skip
        assert RIGHT not in asked[0] and RIGHT in asked[3], "whose own answer is argued for hears no other"

    def test_one_pair_of_a_question_takes_the_other_side_at_the_next(self) -> None:
        kept, turned = (
            play("consultancy_assigned", pair, key=(0, i))[0] for i, pair in enumerate((self.FOR, self.AGAINST))
        )
        assert rewards(kept) == [[1.0, 1.0], [1.0, 1.0]]
        assert rewards(turned) == [[1.0, 1.0], [0.0, 0.0]]


class TestHonesty:
    @pytest.mark.parametrize(
        ("name", "members", "honest", "dishonest"),
        [
            ("debate", [[RIGHT, "c is wrong."], [WRONG, "b is wrong."]], [1.0], [0.0]),
            ("debate", [[RIGHT, "b is wrong."], [WRONG, "hm"]], [0.0], [0.0]),
            ("debate", [[WRONG, "b is wrong."], [WRONG, "c is wrong."]], [0.0, 1.0], []),
            ("bisection", [[RIGHT, "c is wrong.", "c is wrong.", "c is wrong."], [WRONG, "b is wrong.", "hm"]], [1.0], [0.0]),
            ("consultancy", [[WRONG, "a is right."], [WRONG, "c is right."], [RIGHT, "c is right."]], [1.0], [1.0, 0.0]),
            ("consultancy_assigned", [[WRONG, "a is right."], [RIGHT, "c is right."]], [1.0], [1.0]),
        ],
    )  # fmt: skip
    def test_who_argues_for_the_truth_is_counted_apart(
        self, name: str, members: list[list[str]], honest: list[float], dishonest: list[float]
    ) -> None:
        group, _ = play(name, members)
        found = [{key: one[f"debate/{key}_wins"] for key in ("honest", "dishonest") if f"debate/{key}_wins" in one}
                 for one in group.metrics_G]  # fmt: skip
        assert [one["honest"] for one in found if "honest" in one] == honest
        assert [one["dishonest"] for one in found if "dishonest" in one] == dishonest
        assert all(len(one) == 1 for one in found)

    def test_without_speeches_nobody_argues(self) -> None:
        group, _ = play("direct", [[RIGHT], [WRONG]])
        assert not any("honest" in name for metrics in group.metrics_G for name in metrics)


@pytest.mark.parametrize("name", ["bisection", "prover_estimator", "consultancy_assigned"])
def test_a_task_without_steps_is_refused(name: str) -> None:
    with pytest.raises(Exception, match=f"protocol={name} checks single steps"):
        OversightProtocol.make(name, get_task("qa"), RENDERER, KeyJudge())
