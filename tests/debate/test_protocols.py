"""Protocols: who speaks when and hears what, what their judge is shown, and which of them make no sense."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from tests.debate.arena import ITEM, RIGHT, WRONG, JudgeByIndex, WatchingJudge, decode, make_renderer, speech
from tests.debate.golden_transcripts import CONFIGS, FOLDER, OVERSEEN, golden_text
from tests.fakes import ScriptedCompleter
from tests.renderers import synthetic
from tests.waiting import HANG_SECONDS
from tinker_cookbook.debate.env import DebateGroupBuilder, DebateProtocol, make_dialogue, wrong_answers
from tinker_cookbook.debate.judges import Judge, Verdict, Winner
from tinker_cookbook.debate.prompts import DebatePrompts
from tinker_cookbook.debate.protocols import PROTOCOLS, ProtocolConfig, Slot, heard_before
from tinker_cookbook.debate.transcript import assign_answers
from tinker_cookbook.debate.views import DebateView, Seat
from tinker_cookbook.env.qa import QATask
from tinker_cookbook.env.task import Task, TaskItem
from tinker_cookbook.env.tasks import get_task
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Renderer, get_renderer
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import TrajectoryGroup

RENDERER = make_renderer("qwen3_instruct")
A, B, C = Seat.A, Seat.B, Seat.C


def play(
    config: ProtocolConfig,
    members: Sequence[Sequence[str]],
    judge: Judge,
    renderer: Renderer = RENDERER,
    task: Task | None = None,
    num_debates: int = 1,
    item: TaskItem = ITEM,
    prompts: DebatePrompts | None = None,
) -> tuple[TrajectoryGroup, ScriptedCompleter]:
    dialogue = make_dialogue(task or get_task("qa"), renderer, config, prompts)
    builder = DebateGroupBuilder(DebateProtocol(dialogue, judge, wrong_answers=["13"]), item, num_debates, (4, 2))
    policy = ScriptedCompleter({i: [speech(renderer, text) for text in said] for i, said in enumerate(members)})

    async def bounded() -> TrajectoryGroup:
        async with asyncio.timeout(HANG_SECONDS):
            return await do_group_rollout(builder, policy)

    return asyncio.run(bounded()), policy


@pytest.mark.parametrize("name", [*CONFIGS, *OVERSEEN])
def test_golden_transcripts(name: str) -> None:
    """Written by `python -m tests.debate.golden_transcripts`."""
    assert asyncio.run(golden_text(name, RENDERER)) == (FOLDER / f"{name}.txt").read_text()


def test_there_is_a_golden_transcript_of_each_and_no_other() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == CONFIGS.keys() | OVERSEEN.keys()
    assert {config.name for config in CONFIGS.values()} == set(PROTOCOLS)


class TestOrder:
    def test_simultaneous_speakers_hear_the_round_before(self) -> None:
        slots = ProtocolConfig(rounds=2).slots((A, B))
        assert slots == (Slot((A, B), 0), Slot((A, B), 1), Slot((A, B), 2))
        heard = [[(turn.seat, turn.slot) for turn in heard_before(slots, A, i)] for i in (1, 2)]
        assert heard == [[(B, 0)], [(B, 1)]]

    def test_sequential_speakers_hear_all_since_they_spoke(self) -> None:
        slots = ProtocolConfig(rounds=2, order="sequential", seats=3).slots((A, B, C))
        assert [slot.speakers for slot in slots] == [(A, B, C), (A,), (B,), (C,), (A,), (B,), (C,)]
        heard = {i: [(turn.seat, turn.slot) for turn in heard_before(slots, B, i)] for i in (2, 5)}
        assert heard == {2: [(A, 0), (C, 0), (A, 1)], 5: [(C, 3), (A, 4)]}

    def test_in_a_sequential_debate_the_second_answers_the_first_in_the_same_round(self) -> None:
        members = [[RIGHT, "first", "third"], [WRONG, "second", "fourth"]]
        _, policy = play(ProtocolConfig(order="sequential"), members, JudgeByIndex((Winner.A,)))
        prompts = [[decode(RENDERER, prompt) for prompt in policy.heard[member]] for member in (0, 1)]
        assert "second" not in prompts[0][1] and "second" in prompts[0][2] and "fourth" not in prompts[0][2]
        assert "first" in prompts[1][1] and RIGHT in prompts[1][1] and "third" in prompts[1][2]

    def test_a_seat_s_debate_is_one_datum_whoever_it_hears(self) -> None:
        config = ProtocolConfig(seats=3, order="sequential")
        members = [[answer, "speech", "end"] for answer in (RIGHT, WRONG, WRONG)]
        group, _ = play(config, members, JudgeByIndex((Winner.A,)))
        for trajectory in group.trajectories_G:
            (datum,) = trajectory_to_data(trajectory, 1.0)
            assert sum(datum.loss_fn_inputs["mask"].tolist()) == trajectory.num_action_tokens


class TestWithoutExtension:
    """A renderer that rewrites what was said: prompts are rendered anew and each turn is a datum of its own."""

    renderer = get_renderer("qwen3", synthetic.make_tokenizer())

    def test_thinking_is_dropped_and_stays_one_s_own(self) -> None:
        members = [[f"<think>\nhm {i}\n</think>\n\n{text}" for text in (RIGHT, "I say", "I end")] for i in (0, 1)]
        group, policy = play(ProtocolConfig(), members, JudgeByIndex((Winner.A,)), self.renderer)
        for member, other in ((0, 1), (1, 0)):
            prompts = [decode(self.renderer, prompt) for prompt in policy.heard[member]]
            assert all(f"hm {member}" not in prompt and f"hm {other}" not in prompt for prompt in prompts)
            assert prompts[1].count(RIGHT) == 2 and prompts[2].count("I say") == 2
            data = trajectory_to_data(group.trajectories_G[member], 1.0)
            assert len(data) == 3
            trained = [sum(datum.loss_fn_inputs["mask"].tolist()) for datum in data]
            assert trained == [len(turn.ac.tokens) for turn in group.trajectories_G[member].transitions]


class TestAssigned:
    def test_each_order_comes_about_equally_often(self) -> None:
        orders = [assign_answers(2, "12", ["13"], (0, 0, i), 0) for i in range(400)]
        assert all(sorted(order) == ["12", "13"] for order in orders)
        assert 0.44 < sum(order[0] == "12" for order in orders) / 400 < 0.56

    def test_a_consultant_argues_for_either_answer_and_the_judge_is_shown_both(self) -> None:
        judge = WatchingJudge([])
        config = ProtocolConfig(name="consultancy", answers="assigned", rounds=1)
        group, policy = play(config, [["mine"], ["mine"]], judge, num_debates=2)
        views = sorted(judge.views, key=lambda view: view.key)
        assert [[seat.role for seat in view.seats] for view in views] == [
            ["consultant", "answer"],
            ["answer", "consultant"],
        ]
        for view, prompts in zip(views, policy.heard.values(), strict=True):
            spoken = next(seat.rounds[0] for seat in view.seats if seat.role == "consultant")
            own = spoken.removeprefix("<SOLUTION>").removesuffix("</SOLUTION>")
            assert f"The answer that you argue for is: {own}" in decode(RENDERER, prompts[0])
            assert sorted(seat.correct for seat in view.seats if seat.correct is not None) == [False, True]
        assert group.is_trained() == [True, False]  # A wins both, and the second consultant speaks for B

    def test_wrong_answers_are_the_row_s_own_before_those_of_others(self) -> None:
        item = TaskItem("x", "?", "12", wrong_answers=("12", "7"))
        assert wrong_answers(item, "12", ["13", "12", "7"], 2) == ["7", "13"]
        with pytest.raises(ConfigurationError, match="2 wrong answers are needed for item x, and there are 1"):
            wrong_answers(item, "12", ["12"], 2)


class TestOneAnswer:
    @pytest.mark.parametrize(("winner", "trained"), [("A", [True]), ("B", [False]), ("TIE", [False])])
    def test_verdict_b_is_that_the_answer_does_not_hold(self, winner: str, trained: list[bool]) -> None:
        group, _ = play(ProtocolConfig(name="direct"), [[RIGHT]], JudgeByIndex((Winner(winner),)))
        assert group.is_trained() == trained
        accuracy = {"A": 1.0, "B": 0.0, "TIE": None}[winner]
        assert group.metrics_G[0].get("debate/judge_accuracy") == accuracy

    def test_only_a_judge_with_the_key_is_shown_it(self) -> None:
        for name, reference in (("direct", None), ("key", "12")):
            judge = WatchingJudge([])
            play(ProtocolConfig(name=name), [[WRONG]], judge)  # type: ignore[arg-type]
            assert judge.views[0].reference == reference

    def test_a_critic_is_right_when_the_answer_is_wrong(self) -> None:
        judge = WatchingJudge([])
        config = ProtocolConfig(name="proposer_critic", order="sequential", rounds=1)
        group, policy = play(config, [[f"{WRONG} <CONFIDENCE>0.8</CONFIDENCE>", "I stay"], ["It is 12"]], judge)
        (view,) = judge.views
        assert [(seat.role, seat.correct) for seat in view.seats] == [("proposer", False), ("critic", True)]
        assert view.both()[1].confidence == pytest.approx(0.2) and view.rounds_b == ["It is 12"]
        assert WRONG in decode(RENDERER, policy.heard[1][0]) and "It is 12" in decode(RENDERER, policy.heard[0][1])
        assert group.metrics_G[0]["debate/judge_accuracy"] == 0.0  # the judge found for A


@pytest.mark.parametrize(("answer", "reward"), [(WRONG, 1.0), (RIGHT, 0.0)])
def test_a_critic_that_wins_has_the_reward_of_being_right(answer: str, reward: float) -> None:
    """Under rs_grpo, which the judge's verdict alone does not reward."""
    config = ProtocolConfig(name="proposer_critic", order="sequential", rounds=1)
    group, _ = play(config, [[answer, "I stay"], ["It is wrong"]], JudgeByIndex((Winner.B,)))
    assert group.is_trained() == [False, True]
    assert [transition.reward for transition in group.trajectories_G[1].transitions] == [reward]


class TestMeasured:
    def test_other_views_and_judges_are_asked_and_train_nothing(self) -> None:
        dialogue = make_dialogue(get_task("qa"), RENDERER)
        seen: dict[str, list[DebateView]] = {"own": [], "held_out": []}

        class Keeps(Judge):
            def __init__(self, name: str, winner: Winner):
                self.name, self.winner = name, winner

            async def __call__(self, view: DebateView) -> Verdict:
                seen[self.name].append(view)
                return Verdict(self.winner)

        own, other = Keeps("own", Winner.A), Keeps("held_out", Winner.B)
        measured = {"no_debate": own, "with_key": own, "held_out": other}
        builder = DebateGroupBuilder(DebateProtocol(dialogue, own, measured_by=measured), ITEM, 1, (0, 0))
        turns = [[speech(RENDERER, text) for text in (answer, "x", "y")] for answer in (RIGHT, WRONG)]
        group = asyncio.run(do_group_rollout(builder, ScriptedCompleter(dict(enumerate(turns)))))
        full, answers, with_key = seen["own"]
        assert [len(view.rounds_a) for view in (full, answers, with_key)] == [3, 1, 1]
        assert [view.reference for view in (full, answers, with_key)] == [None, None, "12"]
        assert seen["held_out"][0].rounds_a == full.rounds_a
        assert group.is_trained() == [True, False]
        assert group.records[0].content["measured"]["held_out"] == {"verdict": "B"}


class TestWording:
    def test_a_task_s_wording_counts_more_than_the_library_s_and_the_user_s_most(self) -> None:
        class Own(QATask):
            debate_prompts = {"rebuttal": "Task: {opponent}", "closing": "Task ends: {opponent}"}  # noqa: RUF012

        members = [[RIGHT, "x", "y"], [WRONG, "x", "y"]]
        prompts = DebatePrompts(closing="User: {opponent}")
        _, policy = play(ProtocolConfig(), members, JudgeByIndex((Winner.A,)), task=Own(), prompts=prompts)
        last = decode(RENDERER, policy.heard[0][2])
        assert f"Task: {WRONG}" in last and "User: x" in last and "Task ends" not in last

    @pytest.mark.parametrize(
        ("texts", "wrong"),
        [
            ({"rebutal": "{opponent}"}, "Task.debate_prompts.rebutal is unknown; use confidence, rebuttal"),
            ({"closing": "nothing"}, "closing must contain {opponent} exactly once, found 0 times"),
            ({"support": "{opponent}"}, "support must contain {opponent} nowhere, found 1 times"),
            ({"assigned": "{answer}"}, "assigned must contain {others} exactly once"),
        ],
    )
    def test_a_wording_that_cannot_be_filled_in_is_refused(self, texts: dict[str, str], wrong: str) -> None:
        with pytest.raises(ConfigurationError) as error:
            DebatePrompts().resolve(texts)
        assert wrong in str(error.value)

    def test_a_question_that_holds_the_placeholder_is_refused(self) -> None:
        item = TaskItem("odd", "What is {opponent}?", "12")
        config = ProtocolConfig(answers="assigned", rounds=1)
        with pytest.raises(ConfigurationError, match="item odd: the question holds"):
            play(config, [["x"], ["y"]], JudgeByIndex((Winner.A,)), item=item)


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({"seats": 1}, "protocol.seats=1: must be from 2 to 8"),
        ({"seats": 9}, "protocol.seats=9"),
        ({"seats": 3, "name": "consultancy"}, "only protocol.name=debate takes more than two"),
        ({"rounds": -1}, "protocol.rounds=-1: must be at least 0"),
        ({"rounds": 1, "name": "direct"}, "there are no speeches in protocol.name=direct"),
        ({"answers": "assigned", "name": "key"}, "protocol.name=key judges an answer of the policy"),
        ({"answers": "assigned", "rounds": 0}, "a seat would have nothing to say"),
        ({"name": "proposer_critic", "rounds": 0}, "a seat would have nothing to say"),
    ],
)
def test_protocols_that_make_no_sense_are_refused(settings: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ConfigurationError, match=wrong):
        ProtocolConfig(**settings)
