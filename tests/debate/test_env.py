"""A debate from start to end: who hears what and when, what the judge is shown, and failures that end it."""

import asyncio
import pickle

import pytest

from tests.debate.arena import (
    ITEM,
    RENDERERS,
    RIGHT,
    WRONG,
    JudgeByIndex,
    WatchingJudge,
    decode,
    hold,
    make_protocol,
    make_renderer,
    speech,
    three_turns,
)
from tests.fakes import ScriptedCompleter
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.debate.env import DebateEnv, DebateGroupBuilder
from tinker_cookbook.debate.judge_config import JudgeConfig, make_judge
from tinker_cookbook.debate.judges import DebateView, Judge, Verdict, Winner
from tinker_cookbook.debate.transcript import Seat
from tinker_cookbook.exceptions import TrainingError
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.renderers.replies import strip_stop


@pytest.fixture(params=RENDERERS)
def renderer(request: pytest.FixtureRequest) -> Renderer:
    return make_renderer(request.param)


def seats(renderer: Renderer) -> list[list[TokensWithLogprobs]]:
    return [
        three_turns(renderer, f"{RIGHT} <CONFIDENCE>0.9</CONFIDENCE>", "alice"),
        three_turns(renderer, f"{WRONG} <CONFIDENCE>0.5</CONFIDENCE>", "bob"),
    ]


class TestRounds:
    def test_each_hears_the_other_s_last_turn_and_no_other(self, renderer: Renderer) -> None:
        members = seats(renderer)
        held = hold(renderer, members, JudgeByIndex((Winner.A,)))
        first = held.protocol.first_prompt(ITEM).to_ints()
        for member, opponent in ((0, 1), (1, 0)):
            prompt = first
            for round_, injection in enumerate(held.protocol.injections):
                assert held.heard[member][round_] == prompt
                own, theirs = members[member][round_].tokens, members[opponent][round_].tokens
                prompt = injection.next_prompt(renderer, prompt, own, theirs)
            assert held.heard[member][2] == prompt
        spoken = [decode(renderer, strip_stop(renderer, turn.tokens)) for turn in members[1]]
        prompts_of_a = [decode(renderer, prompt) for prompt in held.heard[0]]
        heard = [[text in prompt for text in spoken] for prompt in prompts_of_a]
        assert heard == [[False, False, False], [True, False, False], [True, True, False]]

    def test_the_slow_and_the_quick_hear_the_same(self, renderer: Renderer) -> None:
        class Slow(ScriptedCompleter):
            """Member 0 takes its time."""

            async def __call__(self, model_input, stop, *, max_tokens=None):
                for _ in range(30 if self._key == 0 else 0):
                    await asyncio.sleep(0)
                return await super().__call__(model_input, stop, max_tokens=max_tokens)

            def fork(self, *key):
                forked = Slow(self._turns, key[-1])  # pyright: ignore[reportArgumentType]
                forked.heard = self.heard
                return forked

        judge = JudgeByIndex((Winner.A,))
        assert hold(renderer, seats(renderer), judge, Slow).heard == hold(renderer, seats(renderer), judge).heard

    def test_neighbours_debate_and_members_keep_their_seats(self, renderer: Renderer) -> None:
        members = seats(renderer) + seats(renderer)[::-1]
        held = hold(renderer, members, JudgeByIndex((Winner.A, Winner.B)))
        assert [len(t.transitions) for t in held.group.trajectories_G] == [3] * 4
        for trajectory, turns in zip(held.group.trajectories_G, members, strict=True):
            assert [t.ac for t in trajectory.transitions] == turns
            assert [t.episode_done for t in trajectory.transitions] == [False, False, True]
        assert held.group.is_trained() == [True, False, False, True]
        envs = asyncio.run(held.builder.make_envs())
        assert [env.seat for env in envs] == [Seat.A, Seat.B] * 2
        assert envs[0].transcript is envs[1].transcript is not envs[2].transcript

    def test_the_task_reward_is_that_of_round_one(self, renderer: Renderer) -> None:
        changes_mind = [speech(renderer, text) for text in (WRONG, RIGHT, RIGHT)]
        stays = [speech(renderer, text) for text in (RIGHT, WRONG, WRONG)]
        group = hold(renderer, [changes_mind, stays], JudgeByIndex((Winner.A,))).group
        assert group.get_total_rewards() == [0.0, 1.0]
        assert [[t.reward for t in trajectory.transitions] for trajectory in group.trajectories_G] == [
            [0] * 3,
            [1, 0, 0],
        ]


class TestJudging:
    def test_the_judge_sees_text_without_stops_and_who_the_debate_is(self, renderer: Renderer) -> None:
        judge = WatchingJudge([])
        hold(renderer, seats(renderer) + seats(renderer)[::-1], judge)
        first, second = sorted(judge.views, key=lambda view: view.key)
        assert (first.key, second.key) == ((4, 2, 0), (4, 2, 1))
        assert first.context == ITEM.question
        assert first.rounds_a == [f"{RIGHT} <CONFIDENCE>0.9</CONFIDENCE>", "alice rebuts", "alice closes"]
        assert first.rounds_b == [f"{WRONG} <CONFIDENCE>0.5</CONFIDENCE>", "bob rebuts", "bob closes"]
        assert (first.confidence_a, first.confidence_b) == (0.9, 0.5)
        assert (first.reward_a, first.reward_b) == (1.0, 0.0)
        assert second.rounds_a == first.rounds_b and second.reward_b == 1.0

    def test_a_judge_that_fails_ends_the_debate_with_its_own_error(self, renderer: Renderer) -> None:
        class Down(Judge):
            async def __call__(self, view: DebateView) -> Verdict:
                raise TrainingError("the judge is down")

        with pytest.raises(TrainingError, match="the judge is down"):
            hold(renderer, seats(renderer), Down())

    def test_a_debater_that_fails_ends_the_debate_though_the_other_waits_for_it(self, renderer: Renderer) -> None:
        alice, bob = seats(renderer)
        with pytest.raises(IndexError):  # bob has nothing to say in round 3
            hold(renderer, [alice, bob[:2]], JudgeByIndex((Winner.A,)))


@pytest.mark.parametrize("name", ["mock", "confidence", "scripted:truth"])
def test_builders_pickle(name: str) -> None:
    judge = asyncio.run(make_judge(JudgeConfig(name=name)))
    builder = DebateGroupBuilder(make_protocol(make_renderer("qwen3_instruct")), ITEM, judge, 2, (0, 0))
    copy = pickle.loads(pickle.dumps(builder))
    assert (copy.item, copy.num_debates, copy.key) == (ITEM, 2, (0, 0))
    envs = asyncio.run(copy.make_envs())
    assert len(envs) == 4 and all(isinstance(env, DebateEnv) for env in envs)
    assert copy.protocol.injections == builder.protocol.injections
